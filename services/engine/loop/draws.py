"""Draws of tokens: planned, launched, and held until they are allowed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from services.engine.sampling.pending_tokens import PendingTokens
from services.engine.scheduling.sequence import LogitsHold, SequenceState, TokenSequence

__all__ = ["Draw", "HeldLogits", "LaunchedDraws"]


@dataclass(slots=True, eq=False)
class Draw:
    """One token to draw from one row of logits. Not frozen, because each token makes one."""

    sequence: TokenSequence
    row: int
    """Index of the row in the step's hidden states, which have one row for each kept token"""
    position: int
    """Position of the token to draw, counted from the end of the original prompt"""
    assumed: int | None = None
    """Token that the row assumes in front of `position`; None = that token was certain"""

    @property
    def runs_ahead(self) -> bool:
        """True if the device can draw the token before the host has the preceding one."""
        return self.sequence.request.runs_ahead and self.sequence.has_credit

    @property
    def is_next(self) -> bool:
        """True if the sequence has reached `position`, through the assumed token."""
        sequence = self.sequence
        if sequence.state is SequenceState.FINISHED or sequence.position != self.position:
            return False
        return self.assumed is None or int(sequence.tokens[-1]) == self.assumed


class HeldLogits(NamedTuple):
    """Logits of a sequence that waits for a mask or credit."""

    draws: Sequence[Draw]
    logits: Tensor
    """float32 [draws, vocabulary]"""
    hold: LogitsHold
    """Claim of the sequence on the logits"""

    @property
    def sequence(self) -> TokenSequence:
        return self.draws[0].sequence

    @property
    def is_valid(self) -> bool:
        """False once the sequence has drawn, ended or been preempted."""
        return self.sequence.logits_hold is self.hold

    @property
    def draft(self) -> list[int]:
        """Draft tokens that the logits verify."""
        return [draw.assumed for draw in self.draws if draw.assumed is not None]

    @property
    def allowed(self) -> tuple[list[Draw], Tensor]:
        """Draws up to the sequence's last mask, with their logits."""
        draws = [draw for draw in self.draws if self.sequence.may_draw_at(draw.position)]
        return draws, self.logits[: len(draws)]

    @property
    def continues(self) -> bool:
        """True if the next step may compute the drawn token before the host has it.

        Otherwise the host must take the tokens first, because they verify draft tokens, or because
        the next step can compute forced or expected tokens behind them.
        """
        sequence = self.sequence
        is_followed = len(sequence.forced) > 1 or sequence.speculation.has_prediction
        is_followed &= sequence.request.draws_independently
        return len(self.draws) == 1 and not is_followed


class LaunchedDraws(NamedTuple):
    """Draws whose tokens are being copied from the device to the host."""

    draws: list[Draw]
    """Draws; their `assumed` is set if the token in front of them turns out wrong"""
    tokens: PendingTokens
    held: Sequence[HeldLogits] = ()
    """Logits of the tokens, by sequence, if the sequences do not continue before the host has the
    tokens. Tokens of logits that are not valid by then are discarded"""
