"""Loading of a checkpoint's tensors into a planned model."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.progress import LoadProgress
from services.engine.model.checkpoint.quantized import QuantizedWeight, Weight, decoded
from services.engine.model.checkpoint.tensors import StoredTensor, TensorFiles
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.transformers_code.experts import ProjectedExperts, hold
from services.engine.model.transformers_code.gated import PARTS, GatedLayer
from services.engine.model.transformers_code.linear import JointProduct, joined
from services.engine.model.transformers_code.norms import replace_norms
from services.engine.model.transformers_code.plan import ModelPlan
from services.engine.model.transformers_code.stored_names import StoredNames

__all__ = ["CheckpointReader"]

_ROUTERS = ("gate", "router")
"""Last parts of the names of linear layers that choose experts: they are never rounded"""


class CheckpointReader:
    """Reader of one checkpoint into one planned model, on the device "meta" until then."""

    def __init__(
        self, plan: ModelPlan, checkpoint: TensorFiles, operators: Operators, device: torch.device
    ) -> None:
        self.step_bytes = 0
        """Bytes of the weights read so far that every step reads"""
        self._plan = plan
        self._model = plan.model
        self._checkpoint = checkpoint
        self._operators = operators
        self._device = device
        self._plain = {**dict(self._model.named_parameters()), **_stored_buffers(self._model)}
        """Parameters and stored buffers, but those of linear layers"""
        self._shapes = {name: tuple(each.shape) for name, each in self._plain.items()}
        for name, linear in plan.linears.items():
            self._shapes[f"{name}.weight"] = linear.stored_shape
            if linear.has_bias:
                self._shapes[f"{name}.bias"] = (linear.out_features,)
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

    @torch.no_grad()
    def read(self, bar: LoadProgress) -> None:
        """Fill the model: products first, then the other tensors, then what is computed."""
        embedding = self._model.get_input_embeddings()
        head: nn.Module | None = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        for name, layer in self._plan.gated.items():
            self._read_gated(name, layer, bar)
        for names in joined(self._plan.linears):
            if names[0].rpartition(".")[0] in self._plan.gated:
                continue
            is_head = self._plan.linears[names[0]] is head
            operators = self._operators.for_logits() if is_head else self._operators
            self._read_linears(names, operators, bar)
        for name, module in self._plan.experts.items():
            self._read_experts(name, module, bar)
        for name, empty in self._plain.items():
            parent, _, last = name.rpartition(".")
            module = self._model.get_submodule(parent)
            if last not in module._parameters and last not in module._buffers:
                continue  # a product of experts
            tensor = self._tensor(name, bar)
            # The table stays a view of the mapped file if the dtypes are equal: a step reads few
            # rows, and the operating system may drop the pages.
            tensor = tensor.to(self._device, empty.dtype, copy=module is not embedding)
            if module is not embedding:
                self.step_bytes += tensor.nbytes
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
            if last in module._buffers:
                module._buffers[last] = tensor
            else:
                parameter = nn.Parameter(tensor, requires_grad=False)
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
                module._parameters[last] = parameter
        self._compute_buffers()
        replace_norms(self._model)

    def _read_linears(self, names: Sequence[str], operators: Operators, bar: LoadProgress) -> None:
        """Make one product of linear layers that read the same rows."""
        linears = [self._plan.linears[name] for name in names]
        biases = [each for name in names if (each := self._bias(name, bar)) is not None]
        weights = [self._weight(name, operators, bar) for name in names]
        is_router = names[0].rpartition(".")[2] in _ROUTERS
        projection = _projection(weights, biases, operators, is_router=is_router)
        self.step_bytes += projection.weight_bytes
        product = JointProduct(projection, [each.out_features for each in linears], operators)
        for number, linear in enumerate(linears):
            linear.hold(product, number)

    def _read_gated(self, name: str, layer: GatedLayer, bar: LoadProgress) -> None:
        operators = self._operators
        gate_name, up_name, down_name = (f"{name}.{part}" for part in PARTS)
        gate, up = (self._weight(each, operators, bar) for each in (gate_name, up_name))
        biases = (self._bias(gate_name, bar), self._bias(up_name, bar))
        if isinstance(gate, QuantizedWeight) and isinstance(up, QuantizedWeight):
            unit = operators.grouped_gate(gate, up, *biases, layer.activation)
        else:
            unit = operators.gate(decoded(gate), decoded(up), *biases, layer.activation)
        bias = self._bias(down_name, bar)
        weights = [self._weight(down_name, operators, bar)]
        down = _projection(weights, [] if bias is None else [bias], operators)
        self.step_bytes += unit.weight_bytes + down.weight_bytes
        layer.hold(unit, down, operators)

    def _read_experts(self, name: str, module: Any, bar: LoadProgress) -> None:
        """Make products of a module's stacked experts, and drop its parameters."""
        first, down = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
        products: list[list[Projection]] = []
        for part in (first, down):
            stack = self._tensor(f"{name}.{part}", bar)
            biases = self._tensor(f"{name}.{part}_bias", bar) if module.has_bias else None
            products.append(
                [
                    self._operators.projection(
                        weight.T if module.is_transposed else weight,
                        None if biases is None else biases[number],
                    )
                    for number, weight in enumerate(stack)
                ]
            )
            module._parameters.pop(part)
            if module.has_bias:
                module._parameters.pop(f"{part}_bias")
        width = self._shapes[f"{name}.{first}"][2 if module.is_transposed else 1]
        experts = ProjectedExperts(products[0], products[1], width, self._operators)
        self.step_bytes += experts.weight_bytes
        hold(module, experts)

    def _bias(self, name: str, bar: LoadProgress) -> Tensor | None:
        """Read the bias of a linear layer."""
        has_bias = self._plan.linears[name].has_bias
        return self._tensor(f"{name}.bias", bar) if has_bias else None

    def _weight(self, name: str, operators: Operators, bar: LoadProgress) -> Weight:
        """Read a weight [outputs, inputs] of a linear layer."""
        linear = self._plan.linears[name]
        source = self._source(f"{name}.weight")
        if operators.keeps_groups and not linear.is_transposed and source in self._names.direct:
            stored = self._stored(source)
            if (quantized := self._checkpoint.quantized(stored)) is not None:
                bar.add(self._checkpoint.num_bytes(stored))
                return quantized
        weight = self._tensor(f"{name}.weight", bar)
        return weight.T if linear.is_transposed else weight

    def _tensor(self, name: str, bar: LoadProgress) -> Tensor:
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
        """Return where the files hold a tensor of the model as it is."""
        return StoredTensor(self._names.direct[name], self._shapes[name])

    def _source(self, name: str) -> str:
        """Return the tensor that a tensor of the model is tied to, or itself."""
        tied: dict[str, str] = self._model.all_tied_weights_keys
        while name not in self._names.direct and name in tied:
            name = tied[name]
        return name

    def _compute_buffers(self) -> None:
        """Compute the buffers that no file holds, such as frequencies, as transformers does."""
        for module in list(self._model.modules()):
            missing = {
                name: each
                for name, each in module._buffers.items()
                if each is not None and each.is_meta
            }
            for name, each in missing.items():
                module._buffers[name] = torch.empty_like(each, device=self._device)
            if not missing:  # transformers leaves a module alone that has this mark
                setattr(module, "_is_hf_initialized", True)  # noqa: B010
        self._model.initialize_weights()  # type: ignore[no-untyped-call]


def _projection(
    weights: Sequence[Weight],
    biases: Sequence[Tensor],
    operators: Operators,
    *,
    is_router: bool = False,
) -> Projection:
    """Make a projection of the outputs of all weights, which have all biases or none."""
    bias = torch.cat(list(biases)) if biases else None
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(quantized) == len(weights):
        return operators.grouped_projection(quantized, bias)
    whole = torch.cat([decoded(weight) for weight in weights])
    if is_router:
        return operators.exact_projection(whole, bias)
    return operators.projection(whole, bias)


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
