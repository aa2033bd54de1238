"""Plan of one step, and its limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from services.engine.scheduling.draft_plan import DraftLimits
from services.engine.scheduling.sequence import TokenSequence

__all__ = ["Chunk", "SchedulerLimits", "StepPlan"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of a step."""

    max_running: int
    """Most sequences that hold blocks at once"""
    max_step_tokens: int
    """Most prompt tokens of a step"""
    mixed_step_factor: float
    """Longest time of a step with decodes and prompts, as a multiple of its time without prompts"""
    rows_at_once: int
    """Number of rows of a full tile; fewer rows take as long, so steps are filled to a multiple"""
    speculate: bool = False
    """True if n-grams propose draft tokens"""
    keeps_images_whole: bool = False
    """True if a step computes all tokens of an image, because they see each other"""
    keeps_prompts_whole: bool = False
    """True if a step computes all tokens of a prompt, because they see each other"""
    max_logit_rows: int = 256
    """Most rows of logits of a step, by the memory for them"""
    prompts_have_fixed_cost: bool = False
    """True if prompts add a fixed time to a step besides the time of their tokens, as on a GPU,
    which computes padding, and launches long steps kernel by kernel"""
    draft: DraftLimits | None = None
    """Limits of the draft model; None = there is none"""

    @property
    def speculates(self) -> bool:
        """True if any sequence may have draft tokens."""
        return self.speculate or self.draft is not None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence that a step computes."""

    sequence: TokenSequence
    start: int
    """Index of the first token"""
    count: int
    draft: Sequence[int] = ()
    """Draft tokens, the last tokens of the chunk, which are not part of the sequence yet"""
    num_outputs: int = 1
    """Number of the chunk's last tokens whose hidden states the step returns"""

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The batch of one step: first `decodes`, then `chunks`."""

    decodes: Sequence[TokenSequence]
    """Sequences whose newest token is computed, one row each"""
    chunks: Sequence[Chunk]
    """Newest tokens with draft tokens or after a rejected draft, then prompts"""
    decode_tokens: int
    """Number of newest tokens and draft tokens"""
    prompt_tokens: int
    """Number of all other tokens"""

    @property
    def streams(self) -> int:
        """Number of sequences whose newest token is computed."""
        ends = accumulate((chunk.count for chunk in self.chunks), initial=len(self.decodes))
        return len(self.decodes) + sum(end < self.decode_tokens for end in ends)

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks
