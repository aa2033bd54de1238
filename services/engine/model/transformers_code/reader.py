"""Loading of a checkpoint's tensors into a planned model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from services.engine.model.adapters.adapters import Adapters, Site, SiteModule
from services.engine.model.checkpoint.progress import LoadProgress
from services.engine.model.checkpoint.quantized import QuantizedWeight, Weight, decoded
from services.engine.model.checkpoint.tensors import TensorFiles
from services.engine.model.operators.composed_projections import AdaptedProjection
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.parts.shard import Shard
from services.engine.model.transformers_code.experts import ProjectedExperts, hold
from services.engine.model.transformers_code.gated import PARTS, GatedLayer
from services.engine.model.transformers_code.linear import (
    Division,
    JointProduct,
    joined,
    product_of,
)
from services.engine.model.transformers_code.norms import replace_norms
from services.engine.model.transformers_code.plan import ModelPlan
from services.engine.model.transformers_code.tensor_source import TensorSource

__all__ = ["CheckpointReader"]

_ROUTERS = ("gate", "router")
"""Last parts of the names of linear layers that choose experts, which are never rounded"""


class CheckpointReader:
    """Reader of one checkpoint into one planned model, which is on the device "meta" before."""

    def __init__(
        self,
        plan: ModelPlan,
        checkpoint: TensorFiles,
        operators: Operators,
        device: torch.device,
        shard: Shard,
        adapters: Adapters,
    ) -> None:
        """shard: this rank's part; adapters: adapters that may change the products."""
        self.step_bytes = 0
        """Bytes of those weights read so far that every step reads"""
        self._plan = plan
        self._model = plan.model
        self._operators = operators
        self._device = device
        self._shard = shard
        self._adapters = adapters
        self._source = TensorSource(plan, checkpoint)

    def require(self) -> int:
        """Return the bytes to read. Raises CheckpointError as `TensorSource.require`."""
        return self._source.require()

    @torch.no_grad()
    def read(self, bar: LoadProgress) -> None:
        """Fill the model: products first, then the other tensors, then computed buffers."""
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
        for name, empty in self._source.plain.items():
            parent, _, last = name.rpartition(".")
            module = self._model.get_submodule(parent)
            if last not in module._parameters and last not in module._buffers:
                continue  # a product of experts
            tensor = self._source.tensor(name, bar)
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
        replace_norms(self._model, self._operators, self._plan.spec.hidden_size)

    def _read_linears(self, names: Sequence[str], operators: Operators, bar: LoadProgress) -> None:
        """Make one product of linear layers that read the same rows."""
        linears = [self._plan.linears[name] for name in names]
        biases = [each for name in names if (each := self._bias(name, bar)) is not None]
        weights = [self._weight(name, operators, bar) for name in names]
        is_router = names[0].rpartition(".")[2] in _ROUTERS
        projection = _projection(weights, biases, operators, is_router=is_router)
        division, dtype = linears[0].division, None
        if all(map(self._plan.takes_adapters, names)):
            projection = AdaptedProjection(projection, self._adapters.delta(self._site(names)))
        if division is Division.INPUTS:
            projection = self._shard.summed(projection, operators)
        elif division is Division.GATHERED:
            projection, dtype = self._shard.gathered(projection, operators), torch.float32
        self.step_bytes += projection.weight_bytes
        widths = [each.out_features for each in linears]
        product = JointProduct(projection, widths, operators, dtype)
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
        if self._plan.takes_adapters(gate_name):
            unit.adapt(self._adapters.delta(self._site([gate_name, up_name])))
        self._read_linears([down_name], operators, bar)
        down = self._plan.linears[down_name]
        product = product_of(down)
        assert product is not None
        self.step_bytes += unit.weight_bytes
        layer.hold(unit, product, self._plan.linears[gate_name].out_features, operators)

    def _read_experts(self, name: str, module: Any, bar: LoadProgress) -> None:
        """Make products of a module's stacked experts, and drop its parameters."""
        first, down = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
        products: list[list[Projection]] = []
        for part in (first, down):
            stack = self._source.tensor(f"{name}.{part}", bar)
            biases = self._source.tensor(f"{name}.{part}_bias", bar) if module.has_bias else None
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
        width = self._source.shape(f"{name}.{first}")[2 if module.is_transposed else 1]
        experts = ProjectedExperts(products[0], products[1], width, self._operators)
        self.step_bytes += experts.weight_bytes
        hold(module, experts)

    def _site(self, names: Sequence[str]) -> Site:
        """Describe a product of linear layers for adapters."""
        linears = [self._plan.linears[name] for name in names]
        modules = zip(names, linears, strict=True)
        site = Site(
            tuple(SiteModule(name, each.outputs) for name, each in modules), linears[0].inputs
        )
        if linears[0].division is Division.INPUTS:
            width = linears[0].in_features
            return replace(
                site, columns=slice(width * self._shard.number, width * (self._shard.number + 1))
            )
        if linears[0].division is Division.OUTPUTS:
            places = torch.arange(sum(each.outputs for each in linears))
            parts = places.split_with_sizes([each.outputs for each in linears])
            return replace(site, order=torch.cat([self._shard.rows(part) for part in parts]))
        return site

    def _bias(self, name: str, bar: LoadProgress) -> Tensor | None:
        """Read this rank's part of the bias of a linear layer."""
        linear = self._plan.linears[name]
        if not linear.has_bias:
            return None
        bias = self._source.tensor(f"{name}.bias", bar)
        if linear.division is Division.NONE:
            return bias
        is_summed = linear.division is Division.INPUTS
        return self._shard.first_rank_only(bias) if is_summed else self._shard.rows(bias)

    def _weight(self, name: str, operators: Operators, bar: LoadProgress) -> Weight:
        """Read this rank's part of a weight [outputs, inputs] of a linear layer."""
        weight = self._source.weight(name, bar, keeps_groups=operators.keeps_groups)
        match self._plan.linears[name].division:
            case Division.NONE:
                return weight
            case Division.INPUTS:
                return self._shard.columns(weight)
            case Division.OUTPUTS | Division.GATHERED:
                return self._shard.outputs(weight)

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
            if not missing:  # transformers does not initialize a module that has this mark
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
