"""Prompt tokens of a step: as many as the streams beside them, and the prompts themselves, bear."""

import math
from dataclasses import dataclass

from services.engine.scheduling.step_cost import StepCost

__all__ = ["Allowance", "Crowd", "PromptBudget"]

_CROWD_SECONDS = 0.9
"""Longest step that several prompts share. A single step would make all of them wait for the last;
many short steps would complete them far apart, and small batches would decode later"""
_LEAST_CROWD_TOKENS = 256
"""Fewest tokens of such a step: smaller steps would read the weights too often"""
_STREAMS_PER_PROMPT = 3
"""Short prompts go first while there are at most this many streams for each of them"""
_SHORT_STEPS = 16
"""A prompt is short if it takes at most as long as this many steps that only decode"""
_SHORT_CROWD, _LONG_CROWD = 24, 4
"""Streams that each prompt beyond the first few outweighs in a step that also decodes"""
_FEW_LONG = 8
"""Long prompts that do not slow the streams down beyond the factor"""


@dataclass(frozen=True, slots=True)
class Crowd:
    """The prompts that could go on in a step."""

    count: int
    tokens: int
    """Of all of them, still to be computed"""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a step may compute of prompts."""

    tokens: int
    slack: int = 0
    """Tokens beyond that, if they complete a prompt"""


class PromptBudget:
    """Decides how many prompt tokens a step takes."""

    def __init__(
        self, cost: StepCost, max_step_tokens: int, mixed_step_factor: float, rows_at_once: int
    ) -> None:
        """max_step_tokens: of any step. mixed_step_factor: how many times as long as without
        prompts a step may take that also decodes. rows_at_once: a product of fewer rows takes as
        long as one of so many."""
        self._cost = cost
        self._most = max_step_tokens
        self._factor = mixed_step_factor
        self._rows = rows_at_once

    def allow(self, streams: int, decode_tokens: int, crowd: Crowd) -> Allowance:
        """Prompt tokens for a step in which `streams` sequences decode `decode_tokens` tokens."""
        if crowd.count == 0:
            return Allowance(0)
        if streams == 0:
            return self._step_of(crowd)
        if self._cost.prompt_tokens(decode_tokens, self._factor) is None:
            return Allowance(0)  # a step without prompts measures the cost of decoding first
        if self._goes_first(crowd, streams, decode_tokens):
            return self._step_of(crowd)
        return Allowance(self._beside(streams, decode_tokens, crowd))

    def _step_of(self, crowd: Crowd) -> Allowance:
        """The next of the equal steps that a crowd is computed in."""
        if crowd.count == 1:
            return Allowance(self._most)
        largest = max(self._cost.tokens_within(_CROWD_SECONDS), _LEAST_CROWD_TOKENS)
        steps = max(1, math.ceil(crowd.tokens / largest))
        tokens = min(math.ceil(crowd.tokens / steps), self._most)
        return Allowance(tokens, min(tokens // 4, self._most - tokens))

    def _goes_first(self, crowd: Crowd, streams: int, decode_tokens: int) -> bool:
        """Return whether few streams wait for many short prompts, to decode all together sooner."""
        return 1 < crowd.count >= streams / _STREAMS_PER_PROMPT and self._is_short(
            crowd, decode_tokens
        )

    def _is_short(self, crowd: Crowd, decode_tokens: int) -> bool:
        mean = self._cost.prompt_seconds(crowd.tokens / crowd.count)
        return mean <= _SHORT_STEPS * self._cost.decode_seconds(decode_tokens)

    def _beside(self, streams: int, decode_tokens: int, crowd: Crowd) -> int:
        """Return the tokens that slow the streams down by the factor, or by more for a crowd."""
        if self._is_short(crowd, decode_tokens):
            weight = _SHORT_CROWD * (crowd.count - 1)
        else:
            weight = _LONG_CROWD * max(0, crowd.count - _FEW_LONG)
        factor = self._factor * max(1.0, weight / streams)
        budget = self._cost.prompt_tokens(decode_tokens, factor) or 0
        # Round down to full tiles, but leave prompts at least one: they go on however many decode.
        rows = (decode_tokens + budget) // self._rows * self._rows
        least = (-(-decode_tokens // self._rows) + 1) * self._rows
        return min(max(rows, least) - decode_tokens, self._most)
