"""Loading of feed-forward layers: dense, or a mixture of experts."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, repeat

import torch
from torch import Tensor

from services.engine.model.adapters.adapters import Site, StackedPart
from services.engine.model.architecture.activation import Activation
from services.engine.model.architecture.layers import (
    BesideSpec,
    DenseSpec,
    ExpertsSpec,
    FeedForwardSpec,
)
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.expert_names import ExpertStack
from services.engine.model.checkpoint.mxfp4 import Mxfp4Weight
from services.engine.model.checkpoint.quantized import (
    Weight,
    decoded,
    in_groups,
)
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.operators.interface import ExpertWeights, Gate, Mixture
from services.engine.model.parts.feed_forward import (
    Beside,
    Dense,
    EmptyFeedForward,
    Experts,
    FeedForward,
    NormedExperts,
    NormedOutput,
    SharedExpert,
    TokenExperts,
    TokenIds,
)
from services.engine.model.parts.stored import StoredNorm
from services.engine.model.parts.stored_feed_forward import (
    StackedExperts,
    StoredBeside,
    StoredDense,
    StoredExperts,
    StoredFeedForward,
    StoredSharedExpert,
    StoredShortcut,
)
from services.engine.model.parts.tensor_reader import (
    TensorReader,
    WeightAndBias,
    shard_rows,
    split_parts,
    take_rows,
)

__all__ = ["FeedForwardReader"]

_ALWAYS = 1e6
"""Bias that makes an expert win over all others, whose weights are at most 1"""


class FeedForwardReader:
    """Reader of the feed-forward layers of one checkpoint."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self.tokens: TokenIds | None = None
        """Ids that each step must set, because layers' experts depend on them; None: none do"""

    def read(
        self,
        stored: StoredFeedForward | None,
        content: FeedForwardSpec,
        norm: StoredNorm | None,
        post_norm: StoredNorm | None,
    ) -> FeedForward:
        """Read a layer; of a layer with a shortcut, only the dense layer.

        content: its shape in the whole model; norm: the norm whose output it reads; post_norm: the
        norm of its output.
        """
        if stored is None:
            return EmptyFeedForward()
        if isinstance(stored, StoredShortcut):
            assert isinstance(content, BesideSpec)
            return self._read_dense(stored.dense, content.dense, norm, post_norm)
        if isinstance(stored, StoredBeside):
            assert isinstance(content, BesideSpec)
            assert post_norm is not None
            return self._read_beside(stored, content, norm, post_norm)
        if isinstance(stored, StoredExperts):
            assert isinstance(content, ExpertsSpec)
            experts = self._read_experts(stored, content, norm)
            return experts if post_norm is None else self._normed_output(experts, post_norm)
        assert isinstance(content, DenseSpec)
        return self._read_dense(stored, content, norm, post_norm)

    def read_shortcut(
        self, stored: StoredShortcut, content: FeedForwardSpec, norm: StoredNorm | None
    ) -> FeedForward:
        """Read the experts of a layer whose output joins the residual later; see `read`."""
        assert isinstance(content, BesideSpec)
        return self._read_experts(stored.experts, content.experts, norm)

    def _read_dense(
        self,
        stored: StoredDense,
        content: DenseSpec,
        norm: StoredNorm | None,
        post_norm: StoredNorm | None,
    ) -> Dense:
        gate = self._dense_gate(stored, content, norm)
        down = self._reader.residual_projection(stored.down)
        return Dense(gate, down, None if post_norm is None else self._reader.output_norm(post_norm))

    def _normed_output(self, content: FeedForward, norm: StoredNorm) -> NormedOutput:
        reader = self._reader
        return NormedOutput(content, reader.output_norm(norm), reader.operators)

    def _read_beside(
        self,
        stored: StoredBeside,
        content: BesideSpec,
        norm: StoredNorm | None,
        post_norm: StoredNorm,
    ) -> Beside:
        reader = self._reader
        return Beside(
            dense=self._read_dense(stored.dense, content.dense, norm, stored.dense_post_norm),
            experts=reader.shard.summed_experts(self._normed_experts(stored, content.experts)),
            experts_norm=reader.output_norm(stored.post_norm),
            norm=reader.output_norm(post_norm),
            operators=reader.operators,
        )

    def _normed_experts(self, stored: StoredBeside, content: ExpertsSpec) -> NormedExperts:
        reader, routing = self._reader, content.routing
        mixture = self._mixture(stored.experts, content, None)
        ((weight, bias),) = reader.linear(stored.experts.router, None)
        router = reader.operators.exact_projection(decoded(weight), bias)
        reader.step_bytes += mixture.weight_bytes + router.weight_bytes
        scale = reader.tensor(stored.router_scale).float() * reader.spec.hidden_size**-0.5
        factors = reader.tensor(stored.expert_scale).to(reader.device, torch.float32, copy=True)
        router = reader.adapted(router, reader.site(stored.experts.router))
        return NormedExperts(
            router_norm=reader.norm_weight(scale),
            router=router,
            norm=reader.norm_weight(reader.tensor(stored.norm.weight)),
            mixture=mixture,
            routing=routing,
            factors=factors,
            epsilon=reader.spec.norm_epsilon,
            operators=reader.operators,
            routed=mixture.routed(router, routing, None, None, factors),
        )

    def _dense_gate(self, stored: StoredDense, content: DenseSpec, norm: StoredNorm | None) -> Gate:
        reader = self._reader
        activation = self._activation(content.activation, stored.activation)
        parts = reader.linear(stored.gate, norm)
        alternates = reader.spec.family.names.gate_alternates
        if alternates:
            rows = torch.arange(2 * content.width).view(content.width, 2).T.flatten()
            parts = [take_rows(part, rows) for part in parts]
        halves = self._gate_parts(parts, 2 if activation.gated else 1)
        gate = reader.gate(halves, activation, reader.operators_of(stored.gate))
        if reader.adapters is not None:
            products = 2 if activation.gated else 1
            order = self._order_of_gate(content.width, products, alternates=alternates)
            gate.adapt(reader.adapters.delta(reader.site(stored.gate, norm, order)))
        return gate

    def _activation(self, activation: Activation, stored: tuple[StoredTensor, ...]) -> Activation:
        """Return an activation with the layer's own constants, if it has any."""
        if not stored:
            return activation
        constants = (self._reader.tensor(each).float().item() for each in stored)
        return activation.with_constants(*constants)

    def _read_experts(
        self, stored: StoredExperts, content: ExpertsSpec, norm: StoredNorm | None
    ) -> FeedForward:
        reader, routing = self._reader, content.routing
        mixture = self._mixture(stored, content, norm)
        if reader.adapters is not None:
            mixture.adapt(reader.adapters.experts(self._expert_sites(stored, content, norm)))
        ((weight, bias),) = reader.linear(stored.router, norm)
        router = reader.operators.exact_projection(decoded(weight), bias)
        reader.step_bytes += mixture.weight_bytes + router.weight_bytes
        router = reader.adapted(router, self._router_site(stored, norm))
        bias = self._choice_bias(stored.choice_bias, content.weighed_shared)
        factors = self._identity_factors(content)
        by_token = self._by_token(stored.by_token, content.count)
        shared = self._shared_expert(stored.shared, content.shared, norm)
        parts = None if shared is None else shared.parts
        routed = mixture.routed(router, routing, bias, parts, factors)
        layer_experts = Experts(
            router=router,
            mixture=mixture,
            count=content.num_choices,
            routing=routing,
            bias=bias,
            operators=reader.operators,
            shared=shared,
            routed=routed,
            by_token=by_token,
            factors=factors,
        )
        return reader.shard.summed_experts(layer_experts)

    def _mixture(
        self, stored: StoredExperts, content: ExpertsSpec, norm: StoredNorm | None
    ) -> Mixture:
        reader = self._reader
        if isinstance(stored.experts, StackedExperts):
            operators, experts = reader.operators, self._stacked_experts(stored.experts)
            if content.weighed_shared:
                experts = chain(experts, self._shared_stack(stored, stored.experts.layout))
        else:
            parts = ((expert.gate, expert.down) for expert in stored.experts)
            operators = reader.operators_of(*chain.from_iterable(parts))
            experts = (
                self._expert(
                    content.activation,
                    reader.linear(expert.gate, norm, of_expert=True),
                    *reader.partial(expert.down, of_expert=True),
                )
                for expert in stored.experts
            )
        per_token = content.routing.per_token
        mixture = operators.mixture(experts, content.count, per_token, content.activation)
        mixture.returns_rows = content.identities > 0
        return mixture

    def _identity_factors(self, content: ExpertsSpec) -> Tensor | None:
        """Return factors that let one rank alone return the rows of experts without weights."""
        if not content.identities or self._reader.shard.number == 0:
            return None
        factors = torch.ones(content.num_choices, device=self._reader.device)
        factors[content.count :] = 0
        return factors

    def _choice_bias(self, stored: StoredTensor | None, shared: int) -> Tensor | None:
        """Read the bias of the choice. shared: number of last experts, which every token has."""
        if stored is None:
            return None
        bias = self._reader.tensor(stored).float().flatten()
        bias = torch.cat((bias, bias.new_full((shared,), _ALWAYS)))
        return bias.to(self._reader.device, torch.float32, copy=True)

    def _by_token(self, stored: StoredTensor | None, count: int) -> TokenExperts | None:
        """Read the experts of each token id. Raises CheckpointError for a wrong number."""
        if stored is None:
            return None
        table = self._reader.tensor(stored)
        if table.min() < 0 or table.max() >= count:
            raise CheckpointError(
                f"{stored.name} must have numbers of experts, from 0 to {count - 1}."
            )
        if self.tokens is None:
            self.tokens = TokenIds()
        return TokenExperts(table.to(self._reader.device, torch.int64, copy=True), self.tokens)

    def _shared_expert(
        self,
        stored: StoredSharedExpert | None,
        content: DenseSpec | None,
        norm: StoredNorm | None,
    ) -> SharedExpert | None:
        if stored is None or content is None:
            return None
        reader, router = self._reader, None
        if stored.router is not None:
            ((weight, bias),) = reader.linear(stored.router, norm)
            router = reader.operators.exact_projection(decoded(weight), bias)
            reader.step_bytes += router.weight_bytes
            router = reader.adapted(router, reader.site(stored.router, norm))
        return SharedExpert(
            expert=Dense(
                self._dense_gate(stored.expert, content, norm),
                reader.partial_projection(stored.expert.down),
            ),
            router=router,
            operators=reader.operators,
        )

    def _stacked_experts(self, content: StackedExperts) -> Iterator[ExpertWeights]:
        if content.layout.is_flat:
            yield from self._flat_experts(content)
            return
        shard = self._reader.shard
        for gate, gate_bias, down, down_bias in zip(
            self._stack(content.gate, content.layout),
            self._biases(content.gate_bias),
            self._stack(content.down, content.layout),
            self._biases(content.down_bias),
            strict=False,
        ):
            outputs = _halves(gate.shape[0], content.layout)
            biases = [None if gate_bias is None else shard.rows(gate_bias[o]) for o in outputs]
            down_part, down_bias = self._reader.partial_of(down, down_bias)
            yield ExpertWeights(
                gate=shard.outputs(_outputs(gate, outputs[0])),
                up=shard.outputs(_outputs(gate, outputs[1])),
                down=down_part,
                gate_bias=biases[0],
                up_bias=biases[1],
                down_bias=down_bias,
            )

    def _flat_experts(self, content: StackedExperts) -> Iterator[ExpertWeights]:
        reader = self._reader
        stacks = map(reader.tensor, (*content.gate, *content.down))
        for gate, up, down in zip(*(each.chunk(content.count) for each in stacks), strict=True):
            down_part, _ = reader.partial_of(down.T, None)
            shard = reader.shard
            yield ExpertWeights(shard.outputs(gate), shard.outputs(up), down_part, None, None, None)

    def _shared_stack(self, stored: StoredExperts, layout: ExpertStack) -> Iterator[ExpertWeights]:
        """Read the shared experts that the router weighs."""
        *gate, down = map(self._reader.tensor, stored.weighed_shared)
        outputs = self._reader.shard.outputs
        for number, weight in enumerate(down):
            if len(gate) == 1:
                both = gate[0][number]
                parts = [both[rows] for rows in _halves(len(both), layout)]
            else:
                parts = [each[number] for each in gate]
            part, _ = self._reader.partial_of(weight, None)
            yield ExpertWeights(outputs(parts[0]), outputs(parts[1]), part, None, None, None)

    def _stack(self, content: tuple[StoredTensor, ...], layout: ExpertStack) -> Iterator[Weight]:
        """Yield each expert's weight as [outputs, inputs]."""
        if content[0].dtype is None:
            stack = self._reader.tensor(content[0])
            yield from stack.transpose(1, 2) if layout.transposed else stack
        else:
            blocks, scales = map(self._reader.tensor, content)
            operators, mapped = self._reader.operators, self._reader.checkpoint.maps
            in_codes = operators.keeps_groups and not operators.groups_experts
            for weight in map(Mxfp4Weight, blocks, scales):
                yield in_groups(weight, mapped=mapped) if in_codes else weight

    def _biases(self, stored: StoredTensor | None) -> Iterator[Tensor | None]:
        """Yield each expert's bias; None for each expert if there are none."""
        return repeat(None) if stored is None else iter(self._reader.tensor(stored))

    def _expert(
        self,
        activation: Activation,
        parts: list[WeightAndBias],
        down: Weight,
        down_bias: Tensor | None,
    ) -> ExpertWeights:
        if not activation.gated:
            ((gate, gate_bias),) = self._gate_parts(parts, 1)
            return ExpertWeights(gate, None, down, gate_bias, None, down_bias)
        (gate, gate_bias), (up, up_bias) = self._gate_parts(parts, 2)
        if type(gate) is not type(up):
            gate, up = decoded(gate), decoded(up)
        return ExpertWeights(gate, up, down, gate_bias, up_bias, down_bias)

    def _gate_parts(self, parts: list[WeightAndBias], products: int) -> list[WeightAndBias]:
        """Return this rank's rows of each product, which may be stored as one."""
        outputs = sum(weight.shape[0] for weight, _ in parts) // products
        return [
            shard_rows(part, self._reader.shard)
            for part in split_parts(parts, [outputs] * products)
        ]

    def _order_of_gate(
        self, width: int, products: int, *, alternates: bool = False
    ) -> Tensor | None:
        """Return the stored outputs that this rank has; None = all, in their order.

        alternates: outputs of gate and up alternate.
        """
        if self._reader.shard.count == 1 and not alternates:
            return None
        stored = torch.arange(products * width)
        parts = stored.view(width, products).T if alternates else stored.view(products, width)
        return torch.cat([self._reader.shard.rows(part) for part in parts])

    def _router_site(self, content: StoredExperts, norm: StoredNorm | None) -> Site:
        names = self._reader.spec.family.names.experts
        assert names is not None
        name = f"{content.prefix}{names.router_module}"
        site = self._reader.site(content.router, norm)
        (module,) = site.modules
        return replace(site, modules=(replace(module, alias=name.removeprefix(self._reader.root)),))

    def _expert_sites(
        self, content: StoredExperts, experts: ExpertsSpec, norm: StoredNorm | None
    ) -> Iterator[tuple[Site, Site]]:
        """Describe gate and down of each expert for adapters."""
        spec, fold = self._reader.spec, self._reader.fold_residual
        names = spec.family.names.experts
        assert names is not None
        width, hidden = experts.width, spec.hidden_size
        count = experts.count - experts.weighed_shared
        module = f"{content.prefix}{names.module}.experts"
        module = module.removeprefix(self._reader.root)
        stacked = content.experts if isinstance(content.experts, StackedExperts) else None
        alternates = stacked is not None and stacked.layout.alternates
        products = 2 if experts.activation.gated else 1
        order = self._order_of_gate(width, products, alternates=alternates)
        first = "gate_up_proj" if experts.activation.gated else "up_proj"
        for number in range(count):
            if isinstance(content.experts, StackedExperts):
                gate = Site((), hidden, order)
                down = Site((), width, columns=self._reader.columns_of(width), fold=fold)
            else:
                stored = content.experts[number]
                gate = self._reader.site(stored.gate, norm, order)
                down = self._reader.residual_site(stored.down)
            # in transformers, experts without weights have a place only in the first parameter
            choices = count + experts.identities
            both = StackedPart(f"{module}.{first}", products * width, number, choices)
            outputs = StackedPart(f"{module}.down_proj", hidden, number, count)
            yield replace(gate, stacked=both), replace(down, stacked=outputs)
        for _ in range(experts.weighed_shared):  # no adapter changes them
            yield Site((), hidden, order), Site((), width)


def _halves(outputs: int, layout: ExpertStack) -> tuple[slice, slice]:
    """Return the outputs of gate and of up."""
    if layout.alternates:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, outputs // 2), slice(outputs // 2, None)


def _outputs(weight: Weight, outputs: slice) -> Weight:
    """View some outputs."""
    return weight[outputs] if isinstance(weight, Tensor) else weight.rows(outputs)
