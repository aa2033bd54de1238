"""How long steps take, learnt from those that were run, and what that leaves for prompts.

A stream notices a prompt of somebody else's only by the steps that it lengthens. So a step that
decodes takes as many prompt tokens as keep it within some multiple of a step that only decodes.
Both costs are measured as they come, so that the limit holds on any machine, model and context.
"""

import math

__all__ = ["StepCost"]

_PACE = 0.3
"""Share of a new measurement in an estimate; a hiccup counts for twice the estimate at most"""
_FRESH_STEPS = 16
"""Steps after which the cost of decoding is measured anew: contexts grow"""


class StepCost:
    """Estimates the seconds of a decode step, by batch size, and those that a prompt token adds."""

    def __init__(self, measurable_tokens: int) -> None:
        """measurable_tokens: the fewest prompt tokens of a step whose time tells what one of them
        adds; what fewer add is lost in the time of the rest."""
        self._measurable_tokens = measurable_tokens
        self._steps = 0
        self._last_decode_step = 0
        """The latest step without prompts"""
        self._decode: dict[int, float] = {}
        """By size class"""
        self._prompt_token: float | None = None

    def learn(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """What a step took that computed `decodes` tokens of streams and so many of prompts."""
        self._steps += 1
        if prompt_tokens == 0:
            size = _size_class(decodes)
            estimate = self._decode.get(size, seconds)
            # what was faster once can be; too high an estimate would hurt the streams
            self._decode[size] = min(seconds, _towards(estimate, seconds))
            self._last_decode_step = self._steps
        elif prompt_tokens >= self._measurable_tokens and (decodes or self._prompt_token is None):
            alone = self.decode_seconds(decodes) if decodes else 0.0
            added = max(seconds - alone, 1e-9) / prompt_tokens
            known = self._prompt_token
            self._prompt_token = added if known is None else _towards(known, added)

    def prompt_tokens(self, decodes: int, factor: float) -> int | None:
        """Prompt tokens that make a step take `factor` times as long as `decodes` tokens alone.

        None where that has to be measured first, by a step without prompts: one in a few.
        """
        if not self._decode or self._steps - self._last_decode_step >= _FRESH_STEPS:
            return None
        if self._prompt_token is None:
            return self._measurable_tokens
        return int((factor - 1) * self.decode_seconds(decodes) / self._prompt_token)

    def tokens_within(self, seconds: float) -> int:
        """Prompt tokens that add so much to a step; 0 where that was not measured yet."""
        return int(seconds / self._prompt_token) if self._prompt_token else 0

    def prompt_seconds(self, tokens: float) -> float:
        """What so many prompt tokens add to a step; 0 where that was not measured yet."""
        return tokens * (self._prompt_token or 0.0)

    def decode_seconds(self, decodes: int) -> float:
        """A step of so many tokens without prompts: that of the nearest size measured."""
        wanted = _size_class(decodes)
        nearest = min(self._decode, key=lambda size: abs(size - wanted), default=None)
        return 0.0 if nearest is None else self._decode[nearest]


def _size_class(decodes: int) -> int:
    """Four to each doubling of the batch: what is in one costs about the same."""
    return int(4 * math.log2(decodes)) if decodes else -1


def _towards(estimate: float, measured: float) -> float:
    return estimate + _PACE * (min(measured, 2 * estimate) - estimate)
