"""Gated delta rule in torch, for every dtype and device."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.batch.step_batch import StateSegments
from services.engine.model.mixers.decays import decayed_products
from services.engine.model.mixers.delta_rule import (
    L2_EPSILON,
    DeltaInputs,
    DeltaRule,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    OutputGate,
)
from services.engine.model.mixers.runs import RunGroups, Runs, convolve

__all__ = ["TorchDeltaRule"]

_CHUNK = 64
"""Number of tokens that one set of matrix products computes"""
_CHANNEL_CHUNK = 16
"""The same where each channel has a decay: the decays between a chunk's pairs of tokens take
16 * 16 * key_dim floats for each head"""


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
    """[runs, length, value_heads, 1 or key_dim], logarithms of the decays"""

    def chunk(self, first: int, size: int) -> "_Tokens":
        """Return some tokens of each run, with the heads before the tokens."""
        parts = (self.queries, self.keys, self.values, self.betas, self.decays)
        return _Tokens(*(part[:, first : first + size].transpose(1, 2) for part in parts))


class TorchDeltaRule(DeltaRule):
    """Rule that computes runs of the same length together, and long runs in chunks."""

    def __init__(self, shape: DeltaShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self._groups = RunGroups()

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
        for runs in self._groups.of(segments):
            tokens = self._tokens(weights, inputs, state, runs)
            after, out = self._advance(runs.before(state.recurrent).float(), tokens)
            state.recurrent[runs.targets] = after.to(state.recurrent.dtype)
            gate = inputs.gate[runs.rows].view_as(out)
            inputs.out[runs.rows] = self._normed(weights, out, gate).flatten(2)

    def _tokens(
        self, weights: DeltaWeights, inputs: DeltaInputs, state: DeltaState, runs: Runs
    ) -> _Tokens:
        shape = self._shape
        widths = [shape.key_heads * shape.key_dim] * 2 + [shape.value_heads * shape.value_dim]
        mixed = inputs.mixed[runs.rows]
        factors, bias = weights.convolution, weights.convolution_bias
        convolved = functional.silu(convolve(mixed, state.convolution, runs, factors, bias))
        queries, keys, values = torch.split(convolved, widths, -1)
        queries, keys = (
            _normalized(_heads(each, shape.key_heads)).repeat_interleave(
                shape.value_heads // shape.key_heads, 2
            )
            for each in (queries, keys)
        )
        betas = inputs.beta[runs.rows].float().sigmoid() * (2 if shape.doubles_beta else 1)
        decays = _heads(inputs.decay[runs.rows].float() + weights.decay_bias, shape.value_heads)
        rates = weights.rates[:, None]
        if shape.least_decay:
            decays = shape.least_decay * (rates * decays).sigmoid()
        else:
            decays = -rates * functional.softplus(decays)
        return _Tokens(
            queries * shape.key_dim**-0.5,
            keys,
            _heads(values, shape.value_heads),
            betas[..., None],
            decays,
        )

    def _advance(self, state: Tensor, tokens: _Tokens) -> tuple[Tensor, Tensor]:
        """Return the states after the runs, and the outputs.

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
    system = decayed_products(tokens.keys, tokens.keys, sums) * tokens.betas
    corrections = torch.linalg.solve_triangular(
        system, tokens.betas * (tokens.values - known), upper=False, unitriangular=True
    )
    out = (tokens.queries * grown) @ state
    out = out + decayed_products(tokens.queries, tokens.keys, sums) @ corrections
    last = sums[..., -1:, :]
    state = state * last.exp().transpose(-1, -2)
    return state + (tokens.keys * (last - sums).exp()).transpose(-1, -2) @ corrections, out
