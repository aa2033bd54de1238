"""Mixtures of experts with weights in groups on the portable kernels."""

from services.engine.kernels.library import GroupedExpertCall, MixtureCall, Native
from services.engine.model.architecture.activation import Activation, Nonlinearity
from services.engine.model.operators.grouped_products import GroupedProjection
from services.engine.model.operators.interface import Mixture
from services.engine.model.operators.looped_mixture import Expert, LoopedMixture
from services.engine.model.operators.native_gate import DirectGate
from services.engine.model.operators.native_mixture import NativeMixture

__all__ = ["grouped_mixture"]


def grouped_mixture(native: Native, looped: LoopedMixture, activation: Activation) -> Mixture:
    """Return a mixture that the kernel computes, or `looped` if its weights are no groups."""
    calls = [_expert_call(expert) for expert in looped.experts]
    known = [call for call in calls if call is not None]
    if len(known) < len(calls):
        return looped
    call = MixtureCall(
        grouped=(GroupedExpertCall * len(known))(*known),
        experts=len(known),
        alpha=activation.alpha,
        limit=activation.limit,
        is_gelu=activation.nonlinearity is Nonlinearity.GELU_TANH,
    )
    return NativeMixture(native, looped, call)


def _expert_call(expert: Expert) -> GroupedExpertCall | None:
    gate, down, width = expert
    if not isinstance(gate, DirectGate) or not isinstance(down, GroupedProjection):
        return None
    if not isinstance(gate.product, GroupedProjection):
        return None
    first, second = gate.product.part(0, width), gate.product.part(width, width)
    output = down.part(0, down.outputs)
    if first is None or second is None or output is None:
        return None
    return GroupedExpertCall(first, second, output)
