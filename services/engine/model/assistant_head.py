"""Assistant of Gemma 4: layers that read the engine's model's pages, and their loading.

Source: `Gemma4AssistantForCausalLM` and `SinglePositionMultiTokenCandidateGenerator` of
transformers. All draft tokens are made at the position of the newest token, from the keys and
values of the tokens before it. The first one reads the model's final hidden states behind their
norm, further ones what the assistant has made itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from services.engine.model.architecture.cache_groups import layer_groups
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend, KVCache, choose_backend
from services.engine.model.checkpoint.assistant_config import (
    Clusters,
    assistant_clusters,
    assistant_text,
    assistant_width,
)
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.progress import LoadProgress
from services.engine.model.checkpoint.tensors import Checkpoint, StoredTensor
from services.engine.model.clustered_output import ClusteredOutput
from services.engine.model.decoder import Decoder, DecoderWeights
from services.engine.model.draft_head import DraftHead, HeadInputs
from services.engine.model.loader import choose_operators
from services.engine.model.manifest import StoredLayer, stored_layer
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.operators.tiled_operators import TiledOperators
from services.engine.model.parts.shard import Shard
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm, stored_tensors
from services.engine.model.parts.tensor_reader import TensorReader
from services.engine.model.residual import ResidualRows
from services.engine.model.weight_reader import WeightReader

__all__ = ["AssistantHead", "load_assistant"]

_ROOT = "model."
"""Beginning of the names of the layers' tensors"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantInputs(HeadInputs):
    """Inputs of an assistant: one product of the embedding and the normed hidden states."""

    before: Projection
    """2 * width → hidden_size"""
    behind: Projection
    """hidden_size → width"""
    width: int
    own_width: int
    embedding_width: int
    embedding_scale: float
    target_norm: Tensor
    """Norm of the model's final hidden states"""
    target_epsilon: float
    own_norm: Tensor
    """Norm of the assistant's output"""
    epsilon: float
    operators: Operators

    def fill(self, embedded: Tensor, states: Tensor, rows: ResidualRows, *, is_own: bool) -> None:
        if not is_own:
            states = rms_norm(states, (self.width,), self.target_norm, self.target_epsilon)
        joined = torch.cat((embedded * self.embedding_scale, states), dim=1)
        arranged = self.operators.temporary(*joined.shape)
        self.operators.arrange(joined, arranged)
        self.before.into(arranged, rows.hidden)

    def following(self, hidden: Tensor) -> Tensor:
        normed = self.operators.temporary(*hidden.shape)
        self.operators.rms_norm(hidden.contiguous(), self.own_norm, self.epsilon, normed)
        states = hidden.new_empty(len(hidden), self.width)
        self.behind.into(normed, states)
        return states


class AssistantHead(DraftHead):
    """An assistant in memory. It has no pages of its own."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        weights: DecoderWeights,
        operators: Operators,
        attention: AttentionBackend,
        inputs: HeadInputs,
        sources: Sequence[int],
    ) -> None:
        """sources: for each layer, the layer of the engine's model whose pages it reads."""
        super().__init__(spec, dtype, weights, operators, attention, inputs)
        self._sources = sources

    def pages_of(self, cache: KVCache) -> KVCache:
        """Return the pages of the engine's model that the layers read, by the layers' numbers."""
        sources = dict(enumerate(self._sources))
        return KVCache(
            {layer: cache.keys[source] for layer, source in sources.items()},
            {layer: cache.values[source] for layer, source in sources.items()},
            cache.block_size,
            groups=cache.groups,
        )


@dataclass(frozen=True, slots=True)
class _StoredAssistant:
    """Tensors of an assistant."""

    before: StoredLinear
    behind: StoredLinear
    layers: tuple[StoredLayer, ...]
    final_norm: StoredNorm
    embedding: StoredTensor
    """Output projection"""
    centroids: StoredLinear | None
    ordering: StoredTensor | None
    """Ids of the clusters, one cluster after another"""

    @staticmethod
    def of(spec: ModelSpec, width: int, clusters: Clusters | None) -> "_StoredAssistant":
        """List the tensors. width: that of the engine's model."""
        names, hidden = LayerNames(spec, ""), spec.hidden_size
        return _StoredAssistant(
            before=names.linear(("pre_projection",), (hidden,), 2 * width, False),
            behind=names.linear(("post_projection",), (width,), hidden, False),
            layers=tuple(stored_layer(spec, index, _ROOT) for index in range(spec.num_layers)),
            final_norm=LayerNames(spec, _ROOT).required_norm("norm"),
            embedding=StoredTensor(f"{_ROOT}embed_tokens.weight", (spec.vocab_size, hidden)),
            centroids=None
            if clusters is None
            else names.linear(("masked_embedding.centroids",), (clusters.count,), hidden, False),
            ordering=None
            if clusters is None
            else StoredTensor(
                "masked_embedding.token_ordering", (spec.vocab_size,), ("I64", "I32")
            ),
        )


