"""Budget of prompt tokens per step, a balance between running streams and waiting prompts."""

import math
from dataclasses import dataclass

from services.engine.scheduling.step_cost import StepCost
from services.engine.scheduling.step_plan import SchedulerLimits

__all__ = ["Allowance", "Backlog", "PromptBudget"]

_SHARED_STEP_SECONDS = 0.8
"""Longest step that several prompts share. In a longer one all would wait for the last prompt; in
many short ones they would end far apart, and later decode in small batches"""
_SHARED_STEP_MIN_TOKENS = 256
"""Fewest tokens of such a step: smaller steps read the weights too often"""
_STREAMS_PER_PROMPT = 3
"""Short prompts precede streams if there are at most this many streams per prompt"""
_SHORT_PROMPT_DECODE_STEPS = 16
"""A prompt is short if it takes at most as long as this many steps without prompts"""
_LONG_PROMPT_WEIGHT, _SHORT_PROMPT_WEIGHT = 4, 24
"""Streams that each prompt but the first outweighs in a mixed step, for long and short prompts"""
_SHORT_PROMPT_MIXED_STEPS = 4
"""Mixed steps per prompt up to which the short prompts' weight applies; it falls from there"""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Prompts that the next step could compute."""

    count: int
    tokens: int
    """Uncomputed tokens of all these prompts"""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Prompt tokens that a step may compute."""

    tokens: int
    slack: int = 0
    """Further tokens, if they complete a prompt"""


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
        budget = self._cost.prompt_tokens(decode_tokens, self._factor)
        if budget is None:  # the cost of decoding must be measured first
            return Allowance(0)
        if self._precedes_streams(backlog, streams, decode_tokens):
            return self._allow_alone(backlog)
        return Allowance(self._mixed_step_tokens(streams, decode_tokens, budget, backlog))

    def _allow_alone(self, backlog: Backlog) -> Allowance:
        """Split the backlog into equal steps, and allow the next one."""
        if backlog.count == 1:
            return Allowance(self._most)
        largest = max(self._cost.tokens_within(_SHARED_STEP_SECONDS), _SHARED_STEP_MIN_TOKENS)
        steps = max(1, math.ceil(backlog.tokens / largest))
        tokens = min(math.ceil(backlog.tokens / steps), self._most)
        return Allowance(tokens, min(tokens // 4, self._most - tokens))

    def _precedes_streams(self, backlog: Backlog, streams: int, decode_tokens: int) -> bool:
        """Return whether a few streams should wait for many short prompts.

        All of them then decode together the sooner.
        """
        if backlog.count == 1 or streams > _STREAMS_PER_PROMPT * backlog.count:
            return False
        prompt_seconds = self._cost.prompt_seconds(backlog.tokens / backlog.count)
        decode_seconds = self._cost.decode_seconds(decode_tokens)
        return prompt_seconds <= _SHORT_PROMPT_DECODE_STEPS * decode_seconds

    def _mixed_step_tokens(
        self, streams: int, decode_tokens: int, budget: int, backlog: Backlog
    ) -> int:
        """Return the prompt tokens of a mixed step.

        The more prompts wait, the longer the step may delay running streams. budget: tokens of a
        step that is longer by no more than the factor.
        """
        steps = max(backlog.tokens / backlog.count / max(budget, 1), 1e-9)
        weight = _SHORT_PROMPT_WEIGHT * _SHORT_PROMPT_MIXED_STEPS / steps
        weight = min(max(weight, _LONG_PROMPT_WEIGHT), _SHORT_PROMPT_WEIGHT)
        factor = self._factor * max(1.0, weight * (backlog.count - 1) / streams)
        budget = self._cost.prompt_tokens(decode_tokens, factor) or 0
        # Round down to full tiles, but leave prompts at least one: none waits forever.
        rows = (decode_tokens + budget) // self._rows * self._rows
        least = (-(-decode_tokens // self._rows) + 1) * self._rows
        return min(max(rows, least) - decode_tokens, self._most)
