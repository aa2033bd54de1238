"""Mixtures of experts whose rows lie row by row, on the portable kernels."""

from typing import cast

from services.engine.kernels.library import Native
from services.engine.kernels.structures import (
    FloatCall,
    FloatExpertCall,
    GroupedCall,
    GroupedExpertCall,
    MixtureCall,
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
    calls = _products(expert, GroupedProjection)
    return None if calls is None else GroupedExpertCall(*calls)


def _float_expert(expert: Expert) -> FloatExpertCall | None:
    calls = _products(expert, FloatProjection)
    return None if calls is None else FloatExpertCall(*calls)


def _products(
    expert: Expert, kind: type[GroupedProjection] | type[FloatProjection]
) -> tuple[GroupedCall | FloatCall, ...] | None:
    """Return the products of gate and output; None if not all of them are of `kind`."""
    gate, down, width = expert
    if not isinstance(gate, DirectGate):
        return None
    if not isinstance(gate.product, kind) or not isinstance(down, kind):
        return None
    calls = (
        gate.product.part(0, width),
        gate.product.part(width, width),
        down.part(0, down.outputs),
    )
    return None if None in calls else cast(tuple[GroupedCall | FloatCall, ...], calls)
