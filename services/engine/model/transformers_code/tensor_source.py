"""A planned model's tensors in the files of a checkpoint, by their names in the model."""

import re
from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.progress import LoadProgress
from services.engine.model.checkpoint.quantized import Weight
from services.engine.model.checkpoint.tensors import StoredTensor, TensorFiles
from services.engine.model.transformers_code.plan import ModelPlan
from services.engine.model.transformers_code.stored_names import StoredNames

__all__ = ["TensorSource"]


class TensorSource:
    """Reader of single whole tensors, which converts those that files store in another form."""

    def __init__(self, plan: ModelPlan, checkpoint: TensorFiles) -> None:
        self._plan = plan
        self._model = plan.model
        self._checkpoint = checkpoint
        self.plain = {**dict(self._model.named_parameters()), **_stored_buffers(self._model)}
        """Parameters and stored buffers, except those of linear layers"""
        self._shapes = {name: tuple(each.shape) for name, each in self.plain.items()}
        for name, linear in plan.linears.items():
            self._shapes[f"{name}.weight"] = linear.stored_shape
            if linear.has_bias:
                self._shapes[f"{name}.bias"] = (linear.outputs,)
        self._names = StoredNames(self._model, self._shapes, _weights(checkpoint))
        self._converted: dict[str, Tensor] = {}
        """Converted tensors that are not in the model yet"""

    def require(self) -> int:
        """Return the bytes to read.

        Raises CheckpointError if a tensor is missing, of another shape, or unknown.
        """
        names, checkpoint = self._names, self._checkpoint
        sources = [name for each in names.conversions.values() for name, _ in each.sources]
        if any(not checkpoint.holds(name) for name in sources):
            raise CheckpointError(
                f"{self._plan.spec.architecture}: quantized tensors that transformers converts "
                f"are not read, such as {sources[0]}."
            )
        wanted = [self._stored(name) for name in names.direct]
        wanted += map(checkpoint.stored, sources)
        converted = {path for each in names.conversions.values() for path in each.targets}
        for name in self._shapes:
            if self._source(name) not in names.direct and not _ends(name, converted):
                wanted.append(StoredTensor(name, self._shapes[name]))  # refused as missing
        patterns = self._model._keys_to_ignore_on_load_unexpected or ()
        ignored = [
            name for name in names.unknown if any(re.search(each, name) for each in patterns)
        ]
        return checkpoint.require(wanted, ("*.rotary_emb.inv_freq", *ignored))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the model in files."""
        return self._shapes[name]

    def weight(self, name: str, bar: LoadProgress, *, keeps_groups: bool) -> Weight:
        """Read a weight [outputs, inputs] of a linear layer, quantized if `keeps_groups`."""
        linear = self._plan.linears[name]
        source = self._source(f"{name}.weight")
        if keeps_groups and not linear.is_transposed and source in self._names.direct:
            stored = self._stored(source)
            if (quantized := self._checkpoint.quantized(stored)) is not None:
                bar.add(self._checkpoint.num_bytes(stored))
                return quantized
        weight = self.tensor(f"{name}.weight", bar)
        return weight.T if linear.is_transposed else weight

    def tensor(self, name: str, bar: LoadProgress) -> Tensor:
        """Read a tensor of the model."""
        source = self._source(name)
        if source in self._names.direct:
            return self._read(self._stored(source), bar)
        if source not in self._converted:
            conversion = self._names.making(source)
            tensors = [
                self._read(self._checkpoint.stored(stored), bar) for stored, _ in conversion.sources
            ]
            self._converted.update(conversion.convert(tensors, self._model))
        tensor = self._converted.pop(source)
        if tuple(tensor.shape) != self._shapes[name]:
            raise CheckpointError(
                f"{self._plan.spec.architecture}: the tensor {name} is made of tensors in the "
                f"shape {list(tensor.shape)}, but config.json asks for {list(self._shapes[name])}."
            )
        return tensor

    def _read(self, stored: StoredTensor, bar: LoadProgress) -> Tensor:
        tensor = self._checkpoint.tensor(stored)
        bar.add(self._checkpoint.num_bytes(stored))
        return tensor

    def _stored(self, name: str) -> StoredTensor:
        """Return the files' tensor that is a tensor of the model without conversion."""
        return StoredTensor(self._names.direct[name], self._shapes[name])

    def _source(self, name: str) -> str:
        """Return the tensor that a tensor of the model is tied to, or itself."""
        tied: dict[str, str] = self._model.all_tied_weights_keys
        while name not in self._names.direct and name in tied:
            name = tied[name]
        return name


def _stored_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that files hold."""
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    return {name: each for name, each in model.named_buffers() if name not in computed}


def _weights(checkpoint: TensorFiles) -> Sequence[str]:
    """Return the names of tensors in the files, with those of quantized weights."""
    names = checkpoint.names
    if not checkpoint.is_quantized:
        return names
    weights = (f"{name.rpartition('.')[0]}.weight" for name in names)
    return tuple(dict.fromkeys((*names, *weights)))


def _ends(name: str, endings: set[str]) -> bool:
    return any(name.endswith(each) for each in endings)
