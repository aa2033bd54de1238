"""Runs of tokens between two states, grouped so that one operation serves many sequences."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from services.engine.batch.step_batch import StateSegments
from services.engine.batch.transfer import to_device

__all__ = ["RunGroups", "Runs", "convolve", "convolve_rows"]


_MOST = 256
"""Most runs that are computed together, because their states are copied"""


@dataclass(frozen=True, slots=True)
class Runs:
    """At most 256 runs of the same length that read no state that one of them writes."""

    rows: Tensor
    """int64 [runs, length], tokens of each run"""
    sources: Tensor
    """int64 [runs], 0 if the state before the run is zeros"""
    targets: Tensor
    """int64 [runs]"""
    begins: Tensor | None
    """bool [runs], True where the state before the run is zeros; None: there is no such run"""

    def before(self, states: Tensor) -> Tensor:
        """Copy the states before the runs, [runs, ...]. states: [slots, ...]"""
        found = states[self.sources]
        if self.begins is not None:
            found.masked_fill_(self.begins.view(-1, *(1,) * (found.ndim - 1)), 0)
        return found


class RunGroups:
    """Grouping of a step's runs, which the layers of one decoder share.

    On an accelerator, each step's first layer waits for the segments' sources and targets.
    """

    def __init__(self) -> None:
        self._segments: StateSegments | None = None
        """The segments that `_groups` divides"""
        self._groups: list[Runs] = []

    def of(self, segments: StateSegments) -> Sequence[Runs]:
        """Divide the runs into groups, such that each comes after the run whose state it reads."""
        if segments is not self._segments:
            self._groups, self._segments = _group(segments), segments
        return self._groups


def convolve(
    inputs: Tensor, state: Tensor, runs: Runs, factors: Tensor, bias: Tensor | None
) -> Tensor:
    """Convolve each channel over the tokens of its run, and store the state after the run.

    inputs: [runs, length, channels]; state: [slots, width - 1, channels], the last tokens' inputs,
    the newest last; factors: float32 [width, channels], the newest token's last; bias: float32
    [channels]. Returns float32 [runs, length, channels].
    """
    window = torch.cat((runs.before(state), inputs), 1)
    length = inputs.shape[1]
    state[runs.targets] = window[:, length:]
    total = bias
    for offset, factor in enumerate(factors):
        product = window[:, offset : offset + length].float() * factor
        total = product if total is None else total + product
    assert total is not None
    return total


def convolve_rows(rows: Tensor, state: Tensor, groups: Sequence[Runs], factors: Tensor) -> None:
    """Convolve each channel in place, and store the state after each run.

    rows: [tokens, ...], `channels` numbers of each token; state, factors: as for `convolve`.
    """
    for runs in groups:
        inputs = rows[runs.rows]
        convolved = convolve(inputs.flatten(2), state, runs, factors, None)
        rows[runs.rows] = convolved.to(rows.dtype).view(inputs.shape)


def _group(segments: StateSegments) -> list[Runs]:
    lengths = segments.lengths_host
    sources, targets = segments.sources.tolist(), segments.targets.tolist()
    alike: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    depth = 0
    for run, length in enumerate(lengths):
        follows = run > 0 and sources[run] >= 0 and sources[run] == targets[run - 1]
        depth = depth + 1 if follows else 0
        alike[depth, length].append(run)
    starts = list(accumulate(lengths, initial=0))
    return [
        _gather(
            [range(starts[run], starts[run + 1]) for run in runs],
            [sources[run] for run in runs],
            [targets[run] for run in runs],
            segments.sources.device,
        )
        for _, together in sorted(alike.items())
        for runs in (together[at : at + _MOST] for at in range(0, len(together), _MOST))
    ]


def _gather(
    rows: Sequence[Sequence[int]],
    sources: Sequence[int],
    targets: Sequence[int],
    device: torch.device,
) -> Runs:
    read = to_device(torch.tensor(sources), device)
    return Runs(
        to_device(torch.tensor(rows), device),
        read.clamp(min=0),
        to_device(torch.tensor(targets), device),
        read < 0 if min(sources) < 0 else None,
    )
