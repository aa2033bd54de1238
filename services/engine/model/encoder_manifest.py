"""Tensors that an encoder's checkpoint must hold, by name, shape and role."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.engine.model.architecture.disentangled import DisentangledSpec
from services.engine.model.architecture.distance import NUM_BUCKETS
from services.engine.model.architecture.layers import AttentionSpec, DenseSpec, ExpertsSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.tensors import StoredTensor, TensorFiles
from services.engine.model.manifest import find_root
from services.engine.model.parts.stored import StoredLinear, StoredNorm, stored_tensors

__all__ = [
    "EncoderManifest",
    "StoredDistances",
    "StoredEncoderExperts",
    "StoredEncoderLayer",
    "StoredMlp",
]


@dataclass(frozen=True, slots=True)
class StoredMlp:
    """A dense layer, or one expert."""

    gate: StoredLinear
    """Gate and up of a gated layer, or the only product"""
    down: StoredLinear


@dataclass(frozen=True, slots=True)
class StoredEncoderExperts:
    """Tensors of a mixture of experts, for each expert or all experts in two."""

    router: StoredLinear
    experts: tuple[StoredMlp, ...]
    """Experts with tensors of their own; empty: `stacks` has all experts"""
    stacks: tuple[StoredTensor, ...]
    """Two tensors [experts * width, hidden_size]: the first products of all experts, and the second
    ones transposed"""
    output_bias: StoredTensor | None
    """[hidden_size], added once to the sum of a token's experts"""


@dataclass(frozen=True, slots=True)
class StoredEncoderLayer:
    attention_norm: StoredNorm | None
    qkv: StoredLinear
    output: StoredLinear
    feed_forward_norm: StoredNorm
    feed_forward: StoredMlp | StoredEncoderExperts


@dataclass(frozen=True, slots=True)
class StoredDistances:
    """Embeddings of distances, and their projections in each layer."""

    table: StoredTensor
    norm: StoredNorm | None
    keys: tuple[StoredLinear | None, ...]
    queries: tuple[StoredLinear | None, ...]


