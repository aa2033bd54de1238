"""Model specs of one layer, with attention of any shape."""

from dataclasses import replace
from typing import Any

from services.engine.model.architecture.spec import ModelSpec

__all__ = ["one_layer"]


def one_layer(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """Return a spec with the first layer alone. changes: fields of its AttentionSpec."""
    first = spec.layers[0]
    return replace(spec, layers=(replace(first, mixer=replace(first.mixer, **changes)),))
