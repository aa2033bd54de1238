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
        self._window = settings.penalty_window
        self._first = prompt_length
        """Index of the first token that is counted"""
        if self._window is not None:
            self._first = max(0, prompt_length - self._window)
        self._counted = self._first
        """Index behind the last token that is counted so far"""
        self._prompt_ids: npt.NDArray[np.int64] | None = None
        self._slots: dict[int, int] = {}
        """Index into `_ids` and `_counts`, by counted id"""
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
        if self.repetition != 1 and self._prompt_ids is None and self._window is None:
            self._prompt_ids = np.unique(tokens[: self._counted]).astype(np.int64)
        self._count(tokens[self._counted :], 1)
        self._counted = len(tokens)
        if self._window is not None:
            first = max(0, len(tokens) - self._window)
            self._count(tokens[self._first : first], -1)
            self._first = first

    @property
    def seen(self) -> npt.NDArray[np.int64]:
        """Ids that the repetition penalty counts; one of prompt and output may occur twice."""
        counted, _ = self._present()
        if self._prompt_ids is None:
            return counted
        return np.concatenate((self._prompt_ids, counted))

    @property
    def counted(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Distinct ids, and the sum of their frequency and presence penalties.

        They are the generated ids, or with a window those in it.
        """
        settings, (ids, counts) = self._settings, self._present()
        amounts = settings.frequency_penalty * counts + settings.presence_penalty
        return ids, amounts.astype(np.float32)

    def _present(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the distinct ids that are counted, and their numbers."""
        ids, counts = self._ids[: len(self._slots)], self._counts[: len(self._slots)]
        if self._window is None:
            return ids, counts
        is_present = counts > 0
        return ids[is_present], counts[is_present]

    def _count(self, tokens: npt.NDArray[np.int32], amount: int) -> None:
        """Add an amount to the number of each token. tokens: int32 [count]."""
        if len(tokens) == 1:
            self._add(int(tokens[0]), amount)
            return
        ids, numbers = np.unique(tokens, return_counts=True)
        for token, number in zip(ids.tolist(), numbers.tolist(), strict=True):
            self._add(token, amount * number)

    def _add(self, token: int, amount: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = token
        self._counts[slot] += amount
