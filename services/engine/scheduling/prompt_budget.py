"""Budget of prompt tokens per step: a balance between running streams and waiting prompts."""

import math
from dataclasses import dataclass

from services.engine.scheduling.step_cost import StepCost
from services.engine.scheduling.step_plan import SchedulerLimits

__all__ = ["Allowance", "Backlog", "PromptBudget"]

_SHARED_STEP_SECONDS = 0.9
"""Longest step, in seconds, that several prompts share. In a longer step, all of them wait for the
last; with many short steps they complete far apart, and small batches decode later"""
_SHARED_STEP_MIN_TOKENS = 256
"""Fewest prompt tokens of a step that prompts share; smaller steps read the weights too often"""
_STREAMS_PER_PROMPT = 3
"""Most streams per prompt with which short prompts precede streams"""
_SHORT_PROMPT_DECODE_STEPS = 16
"""Longest time of a short prompt, in steps without prompts"""
_SHORT_PROMPT_WEIGHT, _LONG_PROMPT_WEIGHT = 24, 4
"""Number of streams that each prompt beyond the first few outweighs in a mixed step"""
_MOST_LONG_PROMPTS = 8
"""Most long prompts with which a step stays within `mixed_step_factor`"""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Prompts that the next step could compute."""

    count: int
    tokens: int
    """Number of uncomputed tokens of all these prompts"""
    pooled: int = 0
    """Number of these prompts that only make vectors: no stream gains if they come first"""

    @property
    def joining(self) -> int:
        """Number of prompts that will decode with the streams."""
        return max(self.count - self.pooled, 0)


@dataclass(frozen=True, slots=True)
class Allowance:
    """Prompt tokens that a step may compute."""

    tokens: int
    slack: int = 0
    """Number of further tokens that the step may compute if they complete a prompt"""


class PromptBudget:
    """Policy for the number of prompt tokens in a step."""

    def __init__(self, cost: StepCost, limits: SchedulerLimits) -> None:
        self._cost = cost
        self._most = limits.max_step_tokens
        self._factor = limits.mixed_step_factor
        self._rows = limits.rows_at_once

    def allow(self, streams: int, decode_tokens: int, backlog: Backlog) -> Allowance:
        """Return the prompt tokens of a step in which `streams` decode `decode_tokens` tokens."""
        if backlog.count == 0:
            return Allowance(0)
        if streams == 0:
            return self._allow_alone(backlog)
        if self._cost.prompt_tokens(decode_tokens, self._factor) is None:
            return Allowance(0)  # a step without prompts measures the cost of decoding first
        if self._precedes_streams(backlog, streams, decode_tokens):
            return self._allow_alone(backlog)
        return Allowance(self._mixed_step_tokens(streams, decode_tokens, backlog))

    def _allow_alone(self, backlog: Backlog) -> Allowance:
        """Split the backlog into equal steps, and allow the next one."""
        if backlog.count == 1:
            return Allowance(self._most)
        largest = max(self._cost.tokens_within(_SHARED_STEP_SECONDS), _SHARED_STEP_MIN_TOKENS)
        steps = max(1, math.ceil(backlog.tokens / largest))
        tokens = min(math.ceil(backlog.tokens / steps), self._most)
        return Allowance(tokens, min(tokens // 4, self._most - tokens))

    def _precedes_streams(self, backlog: Backlog, streams: int, decode_tokens: int) -> bool:
        """Return whether few streams wait for many short prompts, to decode with them sooner."""
        is_few = 1 < backlog.joining >= streams / _STREAMS_PER_PROMPT
        return is_few and self._is_short(backlog, decode_tokens)

    def _is_short(self, backlog: Backlog, decode_tokens: int) -> bool:
        mean = self._cost.prompt_seconds(backlog.tokens / backlog.count)
        return mean <= _SHORT_PROMPT_DECODE_STEPS * self._cost.decode_seconds(decode_tokens)

    def _mixed_step_tokens(self, streams: int, decode_tokens: int, backlog: Backlog) -> int:
        """Return the prompt tokens of a mixed step.

        The step may take `mixed_step_factor` times as long, or longer while many prompts wait.
        """
        if self._is_short(backlog, decode_tokens):
            weight = _SHORT_PROMPT_WEIGHT * (backlog.joining - 1)
        else:
            weight = _LONG_PROMPT_WEIGHT * max(0, backlog.joining - _MOST_LONG_PROMPTS)
        factor = self._factor * max(1.0, weight / streams)
        budget = self._cost.prompt_tokens(decode_tokens, factor) or 0
        # Round down to full tiles, but at least to one tile, so that no prompt waits forever.
        rows = (decode_tokens + budget) // self._rows * self._rows
        least = (-(-decode_tokens // self._rows) + 1) * self._rows
        return min(max(rows, least) - decode_tokens, self._most)
