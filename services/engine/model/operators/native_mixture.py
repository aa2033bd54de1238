"""Mixtures of experts that one kernel computes."""

from torch import Tensor

from services.engine.kernels.library import DTYPES, Kernel, Native
from services.engine.kernels.structures import MixtureCall, RoutingCall
from services.engine.model.architecture.routing import Routing, Scoring
from services.engine.model.operators.deltas import ExpertDeltas
from services.engine.model.operators.interface import Mixture
from services.engine.model.operators.looped_mixture import LoopedMixture

__all__ = ["NativeMixture", "routing_call"]


class NativeMixture(Mixture):
    """Mixture computed by a kernel, or by a loop in steps with adapters of the experts."""

    def __init__(self, native: Native, looped: LoopedMixture, call: MixtureCall) -> None:
        """call: call that lacks rows, choice and out; it reads the weights of `looped`."""
        self._native = native
        self._looped = looped
        self._call = call
        self.weight_bytes = looped.weight_bytes

    @property
    def is_adapted(self) -> bool:
        """True if adapters add to the products of the present step."""
        return self._looped.is_adapted

    def adapt(self, deltas: ExpertDeltas) -> None:
        self._looped.adapt(deltas)

    def add_to(self, rows: Tensor, chosen: Tensor, factors: Tensor, out: Tensor) -> None:
        if self.is_adapted:
            self._looped.add_to(rows, chosen, factors, out)
            return
        chosen, factors = chosen.contiguous(), factors.contiguous()
        call = self._call
        call.chosen, call.factors, call.per_row = *_addresses(chosen, factors), chosen.shape[1]
        run_mixture(self._native, call, rows, out)


def run_mixture(native: Native, call: MixtureCall, rows: Tensor, out: Tensor) -> None:
    """Run a call that adds the outputs for all `rows` [n, inputs] to `out` [n, outputs]."""
    call.rows, call.out = _addresses(rows, out)
    call.num_rows, call.inputs = rows.shape
    call.outputs = out.shape[1]
    call.dtype, call.out_dtype = DTYPES[rows.dtype], DTYPES[out.dtype]
    native.run(Kernel.MIXTURE, call)


def routing_call(
    routing: Routing, experts: int, bias: Tensor | None, factors: Tensor | None = None
) -> RoutingCall | None:
    """Describe a routing rule to the kernels; None if they can't follow it.

    bias, factors: as for `Mixture.routed`; they must outlive the call.
    """
    is_known = routing.scoring is not Scoring.SQRT_SOFTPLUS and not routing.is_by_token
    if routing.scales_inputs or not is_known:
        return None
    return RoutingCall(
        bias=None if bias is None else bias.data_ptr(),
        factors=None if factors is None else factors.data_ptr(),
        experts=experts,
        per_row=routing.per_token,
        groups=routing.groups,
        kept_groups=routing.kept_groups,
        group_leaders=routing.group_leaders,
        least_sum=routing.least_sum,
        scale=routing.scale,
        jitter=routing.jitter or 0,
        is_sparse=routing.jitter is not None,
        has_sigmoids=routing.scoring is Scoring.SIGMOID,
        is_normalized=routing.normalized,
    )


def _addresses(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)
