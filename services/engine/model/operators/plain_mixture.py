"""Mixtures of experts whose rows lie row by row, on the portable kernels."""

from services.engine.kernels.library import (
    FloatExpertCall,
    GroupedExpertCall,
    MixtureCall,
    Native,
)
from services.engine.model.architecture.activation import Activation, Nonlinearity
from services.engine.model.operators.float_products import FloatProjection
from services.engine.model.operators.grouped_products import GroupedProjection
from services.engine.model.operators.interface import Mixture
from services.engine.model.operators.looped_mixture import Expert, LoopedMixture
from services.engine.model.operators.native_gate import DirectGate
from services.engine.model.operators.native_mixture import NativeMixture

__all__ = ["plain_mixture"]


def plain_mixture(native: Native, looped: LoopedMixture, activation: Activation) -> Mixture:
    """Return a mixture that the kernel computes, or `looped` if it can't.

    It can if all experts have weights in groups, or all in floating point.
    """
    count = len(looped.experts)
    call = MixtureCall(
        experts=count,
        alpha=activation.alpha,
        limit=activation.limit,
        is_gelu=activation.nonlinearity is Nonlinearity.GELU_TANH,
    )
    grouped = [each for each in map(_grouped_expert, looped.experts) if each is not None]
    floats = [each for each in map(_float_expert, looped.experts) if each is not None]
    if len(grouped) == count:
        call.grouped = (GroupedExpertCall * count)(*grouped)
    elif len(floats) == count:
        call.floats = (FloatExpertCall * count)(*floats)
    else:
        return looped
    return NativeMixture(native, looped, call)


def _grouped_expert(expert: Expert) -> GroupedExpertCall | None:
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


def _float_expert(expert: Expert) -> FloatExpertCall | None:
    gate, down, width = expert
    if not isinstance(gate, DirectGate) or not isinstance(down, FloatProjection):
        return None
    if not isinstance(gate.product, FloatProjection):
        return None
    first, second = gate.product.part(0, width), gate.product.part(width, width)
    output = down.part(0, down.outputs)
    if first is None or second is None or output is None:
        return None
    return FloatExpertCall(first, second, output)
