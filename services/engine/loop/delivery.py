"""Delivery of a beam search's result, within the credit that the client grants."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.engine.messages import FinishCause, Score
from services.engine.scheduling.beam_search import BeamResult

__all__ = ["Delivery"]


@dataclass(slots=True, eq=False)
class Delivery:
    """The result of one sequence of a beam search, and the number of its tokens that were sent."""

    credit: int | None
    """Number of tokens that may still be sent; None = unlimited"""
    is_cancelled: bool = False
    """True if the client wants no result for this sequence"""
    sent: int = 0
    _tokens: Sequence[tuple[int, Score | None]] = ()
    _cause: FinishCause | None = None

    def begin(self, result: BeamResult) -> None:
        """Take over the result once the search is over."""
        self._tokens, self._cause = result.tokens, result.cause

    @property
    def cause(self) -> FinishCause | None:
        """Cause of the sequence's end; None while the search goes on."""
        return FinishCause.CANCELLED if self.is_cancelled else self._cause

    @property
    def end_id(self) -> int | None:
        """Id that ended the sequence, for EOS and STOP_TOKEN."""
        is_ended_by_id = self.cause in (FinishCause.EOS, FinishCause.STOP_TOKEN)
        return self._tokens[-1][0] if is_ended_by_id else None

    @property
    def is_complete(self) -> bool:
        """True if all tokens of the result were sent."""
        return self.is_cancelled or self.sent == len(self._tokens)

    def take(self, most: int) -> Iterator[tuple[int, int, Score | None]]:
        """Yield the next tokens for which there is credit, with their positions and scores."""
        end = self.sent + most
        while not self.is_complete and self.credit != 0 and self.sent < end:
            position = self.sent
            self.sent += 1
            if self.credit is not None:
                self.credit -= 1
            yield position, *self._tokens[position]
