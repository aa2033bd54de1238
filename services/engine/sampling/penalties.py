"""Penalties on tokens that were there before: what they need to know of a sequence."""

import numpy as np
import numpy.typing as npt

from services.engine.messages import SamplingSettings
from services.engine.sampling.dry import Repetitions

__all__ = ["Penalties"]


class Penalties:
    """What a sequence's tokens so far take from the logits of the next.

    Follows the sequence as it grows, so that a step costs what is new and not the whole sequence.
    """

    def __init__(self, settings: SamplingSettings, prompt_length: int) -> None:
        self._settings = settings
        self._followed = prompt_length
        self._prompt_ids: npt.NDArray[np.int64] | None = None
        self._slots: dict[int, int] = {}
        """By generated id, its place in the two arrays"""
        self._ids = np.zeros(16, dtype=np.int64)
        self._counts = np.zeros(16, dtype=np.float32)
        self.repetition = settings.repetition_penalty
        self.repetitions = Repetitions(settings.dry) if settings.dry is not None else None
        self.counts_tokens = settings.frequency_penalty != 0 or settings.presence_penalty != 0
        self.tokens = np.zeros(0, dtype=np.int32)
        """The sequence: int32 [length], a view"""

    def follow(self, tokens: npt.NDArray[np.int32]) -> None:
        """Take in what was added. tokens: int32 [length], prompt and generated ids."""
        self.tokens = tokens
        if self.repetitions is not None:
            self.repetitions.follow(tokens)
        if self.repetition != 1 and self._prompt_ids is None:
            self._prompt_ids = np.unique(tokens[: self._followed]).astype(np.int64)
        for token in tokens[self._followed :].tolist():
            self._count(token)
        self._followed = len(tokens)

    @property
    def seen(self) -> npt.NDArray[np.int64]:
        """Ids in prompt and output; those in both stand here twice."""
        generated = self._ids[: len(self._slots)]
        if self._prompt_ids is None:
            return generated
        return np.concatenate((self._prompt_ids, generated))

    @property
    def generated(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Generated ids, each once, and what their number costs them."""
        settings, count = self._settings, len(self._slots)
        amounts = settings.frequency_penalty * self._counts[:count] + settings.presence_penalty
        return self._ids[:count], amounts.astype(np.float32)

    def _count(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = token
        self._counts[slot] += 1
