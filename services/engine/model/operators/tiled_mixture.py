"""Mixtures of experts on the tiled kernels."""

from collections.abc import Iterable, Sequence
from ctypes import pointer

from torch import Tensor

from services.engine.kernels.library import Native
from services.engine.kernels.structures import LinearCall, MixtureCall
from services.engine.model.architecture.routing import Routing
from services.engine.model.operators.composed_projections import AdaptedProjection
from services.engine.model.operators.interface import (
    Gate,
    Mixture,
    Projection,
    RoutedMixture,
    SharedParts,
)
from services.engine.model.operators.looped_mixture import LoopedMixture
from services.engine.model.operators.native_mixture import (
    NativeMixture,
    routing_call,
    run_mixture,
)
from services.engine.model.operators.tiled_products import TiledGate, TiledProjection

__all__ = ["tiled_mixture"]


def tiled_mixture(native: Native, looped: LoopedMixture) -> Mixture:
    """Return a mixture that the kernel computes, or `looped` if it can't read an expert."""
    gates = _known(_gate_call(expert.gate) for expert in looped.experts)
    downs = _known(_call(expert.down) for expert in looped.experts)
    if gates is None or downs is None:
        return looped
    return _TiledMixture(native, looped, gates, downs)


class _TiledMixture(NativeMixture):
    def __init__(
        self,
        native: Native,
        looped: LoopedMixture,
        gates: Sequence[LinearCall],
        downs: Sequence[LinearCall],
    ) -> None:
        super().__init__(native, looped, _mixture_call(gates, downs))
        self._gates = gates
        self._downs = downs

    def routed(
        self,
        router: Projection,
        routing: Routing,
        bias: Tensor | None,
        shared: SharedParts | None,
        factors: Tensor | None = None,
    ) -> RoutedMixture | None:
        experts = len(self._gates)
        further = () if shared is None else (shared,)
        routers = [router, *(each.router for each in further if each.router is not None)]
        scores = _known(map(_call, routers))
        gates = _known(_gate_call(each.gate) for each in further)
        downs = _known(_call(each.down) for each in further)
        if scores is None or gates is None or downs is None:
            return None
        choice = routing_call(routing, scores[0].outputs, bias, factors)
        if choice is None:
            return None
        call = _mixture_call([*self._gates, *gates], [*self._downs, *downs])
        call.experts, call.per_row, call.has_shared = experts, routing.per_token, len(further)
        call.routing, call.router = pointer(choice), pointer(scores[0])
        if len(scores) > 1:
            call.shared_router = pointer(scores[1])
        parts = [part for each in further for part in (each.gate, each.down)]
        return _RoutedMixture(self._native, call, [self, *routers, *parts], (bias, factors))


class _RoutedMixture(RoutedMixture):
    def __init__(
        self,
        native: Native,
        call: MixtureCall,
        parts: Sequence[NativeMixture | Projection | Gate],
        tensors: Sequence[Tensor | None],
    ) -> None:
        """parts: products that adapters may change; tensors: other tensors that the call reads."""
        self._native = native
        self._call = call
        self._parts = parts
        self._tensors = tensors

    @property
    def is_adapted(self) -> bool:
        return any(part.is_adapted for part in self._parts)

    def add_to(self, rows: Tensor, out: Tensor, router_rows: Tensor | None = None) -> None:
        self._call.router_rows = None if router_rows is None else router_rows.data_ptr()
        run_mixture(self._native, self._call, rows, out)


def _mixture_call(gates: Sequence[LinearCall], downs: Sequence[LinearCall]) -> MixtureCall:
    count = len(gates)
    return MixtureCall(
        gates=(LinearCall * count)(*gates), downs=(LinearCall * count)(*downs), experts=count
    )


def _call(projection: Projection) -> LinearCall | None:
    """Return the call of a projection without its adapters, if there is one."""
    if isinstance(projection, AdaptedProjection):
        return _call(projection.base)
    return projection.call() if isinstance(projection, TiledProjection) else None


def _gate_call(gate: Gate) -> LinearCall | None:
    return gate.call() if isinstance(gate, TiledGate) else None


def _known(calls: Iterable[LinearCall | None]) -> list[LinearCall] | None:
    """Return the calls; None if one is missing."""
    found = list(calls)
    known = [call for call in found if call is not None]
    return known if len(known) == len(found) else None