def load_assistant(directory: Path, target: Decoder, kv_dtype: str) -> AssistantHead:
    """Load the assistant in `directory`, which shares embeddings and pages of `target`.

    Raises CheckpointError for an assistant that does not fit `target`, before anything is loaded.
    """
    config = Checkpoint.config(directory)
    whole = target.spec
    width = assistant_width(config)
    if not whole.family.is_gemma4:
        raise CheckpointError(f"it drafts for Gemma 4, and the model is {whole.architecture}.")
    if not target.runs_alone:
        raise CheckpointError("it reads pages, which several ranks share. Start one rank.")
    if width != whole.hidden_size:
        raise CheckpointError(
            f"it reads hidden states of a width of {width}, and the model's have "
            f"{whole.hidden_size}. Use the assistant of this model."
        )
    own = ModelSpec.from_config(assistant_text(config), config.file)
    if own.vocab_size != whole.vocab_size:
        raise CheckpointError(
            f"it has {own.vocab_size:,} ids, and the model {whole.vocab_size:,}. Use the assistant "
            "of this model."
        )
    sources = _sources(own, whole)
    spec = _reading(own, whole, sources)
    clusters = assistant_clusters(config, spec.vocab_size)
    operators = choose_operators(spec, target.dtype, target.device, "full")
    tiled = isinstance(operators, TiledOperators)
    attention = choose_backend(spec, target.dtype, target.device, tiled=tiled, kv_dtype=kv_dtype)
    if not target.reads_pages_of(attention):
        raise CheckpointError(
            f"its attention can't read the pages of this model in {target.dtype}. Use --dtype "
            "float32."
        )
    stored = _StoredAssistant.of(spec, width, clusters)
    with Checkpoint(directory) as files:
        unread = (*spec.family.names.ignored, "lm_head.weight", "masked_embedding.*")
        bar = LoadProgress(files.require(stored_tensors(stored), unread), shown=False)
        reader = TensorReader(files, spec, target.dtype, target.device, operators, bar, Shard())
        reader.root = _ROOT
        layers = tuple(map(WeightReader(reader).layer, stored.layers, spec.layers))
        final_norm = reader.norm_weight(reader.tensor(stored.final_norm.weight))
        inputs = AssistantInputs(
            before=_product(reader, stored.before),
            behind=_product(reader, stored.behind),
            width=width,
            own_width=width,
            embedding_width=width,
            embedding_scale=whole.embedding_scale,
            target_norm=target.final_norm,
            target_epsilon=whole.norm_epsilon,
            own_norm=final_norm,
            epsilon=spec.norm_epsilon,
            operators=operators,
        )
        weights = DecoderWeights(
            embedding=target.embedding,
            positions=None,
            layers=layers,
            final_norm=final_norm,
            output=_output(reader, stored, clusters),
            device=target.device,
            step_bytes=reader.step_bytes,
            layer_inputs=None,
            tokens=None,
        )
    return AssistantHead(spec, target.dtype, weights, operators, attention, inputs, sources)


def _product(reader: TensorReader, linear: StoredLinear) -> Projection:
    return reader.product(reader.linear(linear, None), reader.operators_of(linear))


def _output(
    reader: TensorReader, stored: _StoredAssistant, clusters: Clusters | None
) -> Projection:
    if clusters is None or stored.centroids is None or stored.ordering is None:
        weight = reader.weight(stored.embedding, None)
        return reader.projection([weight], None, reader.operators.for_logits())
    ids = reader.tensor(stored.ordering).long()
    if not torch.equal(ids.sort().values, torch.arange(len(ids))):
        raise CheckpointError(f"the tensor {stored.ordering.name} does not hold each id once.")
    table = reader.tensor(stored.embedding)[ids].to(reader.device, reader.dtype)
    return ClusteredOutput(
        centroids=_product(reader, stored.centroids),
        table=table.view(clusters.count, -1, table.shape[1]),
        ids=ids.view(clusters.count, -1).to(reader.device),
        chosen=clusters.chosen,
        operators=reader.operators,
    )


def _sources(own: ModelSpec, whole: ModelSpec) -> list[int]:
    """Return for each layer the last layer of the engine's model with keys of the same kind.

    Raises CheckpointError if there is none, or its keys have other shapes.
    """
    last = {layer.window > 0: index for index, layer in whole.paged_layers.items()}
    sources = []
    for index, layer in own.attention_layers.items():
        source = last.get(layer.window > 0)
        keys = None if source is None else whole.attention(source)
        if source is None or keys is None or _keys(keys) != _keys(layer):
            heads, width, window = _keys(layer)
            raise CheckpointError(
                f"its layer {index} reads {heads} keys of a width of {width} and a window of "
                f"{window}, which the model does not have. Use the assistant of this model."
            )
        sources.append(source)
    return sources


def _keys(layer: AttentionSpec) -> tuple[int, int, int]:
    return layer.num_kv_heads, layer.head_dim, layer.window


def _reading(own: ModelSpec, whole: ModelSpec, sources: Sequence[int]) -> ModelSpec:
    """Return the assistant's shape with layers that read the pages of the engine's model.

    A window has one token less: the newest token's keys are not computed yet.
    """
    groups = {
        layer: number for number, each in enumerate(layer_groups(whole)) for layer in each.layers
    }
    layers = []
    for index, (layer, source) in enumerate(zip(own.layers, sources, strict=True)):
        mixer = own.attention(index)
        reading = replace(
            mixer,
            window=mixer.window and mixer.window - 1,
            reads_layer=index,
            foreign_group=groups[source],
        )
        layers.append(replace(layer, mixer=reading))
    return replace(own, layers=tuple(layers), context_length=whole.context_length)