@dataclass(frozen=True, slots=True)
class EncoderManifest:
    """Every tensor of an encoder's checkpoint but those of its heads."""

    root: str
    """Beginning of all names"""
    embedding: StoredTensor
    positions: StoredTensor | None
    token_types: StoredTensor | None
    embedding_norm: StoredNorm
    layers: tuple[StoredEncoderLayer, ...]
    last_norm: StoredNorm | None
    bias: StoredTensor | None
    """Embedding of the distance of two tokens (MPNet)"""
    distances: StoredDistances | None
    """Embeddings of distances (DeBERTa)"""

    @staticmethod
    def of(spec: ModelSpec, checkpoint: TensorFiles) -> "EncoderManifest":
        """List the tensors of `spec`, with the biases that the checkpoint has."""
        names, traits = spec.family.names, spec.family.encoder
        assert traits is not None
        own = _Names(spec, checkpoint)
        width = spec.hidden_size
        positions = token_types = bias = None
        if names.positions is not None:
            count = spec.context_length + spec.position_offset
            positions = own.tensor(f"{names.positions}.weight", count, width)
        if traits.token_types is not None and spec.num_token_types:
            token_types = own.tensor(f"{traits.token_types}.weight", spec.num_token_types, width)
        if traits.attention_bias is not None:
            heads = spec.attention(0).num_heads
            bias = own.tensor(f"{traits.attention_bias}.weight", NUM_BUCKETS, heads)
        return EncoderManifest(
            root=own.root,
            embedding=own.tensor(f"{names.embedding}.weight", spec.vocab_size, width),
            positions=positions,
            token_types=token_types,
            embedding_norm=own.norm(traits.embedding_norm),
            layers=tuple(own.layer(index) for index in range(spec.num_layers)),
            last_norm=own.norm(names.final_norm) if traits.norms_first else None,
            bias=bias,
            distances=None if spec.disentangled is None else own.distances(spec.disentangled),
        )

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield each tensor once."""
        yield from dict.fromkeys(stored_tensors(self))


class _Names:
    """Builder of the names and shapes of one checkpoint."""

    def __init__(self, spec: ModelSpec, checkpoint: TensorFiles) -> None:
        self.root = find_root(checkpoint, spec.family.names)
        self._spec = spec
        self._checkpoint = checkpoint

    def layer(self, index: int) -> StoredEncoderLayer:
        spec, names, traits = self._spec, self._spec.family.names, self._spec.family.encoder
        assert traits is not None
        assert names.attention_norm is not None
        assert names.feed_forward_norm is not None
        prefix, attention = f"{names.layers}.{index}.", spec.attention(index)
        width, heads = spec.hidden_size, attention.num_heads * attention.head_dim
        # ModernBERT's first layer reads the norm of the embeddings
        is_normed = not traits.norms_first or index > 0
        content = spec.layers[index].feed_forward
        assert isinstance(content, DenseSpec | ExpertsSpec)
        return StoredEncoderLayer(
            attention_norm=self.norm(f"{prefix}{names.attention_norm}") if is_normed else None,
            qkv=self._qkv(prefix, attention),
            output=self._linear(prefix, (names.output,), (width,), heads, attention.output_bias),
            feed_forward_norm=self.norm(f"{prefix}{names.feed_forward_norm}"),
            feed_forward=self._mlp(prefix, names.gate, names.down, content)
            if isinstance(content, DenseSpec)
            else self._experts(prefix, content),
        )

    def distances(self, shape: DisentangledSpec) -> StoredDistances:
        """Name DeBERTa's embeddings of distances, and their projections in each layer."""
        spec = self._spec
        table = self.tensor("encoder.rel_embeddings.weight", 2 * shape.span, spec.hidden_size)
        norm = self.norm("encoder.LayerNorm") if shape.has_norm else None
        shared = shape.shares_projections
        key, query = ("key_proj", "query_proj") if shared else ("pos_key_proj", "pos_query_proj")
        return StoredDistances(
            table,
            norm,
            self._projections(key, spec.num_layers if shape.reads_keys else 0),
            self._projections(query, spec.num_layers if shape.reads_queries else 0),
        )

    def norm(self, name: str) -> StoredNorm:
        width = self._spec.hidden_size
        bias = self.tensor(f"{name}.bias", width) if self._holds(f"{name}.bias") else None
        return StoredNorm(self.tensor(f"{name}.weight", width), bias)

    def tensor(self, name: str, *shape: int) -> StoredTensor:
        return StoredTensor(f"{self.root}{name}", shape)

    def _holds(self, name: str) -> bool:
        return self._checkpoint.holds(f"{self.root}{name}")

    def _qkv(self, prefix: str, attention: AttentionSpec) -> StoredLinear:
        heads = attention.num_heads * attention.head_dim
        names = self._spec.family.names.qkv
        return self._linear(prefix, names, (heads,) * 3, self._spec.hidden_size, attention.qkv_bias)

    def _mlp(
        self, prefix: str, gate: tuple[str, ...], down: str, content: DenseSpec | ExpertsSpec
    ) -> StoredMlp:
        hidden, inner = self._spec.hidden_size, content.width
        widths = (inner, inner) if content.activation.gated else (inner,)
        has_down_bias = content.has_bias or self._holds(f"{prefix}{down}.bias")
        return StoredMlp(
            self._linear(prefix, gate, widths, hidden, content.has_bias),
            self._linear(prefix, (down,), (hidden,), inner, has_down_bias),
        )

    def _experts(self, prefix: str, content: ExpertsSpec) -> StoredEncoderExperts:
        names, hidden = self._spec.family.names.experts, self._spec.hidden_size
        assert names is not None
        router = self._linear(prefix, (names.router,), (content.count,), hidden, False)
        bias = f"{prefix}{names.output_bias}"
        stored = StoredEncoderExperts(
            router,
            (),
            (),
            self.tensor(bias, hidden) if names.output_bias and self._holds(bias) else None,
        )
        if names.are_stacked:
            shape = (content.count * content.width, hidden)
            stacks = (self.tensor(f"{prefix}{name}", *shape) for name in (*names.gate, names.down))
            return replace(stored, stacks=tuple(stacks))
        experts = (
            self._mlp(
                prefix,
                tuple(name.format(number) for name in names.gate),
                names.down.format(number),
                content,
            )
            for number in range(content.count)
        )
        return replace(stored, experts=tuple(experts))

    def _projections(self, name: str, count: int) -> tuple[StoredLinear | None, ...]:
        """Name a projection of distances in the first `count` layers."""
        spec, names = self._spec, self._spec.family.names
        width = spec.hidden_size
        prefixes = [f"{names.layers}.{index}.attention.self." for index in range(count)]
        layers = [self._linear(prefix, (name,), (width,), width, True) for prefix in prefixes]
        return (*layers, *[None] * (spec.num_layers - count))

    def _linear(
        self,
        prefix: str,
        names: tuple[str, ...],
        outputs: tuple[int, ...],
        inputs: int,
        has_bias: bool,
    ) -> StoredLinear:
        """Name a tensor for each of `outputs`, or a single one for all."""
        if len(names) == 1:
            outputs = (sum(outputs),)
        pairs = list(zip(names, outputs, strict=True))
        return StoredLinear(
            tuple(self.tensor(f"{prefix}{name}.weight", out, inputs) for name, out in pairs),
            tuple(self.tensor(f"{prefix}{name}.bias", out) for name, out in pairs if has_bias),
        )
