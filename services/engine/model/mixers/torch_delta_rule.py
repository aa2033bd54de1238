"""Gated delta rule in torch, for every dtype and device."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.batch.step_batch import StateSegments
from services.engine.batch.transfer import to_device
from services.engine.model.mixers.delta_rule import (
    L2_EPSILON,
    DeltaInputs,
    DeltaRule,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    OutputGate,
)

__all__ = ["TorchDeltaRule"]

_CHUNK = 64
"""Tokens that are computed by one set of matrix products"""
_CHANNEL_CHUNK = 16
"""The same if each channel decays for itself: the decays of a chunk's pairs of tokens take
16 * 16 * key_dim floats for each head"""


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of the same length that read no state that one of them writes."""

    rows: Tensor
    """int64 [runs, length], tokens of each run"""
    sources: Tensor
    """int64 [runs], 0 if the state before the run is zeros"""
    targets: Tensor
    """int64 [runs]"""
    continues: Tensor
    """bool [runs, 1, 1], whether the run has a source"""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Operands of the rule in float32: [runs, length, heads, ...]."""

    queries: Tensor
    """[runs, length, value_heads, key_dim]"""
    keys: Tensor
    """[runs, length, value_heads, key_dim]"""
    values: Tensor
    """[runs, length, value_heads, value_dim]"""
    betas: Tensor
    """[runs, length, value_heads, 1]"""
    decays: Tensor
    """[runs, length, value_heads, 1 or key_dim], logarithms"""

    def chunk(self, first: int, size: int) -> "_Tokens":
        """Return some tokens of each run, with the heads before the tokens."""
        parts = (self.queries, self.keys, self.values, self.betas, self.decays)
        return _Tokens(*(part[:, first : first + size].transpose(1, 2) for part in parts))


class TorchDeltaRule(DeltaRule):
    """Runs of the same length are computed together, and long runs in chunks.

    On an accelerator, each step's first layer waits for the segments' sources and targets.
    """

    def __init__(self, shape: DeltaShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self._segments: StateSegments | None = None
        """The segments that `_groups` divides, for the step's other layers"""
        self._groups: list[_Runs] = []

    def allocate(self, slots: int, dtype: torch.dtype = torch.float32) -> DeltaState:
        shape = self._shape
        recurrent = (slots, shape.value_heads, shape.key_dim, shape.value_dim)
        convolution = (slots, shape.conv_width - 1, shape.channels)
        return DeltaState(
            torch.zeros(convolution, dtype=self._dtype, device=self._device),
            torch.zeros(recurrent, dtype=dtype, device=self._device),
        )

    def apply(
        self,
        weights: DeltaWeights,
        inputs: DeltaInputs,
        state: DeltaState,
        segments: StateSegments,
    ) -> None:
        if segments is not self._segments:
            self._groups, self._segments = _group(segments), segments
        for runs in self._groups:
            tokens = self._tokens(weights, inputs, state, runs)
            before = state.recurrent[runs.sources].float()
            before = before.masked_fill(~runs.continues[..., None], 0)
            after, out = self._advance(before, tokens)
            state.recurrent[runs.targets] = after.to(state.recurrent.dtype)
            gate = inputs.gate[runs.rows].view_as(out)
            inputs.out[runs.rows] = self._normed(weights, out, gate).flatten(2)

    def _tokens(
        self, weights: DeltaWeights, inputs: DeltaInputs, state: DeltaState, runs: _Runs
    ) -> _Tokens:
        shape = self._shape
        widths = [shape.key_heads * shape.key_dim] * 2 + [shape.value_heads * shape.value_dim]
        convolved = self._convolved(weights, inputs, state, runs)
        queries, keys, values = torch.split(convolved, widths, -1)
        queries, keys = (
            _normalized(_heads(each, shape.key_heads)).repeat_interleave(
                shape.value_heads // shape.key_heads, 2
            )
            for each in (queries, keys)
        )
        betas = inputs.beta[runs.rows].float().sigmoid() * (2 if shape.doubles_beta else 1)
        decays = functional.softplus(inputs.decay[runs.rows].float() + weights.decay_bias)
        decays = _heads(decays, shape.value_heads) * -weights.rates[:, None]
        return _Tokens(
            queries * shape.key_dim**-0.5,
            keys,
            _heads(values, shape.value_heads),
            betas[..., None],
            decays,
        )

    def _convolved(
        self, weights: DeltaWeights, inputs: DeltaInputs, state: DeltaState, runs: _Runs
    ) -> Tensor:
        """Return SiLU of the convolution [runs, length, channels], and store its state."""
        history = state.convolution[runs.sources].masked_fill(~runs.continues, 0)
        window = torch.cat((history, inputs.mixed[runs.rows]), 1)
        length = runs.rows.shape[1]
        state.convolution[runs.targets] = window[:, length:]
        total = weights.convolution_bias
        for offset, factors in enumerate(weights.convolution):
            product = window[:, offset : offset + length].float() * factors
            total = product if total is None else total + product
        assert total is not None
        return functional.silu(total)

    def _advance(self, state: Tensor, tokens: _Tokens) -> tuple[Tensor, Tensor]:
        """Return the states behind the runs, and the outputs.

        state: [runs, value_heads, key_dim, value_dim]; outputs: [runs, length, value_heads,
        value_dim]
        """
        length = tokens.keys.shape[1]
        if length == 1:
            return _step(state, tokens)
        size = _CHANNEL_CHUNK if self._shape.decays_channels else _CHUNK
        outputs = []
        for first in range(0, length, size):
            state, out = _chunk(state, tokens.chunk(first, size))
            outputs.append(out.transpose(1, 2))
        return state, torch.cat(outputs, 1)

    def _normed(self, weights: DeltaWeights, out: Tensor, gate: Tensor) -> Tensor:
        normed = functional.rms_norm(
            out, out.shape[-1:], weights.norm, eps=self._shape.norm_epsilon
        )
        is_silu = self._shape.gate is OutputGate.SILU
        factors = functional.silu(gate.float()) if is_silu else gate.float().sigmoid()
        return (normed * factors).to(self._dtype)


