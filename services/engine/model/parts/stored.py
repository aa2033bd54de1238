"""Stored tensors of a layer's parts: their names and shapes."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.tensors import StoredTensor

__all__ = ["LayerNames", "StoredLinear", "StoredNorm", "stored_norm", "stored_tensors"]


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """One or more linear layers of the same input: their weights and either all biases or none."""

    weights: tuple[StoredTensor, ...]
    biases: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True)
class StoredNorm:
    weight: StoredTensor
    bias: StoredTensor | None
    factor: float = 1.0
    """Factor of the output; only norms of outputs that are added to the residual have one"""


class LayerNames:
    """Builder of one layer's names and shapes."""

    def __init__(self, spec: ModelSpec, prefix: str, sublayer: int | None = None) -> None:
        """prefix: beginning of the names in this layer; sublayer: as in LayerSpec."""
        self.spec = spec
        self.names = spec.family.names
        self.prefix = prefix
        self._sublayer = sublayer

    def norm(self, name: str | None) -> StoredNorm | None:
        return None if name is None else self.required_norm(name)

    def required_norm(self, name: str) -> StoredNorm:
        return stored_norm(self.spec, self._whole(name))

    def tensor(self, name: str, *shape: int) -> StoredTensor:
        """Name a tensor that is not the weight of a module."""
        return StoredTensor(self._whole(name), shape)

    def _whole(self, name: str) -> str:
        """Return a name with the prefix, and with the number of the layer's own module."""
        module, *rest = name.split(".", 1)
        if self._sublayer is not None and module in self.names.sublayer_modules:
            name = ".".join((module, str(self._sublayer), *rest))
        return f"{self.prefix}{name}"

    def linear(
        self, names: tuple[str, ...], outputs: tuple[int, ...], inputs: int, bias: bool
    ) -> StoredLinear:
        """Name a tensor for each of `outputs`, or a single one for all."""
        if len(names) == 1:
            outputs = (sum(outputs),)
        weights, biases = [], []
        for name, count in zip(names, outputs, strict=True):
            shape = (inputs, count) if self.spec.family.transposed else (count, inputs)
            weights.append(self.tensor(f"{name}.weight", *shape))
            biases.append(self.tensor(f"{name}.bias", count))
        return StoredLinear(tuple(weights), tuple(biases) if bias else ())


def stored_norm(spec: ModelSpec, name: str) -> StoredNorm:
    """Name a norm over the residual."""
    shape = (spec.hidden_size,)
    has_bias = spec.family.layer_norm and spec.family.norm_bias
    bias = StoredTensor(f"{name}.bias", shape) if has_bias else None
    return StoredNorm(StoredTensor(f"{name}.weight", shape), bias)


def stored_tensors(part: object) -> Iterator[StoredTensor]:
    """Yield the tensors in a description: a tensor, a tuple of parts, or a dataclass of them."""
    if isinstance(part, StoredTensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from stored_tensors(item)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from stored_tensors(getattr(part, field.name))
