"""Plan of one step: the sequences that decode and the chunks of tokens to compute."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from services.engine.scheduling.sequence import Sequence

__all__ = ["Chunk", "StepPlan"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence that a step computes."""

    sequence: Sequence
    start: int
    """Index of the first token"""
    count: int
    draft: Items[int] = ()
    """Draft tokens, the last of `count`; they are not part of the sequence yet"""
    num_outputs: int = 1
    """Last tokens of the chunk whose hidden states the step returns"""

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The batch of one step: first `decodes`, then `chunks`."""

    decodes: Items[Sequence]
    """Sequences whose newest token is computed, one row each"""
    chunks: Items[Chunk]
    """Newest tokens with draft tokens, then prompts"""
    decode_tokens: int
    """Newest tokens and draft tokens"""
    prompt_tokens: int
    """All other tokens"""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.decodes and not self.chunks
