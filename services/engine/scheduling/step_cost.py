"""Cost model of steps, learned from the steps that have run.

A running stream notices another request's prompt only by longer steps. So a step with decodes
takes as many prompt tokens as keep it within a multiple of a step without prompts. Both costs are
measured continuously, so the bound holds on any machine, model and context.
"""

import math

__all__ = ["StepCost"]

_SMOOTHING = 0.3
"""Weight of a new measurement in an estimate; a measurement counts as twice the estimate at most"""
_FRESH_STEPS = 16
"""Steps after which the cost of decoding is measured again: contexts grow"""


class StepCost:
    """Estimated seconds of a decode step, by batch size, and of a further prompt token."""

    def __init__(self, measurable_tokens: int) -> None:
        """measurable_tokens: fewest prompt tokens of a step whose time shows the cost of one; the
        cost of fewer is lost in noise."""
        self._measurable_tokens = measurable_tokens
        self._steps = 0
        self._last_decode_step = 0
        """Number of the latest step without prompts"""
        self._decode: dict[int, float] = {}
        """Seconds of a step without prompts, by size class"""
        self._prompt_token: float | None = None
        """Seconds that a prompt token adds to a step; None = not measured"""

    def learn(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """Update the estimates with a step. decodes: its tokens of running streams."""
        self._steps += 1
        if prompt_tokens == 0:
            size = _size_class(decodes)
            estimate = self._decode.get(size, seconds)
            # Never exceed the newest time: overestimates admit too many prompt tokens.
            self._decode[size] = min(seconds, _smooth(estimate, seconds))
            self._last_decode_step = self._steps
        elif prompt_tokens >= self._measurable_tokens and (decodes or self._prompt_token is None):
            alone = self.decode_seconds(decodes) if decodes else 0.0
            added = max(seconds - alone, 1e-9) / prompt_tokens
            known = self._prompt_token
            self._prompt_token = added if known is None else _smooth(known, added)

    def prompt_tokens(self, decodes: int, factor: float) -> int | None:
        """Return the prompt tokens that make a step of `decodes` take `factor` times as long.

        None asks for a step without prompts first, once in a few steps, to measure its time.
        """
        if not self._decode or self._steps - self._last_decode_step >= _FRESH_STEPS:
            return None
        if self._prompt_token is None:
            return self._measurable_tokens
        return int((factor - 1) * self.decode_seconds(decodes) / self._prompt_token)

    def tokens_within(self, seconds: float) -> int:
        """Return the prompt tokens that add `seconds` to a step; 0 if not measured."""
        return int(seconds / self._prompt_token) if self._prompt_token else 0

    def prompt_seconds(self, tokens: float) -> float:
        """Return the seconds that prompt tokens add to a step; 0 if not measured."""
        return tokens * (self._prompt_token or 0.0)

    def decode_seconds(self, decodes: int) -> float:
        """Return the seconds of a step without prompts, from the nearest size measured."""
        wanted = _size_class(decodes)
        nearest = min(self._decode, key=lambda size: abs(size - wanted), default=None)
        return 0.0 if nearest is None else self._decode[nearest]


def _size_class(decodes: int) -> int:
    """Return the size class of a batch: four per doubling; steps of a class cost about the same."""
    return int(4 * math.log2(decodes)) if decodes else -1


def _smooth(estimate: float, measured: float) -> float:
    return estimate + _SMOOTHING * (min(measured, 2 * estimate) - estimate)
