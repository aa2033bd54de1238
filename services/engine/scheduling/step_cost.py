"""Cost model of steps, which is fitted to the steps that have run.

A running stream notices another request's prompt only by longer steps. So a step with decodes
takes as many prompt tokens as keep it within a multiple of a step without prompts. Both costs are
measured continuously, so the bound holds on any machine, model and context.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from functools import cache

__all__ = ["StepCost", "StepTimes"]

_SMOOTHING = 0.3
"""Weight of a new measurement in an estimate; a measurement counts as twice the estimate at most"""
_LEAST_SECONDS = 1e-9
"""Least seconds of a step: a clock may be too coarse to show any"""
_FRESH_STEPS = 16
"""Steps after which the cost of decoding is measured again: contexts grow"""
_LEAST_SPREAD = 0.2
"""Least standard deviation of the prompt tokens of steps, as a share of their mean, with which the
times of steps show the fixed part of the cost"""
_LEAST_SHARE = 0.1
"""Least share of the time of prompt tokens that is not fixed"""


class StepCost:
    """Estimated seconds of a decode step, by batch size, and of its prompt tokens."""

    def __init__(self, measurable_tokens: int, prompts_have_fixed_cost: bool = False) -> None:
        """measurable_tokens: fewest prompt tokens of a step whose time shows the cost of a token;
        the cost of fewer is lost in noise. prompts_have_fixed_cost: see SchedulerLimits."""
        self._measurable_tokens = measurable_tokens
        self._steps = 0
        self._last_decode_step = 0
        """Number of the latest step without prompts"""
        self._decode = StepTimes()
        """Seconds of a step without prompts"""
        self._prompts: _PromptCost = _AffineCost() if prompts_have_fixed_cost else _LinearCost()
        """Seconds that prompt tokens add to a step"""

    def learn(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """Update the estimates with a step. decodes: number of its tokens of running streams."""
        self._steps += 1
        if prompt_tokens == 0:
            self._decode.learn(decodes, seconds)
            self._last_decode_step = self._steps
        elif prompt_tokens >= self._measurable_tokens and (decodes or not self._prompts.is_known):
            alone = self.decode_seconds(decodes) if decodes else 0.0
            self._prompts.learn(prompt_tokens, max(seconds - alone, 1e-9))

    def prompt_tokens(self, decodes: int, factor: float) -> int | None:
        """Return the prompt tokens that make a step of `decodes` take `factor` times as long.

        None, once in a few steps, asks for a step without prompts first, to measure its time.
        """
        if not self._decode or self._steps - self._last_decode_step >= _FRESH_STEPS:
            return None
        if not self._prompts.is_known:
            return self._measurable_tokens
        return self._prompts.tokens_within((factor - 1) * self.decode_seconds(decodes))

    def tokens_within(self, seconds: float) -> int:
        """Return the prompt tokens that add `seconds` to a step; 0 if not measured."""
        return self._prompts.tokens_within(seconds) if self._prompts.is_known else 0

    def prompt_seconds(self, tokens: float) -> float:
        """Return the seconds that prompt tokens add to a step; 0 if not measured."""
        return self._prompts.seconds(tokens) if self._prompts.is_known else 0.0

    def decode_seconds(self, decodes: int) -> float:
        """Return the seconds of a step without prompts, from the nearest size measured."""
        return self._decode.nearest(decodes) or 0.0


class StepTimes:
    """Estimated seconds of steps by their rows, in size classes of which four make a doubling."""

    def __init__(self, *, averages: bool = False) -> None:
        """averages: estimate the mean, and not what steps take if no other program runs."""
        self._seconds: dict[int, float] = {}
        self._sizes: list[int] = []
        """Measured size classes in ascending order"""
        self._averages = averages

    def __bool__(self) -> bool:
        """Return whether a step has been measured."""
        return bool(self._seconds)

    def learn(self, rows: int, seconds: float) -> None:
        """Update the estimate of a step of so many rows.

        Unless it is a mean, it never exceeds the newest time: other programs only make steps
        longer, and overestimates admit too many prompt tokens.
        """
        size, seconds = self.size(rows), max(seconds, _LEAST_SECONDS)
        if size not in self._seconds:
            insort(self._sizes, size)
        estimate = _smooth(self._seconds.get(size, seconds), seconds)
        self._seconds[size] = estimate if self._averages else min(seconds, estimate)

    def nearest(self, rows: int, within: float = math.inf) -> float | None:
        """Return the estimate of the nearest size class; None = none was measured.

        within: most classes between it and the class of `rows`.
        """
        wanted = self.size(rows)
        exact = self._seconds.get(wanted)
        if exact is not None:
            return exact
        place = bisect_left(self._sizes, wanted)
        near = self._sizes[max(place - 1, 0) : place + 1]
        size = min(near, key=lambda size: abs(size - wanted), default=None)
        return None if size is None or abs(size - wanted) > within else self._seconds[size]

    def between(self, rows: int, least: tuple[float, float]) -> float | None:
        """Return the seconds by a line between the next measured sizes below and above.

        least: rows and seconds of a size below all others. None = no size above was measured.
        """
        wanted = self.size(rows)
        if wanted in self._seconds:
            return self._seconds[wanted]
        place = bisect_left(self._sizes, wanted)
        if place == len(self._sizes):
            return None
        first, start = least
        below, above = self._sizes[place - 1] if place else -1, self._sizes[place]
        if place and 2 ** (below / 4) > first:
            first, start = 2 ** (below / 4), self._seconds[below]
        end = self._seconds[above]
        return start + (end - start) * (rows - first) / (2 ** (above / 4) - first)

    def forget(self) -> None:
        """Forget all measurements."""
        self._seconds.clear()
        self._sizes.clear()

    @staticmethod
    @cache
    def size(rows: int) -> int:
        """Return the size class of a step; steps of a class take about the same time."""
        return int(4 * math.log2(rows)) if rows else -1


class _PromptCost(ABC):
    """Estimated seconds that prompt tokens add to a step."""

    is_known = False
    """True once a step has been measured"""

    @abstractmethod
    def learn(self, tokens: int, seconds: float) -> None:
        """Update the estimate with a step whose prompt tokens have added `seconds`, above 0."""

    @abstractmethod
    def seconds(self, tokens: float) -> float:
        """Return the seconds that prompt tokens add, once the cost is known."""

    @abstractmethod
    def tokens_within(self, seconds: float) -> int:
        """Return the prompt tokens that a step may take, once the cost is known."""


class _LinearCost(_PromptCost):
    """Seconds per token, without a fixed part: a CPU starts a step with prompts like any other."""

    def __init__(self) -> None:
        self._token = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        each = seconds / tokens
        self._token = _smooth(self._token, each) if self.is_known else each
        self.is_known = True

    def seconds(self, tokens: float) -> float:
        return tokens * self._token

    def tokens_within(self, seconds: float) -> int:
        return int(seconds / self._token)


class _AffineCost(_PromptCost):
    """Fixed seconds, and seconds per token: a line through the latest steps by least squares.

    A GPU pads a step with prompts, and launches long ones kernel by kernel, which takes as long for
    few tokens as for a few hundred. If this time counted as a cost of the tokens, chunks would be
    smaller and more numerous.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = self._squares = self._products = 0.0
        """Weighted means of the steps' tokens x, their seconds y, x², and xy"""
        self._fixed = self._each = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        if self.is_known:
            seconds = min(seconds, 2 * self.seconds(tokens))
        weight = _SMOOTHING if self.is_known else 1.0
        self._tokens += weight * (tokens - self._tokens)
        self._seconds += weight * (seconds - self._seconds)
        self._squares += weight * (tokens * tokens - self._squares)
        self._products += weight * (tokens * seconds - self._products)
        self.is_known = True
        self._fit()

    def seconds(self, tokens: float) -> float:
        return self._fixed + tokens * self._each

    def tokens_within(self, seconds: float) -> int:
        """Return the tokens that take the rest of `seconds`, or at least as long as the fixed part.

        With fewer tokens, the start of steps would take more time than the prompts.
        """
        return int(max(seconds - self._fixed, self._fixed) / self._each)

    def _fit(self) -> None:
        per_token = self._seconds / self._tokens
        variance = self._squares - self._tokens**2
        if variance > (_LEAST_SPREAD * self._tokens) ** 2:
            self._each = (self._products - self._tokens * self._seconds) / variance
        elif not self._each:
            self._each = per_token
        # The fixed part is not negative, and a token takes some time.
        self._each = min(max(self._each, _LEAST_SHARE * per_token), per_token)
        self._fixed = self._seconds - self._each * self._tokens


def _smooth(estimate: float, measured: float) -> float:
    return estimate + _SMOOTHING * (min(measured, 2 * estimate) - estimate)
