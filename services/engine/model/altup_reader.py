"""Loading of a layer's streams (Gemma 3n's AltUp and LAuReL). Every rank has all of them."""

import torch
from torch import Tensor

from services.engine.model.altup import AltUp, Expansion, Laurel, Merger, StreamRouter
from services.engine.model.architecture.layers import AltUpSpec
from services.engine.model.checkpoint.quantized import decoded
from services.engine.model.layer_inputs import LayerInput
from services.engine.model.operators.composed_projections import NormedProjection
from services.engine.model.operators.interface import Projection
from services.engine.model.parts.stored import StoredLinear
from services.engine.model.parts.stored_altup import StoredAltUp
from services.engine.model.parts.tensor_reader import TensorReader

__all__ = ["read_altup"]


def read_altup(
    reader: TensorReader, stored: StoredAltUp, spec: AltUpSpec, layer_input: LayerInput
) -> AltUp:
    """Read the streams of a layer, to which `layer_input` is added at its end."""
    expansions, mergers = (
        [_product(reader, each) for each in linears]
        for linears in (stored.expansions, stored.mergers)
    )
    scale = None
    if spec.has_scale:
        scale = reader.norm_weight(reader.tensor(stored.scale))
    return AltUp(
        router=_router(reader, stored, spec),
        prediction=_coefficients(reader, stored.prediction),
        correction=_coefficients(reader, stored.correction),
        active=spec.active,
        scale=scale,
        laurel=_laurel(reader, stored, spec),
        input=layer_input,
        operators=reader.operators,
        expansion=Expansion(expansions, reader.operators) if expansions else None,
        merger=Merger(mergers, reader.operators) if mergers else None,
    )


def _router(reader: TensorReader, stored: StoredAltUp, spec: AltUpSpec) -> StreamRouter:
    norm = reader.tensor(stored.router_norm.weight).float() / reader.spec.hidden_size
    ((weight, bias),) = reader.linear(stored.router, None)
    router = reader.operators.exact_projection(decoded(weight), bias)
    reader.step_bytes += router.weight_bytes
    return StreamRouter(
        norm=reader.norm_weight(norm),
        projection=reader.adapted(router, reader.site(stored.router)),
        count=spec.streams,
        epsilon=reader.spec.norm_epsilon,
        operators=reader.operators,
    )


def _laurel(reader: TensorReader, stored: StoredAltUp, spec: AltUpSpec) -> Laurel:
    right = _product(reader, stored.laurel_right)
    return Laurel(
        left=_product(reader, stored.laurel_left),
        right=NormedProjection(right, reader.output_norm(stored.laurel_norm)),
        rank=spec.laurel_rank,
        operators=reader.operators,
    )


def _product(reader: TensorReader, linear: StoredLinear) -> Projection:
    product = reader.product(reader.linear(linear, None), reader.operators_of(linear))
    return reader.adapted(product, reader.site(linear))


def _coefficients(reader: TensorReader, linear: StoredLinear) -> Tensor:
    """Read a product of a few numbers, float32 [inputs, outputs]. Adapters can't change it."""
    ((weight, _),) = reader.linear(linear, None)
    return decoded(weight).to(reader.device, torch.float32).T.contiguous()