def _group(segments: StateSegments) -> list[_Runs]:
    """Divide the runs, such that each comes after the run whose state it reads."""
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
        for _, runs in sorted(alike.items())
    ]


def _gather(
    rows: Sequence[Sequence[int]],
    sources: Sequence[int],
    targets: Sequence[int],
    device: torch.device,
) -> _Runs:
    read = to_device(torch.tensor(sources), device)
    return _Runs(
        to_device(torch.tensor(rows), device),
        read.clamp(min=0),
        to_device(torch.tensor(targets), device),
        (read >= 0)[:, None, None],
    )


def _heads(rows: Tensor, heads: int) -> Tensor:
    """Divide the last dimension into heads."""
    return rows.view(*rows.shape[:-1], heads, -1)


def _normalized(vectors: Tensor) -> Tensor:
    return vectors * (vectors.square().sum(-1, keepdim=True) + L2_EPSILON).rsqrt()


def _step(state: Tensor, tokens: _Tokens) -> tuple[Tensor, Tensor]:
    """Advance states by one token each."""
    queries, keys, values = (
        each.squeeze(1) for each in (tokens.queries, tokens.keys, tokens.values)
    )
    state = state * tokens.decays.squeeze(1).exp()[..., None]
    known = (keys[..., None, :] @ state).squeeze(-2)
    corrections = (values - known) * tokens.betas.squeeze(1)
    state = torch.addcmul(state, keys[..., None], corrections[..., None, :])
    return state, (queries[..., None, :] @ state).squeeze(-2)[:, None]


def _chunk(state: Tensor, tokens: _Tokens) -> tuple[Tensor, Tensor]:
    """Advance states by several tokens: [runs, heads, tokens, ...] each.

    The corrections U = beta * (values - keys' states) of all tokens depend on each other:
    (I + A) U = beta * (values - decayed keys @ state), where A is strictly lower triangular.
    """
    sums = tokens.decays.cumsum(-2)
    grown = sums.exp()
    known = (tokens.keys * grown) @ state
    system = _pairs(tokens.keys, tokens.keys, sums) * tokens.betas
    corrections = torch.linalg.solve_triangular(
        system, tokens.betas * (tokens.values - known), upper=False, unitriangular=True
    )
    out = (tokens.queries * grown) @ state
    out = out + _pairs(tokens.queries, tokens.keys, sums) @ corrections
    last = sums[..., -1:, :]
    state = state * last.exp().transpose(-1, -2)
    return state + (tokens.keys * (last - sums).exp()).transpose(-1, -2) @ corrections, out


def _pairs(left: Tensor, right: Tensor, sums: Tensor) -> Tensor:
    """Return the products of each token on the left with those up to it, decayed in between.

    left, right: [..., tokens, key_dim]; sums: [..., tokens, 1 or key_dim], running sums of decays.
    """
    tokens = left.shape[-2]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=left.device).triu(1)
    between = sums[..., :, None, :] - sums[..., None, :, :]
    decay = between.masked_fill(later[..., None], float("-inf")).exp()
    if decay.shape[-1] == 1:
        return left @ right.transpose(-1, -2) * decay.squeeze(-1)
    return torch.einsum("...ik,...jk,...ijk->...ij", left, right, decay)
