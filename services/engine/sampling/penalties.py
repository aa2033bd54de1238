"""Token statistics of one sequence for repetition, frequency, presence and DRY penalties."""

import numpy as np
import numpy.typing as npt

from services.engine.checked_request import SamplingSettings
from services.engine.sampling.dry import Repetitions

__all__ = ["Penalties"]


class Penalties:
    """Penalties that a sequence's tokens so far put on the next token's logits.

    Updates are incremental: a step costs the new tokens, not the whole sequence.
    """

    def __init__(self, settings: SamplingSettings, prompt_length: int) -> None:
        self._settings = settings
        self._counted = prompt_length
        """Number of the sequence's tokens that are counted so far"""
        self._prompt_ids: npt.NDArray[np.int64] | None = None
        self._slots: dict[int, int] = {}
        """Index into `_ids` and `_counts`, by generated id"""
        self._ids = np.zeros(16, dtype=np.int64)
        self._counts = np.zeros(16, dtype=np.float32)
        self.repetition = settings.repetition_penalty
        self.repetitions = Repetitions(settings.dry) if settings.dry is not None else None
        self.counts_tokens = settings.frequency_penalty != 0 or settings.presence_penalty != 0
        self.tokens = np.zeros(0, dtype=np.int32)
        """The whole sequence: int32 [length], a view"""

    def update(self, tokens: npt.NDArray[np.int32]) -> None:
        """Count the new tokens. tokens: int32 [length], prompt and generated ids."""
        self.tokens = tokens
        if self.repetitions is not None:
            self.repetitions.update(tokens)
        if self.repetition != 1 and self._prompt_ids is None:
            self._prompt_ids = np.unique(tokens[: self._counted]).astype(np.int64)
        for token in tokens[self._counted :].tolist():
            self._count(token)
        self._counted = len(tokens)

    @property
    def seen(self) -> npt.NDArray[np.int64]:
        """Ids of the prompt, then of the output; an id that is in both occurs twice."""
        generated = self._ids[: len(self._slots)]
        if self._prompt_ids is None:
            return generated
        return np.concatenate((self._prompt_ids, generated))

    @property
    def generated(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Distinct generated ids, and the sum of their frequency and presence penalties."""
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
