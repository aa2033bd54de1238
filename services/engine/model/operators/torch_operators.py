"""Operators in plain torch, for all dtypes and devices."""

from collections.abc import Iterable
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import linear

from services.engine.model.architecture.activation import SWIGLU, Activation
from services.engine.model.operators.activations import activated
from services.engine.model.operators.composed_projections import AdaptedProjection
from services.engine.model.operators.deltas import Delta
from services.engine.model.operators.interface import (
    ExpertWeights,
    Gate,
    Mixture,
    Operators,
    Projection,
)
from services.engine.model.operators.looped_mixture import LoopedMixture
from services.engine.model.operators.rotation import Rotation

__all__ = [
    "TorchGate",
    "TorchOperators",
    "add_product",
    "join",
    "join_biases",
    "multiply_into",
    "normalize",
    "runs_tensor_kernels",
]

_CUDA_ROWS = 256
"""Number of rows that a GPU multiplies in little more time than it reads the weights"""


_AMPERE = (8, 0)
"""Least compute capability that the Triton kernels need"""


class TorchOperators(Operators):
    """Reference for the faster operators, exact in float32."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        if device.type == "cuda":
            self.rows_at_once = _CUDA_ROWS
        on_cpu = device.type == "cpu"
        self.groups_experts = runs_tensor_kernels(dtype, device)
        self._prepacks = on_cpu and _has_onednn_kernels(dtype)

    def empty(self, rows: int, width: int) -> Tensor:
        return self.temporary(rows, width)

    def temporary(self, rows: int, width: int) -> Tensor:
        return torch.empty((rows, width), dtype=self._dtype, device=self._device)

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        own_bias = None if bias is None else self._own(bias)
        if self._prepacks:
            return _PrepackedProjection(weight.to(self._dtype), own_bias)
        return _TorchProjection(self._own(weight), own_bias)

    def gate(
        self,
        gate: Tensor,
        up: Tensor | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        product = self.projection(*join(gate, up, gate_bias, up_bias))
        return TorchGate(product, 1 if up is None else 2, activation, self)

    def mixture(
        self, experts: Iterable[ExpertWeights], count: int, per_row: int, activation: Activation
    ) -> Mixture:
        if not self.groups_experts or not activation.gated:
            return LoopedMixture(experts, activation, self)
        # Imported here, because only GPU machines need Triton.
        from services.engine.model.operators.grouped_mixture import GroupedMixture

        return GroupedMixture.of(experts, count, per_row, activation, self._dtype, self._device)

    def arrange(self, rows: Tensor, out: Tensor) -> None:
        out.copy_(rows)

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        out.copy_(rms_norm(rows, weight, epsilon))

    def add_rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        out += rms_norm(rows, weight, epsilon)

    def gather(self, rows: Tensor, index: Tensor) -> Tensor:
        return rows.index_select(0, index)

    def rotate(
        self,
        heads: Tensor,
        num_queries: int,
        rotation: Rotation,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        epsilon: float,
    ) -> None:
        for part, norm in (
            (heads[:, :num_queries], query_norm),
            (heads[:, num_queries:], key_norm),
        ):
            if norm is not None:
                normalize(part, norm, epsilon)
            exact = part.float()
            low, high = exact.chunk(2, dim=-1)
            cosines, sines = rotation.cosines[:, None], rotation.sines[:, None]
            rotated = (low * cosines - high * sines, high * cosines + low * sines)
            part.copy_(torch.cat(rotated, dim=-1))

    def _own(self, weight: Tensor) -> Tensor:
        """Copy `weight`, which may be a view of a mapped file."""
        return weight.to(device=self._device, dtype=self._dtype, copy=True)


class _TorchProjection(Projection):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight.T
        self._bias = bias
        self.weight_bytes = weight.nbytes

    def into(self, rows: Tensor, out: Tensor) -> None:
        multiply_into(rows, self._weight, self._bias, out)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        add_product(rows, self._weight, self._bias, out)


class _PrepackedProjection(Projection):
    """A product on a CPU that keeps the weight only in oneDNN's layout.

    bfloat16 takes 0.7 of the time of F.linear. float32 takes 0.5 to 0.8 of that of torch.mm with
    2 to 32 rows, and 1.1 with one row on one thread.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias
        self.weight_bytes = weight.nbytes

    def into(self, rows: Tensor, out: Tensor) -> None:
        out.copy_(self._product(rows))

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        out += self._product(rows)

    def _product(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, "none", [], ""
        )
        return product


class TorchGate(Gate):
    """Any activation of one product, which joins the columns of `layers` (1 or 2) layers."""

    def __init__(
        self, product: Projection, layers: int, activation: Activation, operators: Operators
    ) -> None:
        self._product = product
        self._layers = layers
        self._activation = activation
        self._operators = operators
        self.weight_bytes = product.weight_bytes

    def adapt(self, delta: Delta) -> None:
        self._product = AdaptedProjection(self._product, delta)

    def into(self, rows: Tensor, out: Tensor) -> None:
        product = self._operators.temporary(rows.shape[0], self._layers * out.shape[1])
        self._product.into(rows, product)
        self._operators.arrange(activated(self._activation, product), out)


def multiply_into(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Compute out = rows @ weight + bias; weight: [inputs, outputs], out: of any floating dtype.

    A GPU does not round float32 products: rounded logits would often tie.
    """
    if out.dtype == rows.dtype:
        if bias is None:
            torch.mm(rows, weight, out=out)
        else:
            torch.addmm(bias, rows, weight, out=out)
    elif rows.device.type == "cpu":  # torch has products of two dtypes for GPUs alone
        out.copy_(linear(rows, weight.T, bias))
    else:
        torch.ops.aten.mm.dtype_out(rows, weight, out.dtype, out=out)
        if bias is not None:
            out += bias


def add_product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Compute out += rows @ weight + bias, as `multiply_into`."""
    if out.dtype == rows.dtype:
        out.addmm_(rows, weight)
        if bias is not None:
            out += bias
    else:
        product = torch.empty_like(out)
        multiply_into(rows, weight, bias, product)
        out += product


def join(
    gate: Tensor, up: Tensor | None, gate_bias: Tensor | None, up_bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Join two linear layers of the same input into one weight and bias."""
    bias = join_biases(gate_bias, up_bias)
    return gate if up is None else torch.cat((gate, up)), bias


def join_biases(gate: Tensor | None, up: Tensor | None) -> Tensor | None:
    """Join the biases of one linear layer or two."""
    return gate if gate is None or up is None else torch.cat((gate, up))


def normalize(heads: Tensor, norm: Tensor, epsilon: float) -> None:
    """Apply RMSNorm to heads [tokens, heads, head_dim] in place, per head or per token."""
    rows = heads if norm.shape[0] == heads.shape[2] else heads.flatten(1)
    heads.copy_(rms_norm(rows, norm, epsilon).view(heads.shape))


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    exact = rows.float()
    scale = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + epsilon)
    return (exact * scale).to(rows.dtype) * weight


def runs_tensor_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether our kernels of experts and of packed weights run in this type there."""
    if device.type != "cuda" or dtype == torch.float32 or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _AMPERE


def _has_onednn_kernels(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has its fast kernels for products in `dtype` on this CPU."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    vectors = torch.backends.cpu.get_cpu_capability()
    return dtype == torch.float32 and vectors in ("AVX2", "AVX512")
