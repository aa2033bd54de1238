"""Typed description of a decoder's layers: a mixer and a feed-forward layer each."""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import TypeAlias

from services.engine.model.architecture.activation import Activation, GateFunction
from services.engine.model.architecture.block_index import BlockIndex
from services.engine.model.architecture.compressed_spec import CompressedSpec
from services.engine.model.architecture.convolution_shape import ConvolutionShape
from services.engine.model.architecture.delta_shape import DeltaShape
from services.engine.model.architecture.gated_unit_shape import GatedUnitShape
from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.architecture.lightning_shape import LightningShape
from services.engine.model.architecture.mamba_shape import MambaShape
from services.engine.model.architecture.relative_shape import RelativeShape
from services.engine.model.architecture.rotary import RotarySpec
from services.engine.model.architecture.routing import Routing
from services.engine.model.architecture.selective_shape import SelectiveShape
from services.engine.model.checkpoint.family import QkNorm

__all__ = [
    "AltUpSpec",
    "AttentionGate",
    "AttentionSpec",
    "BesideSpec",
    "ConvolvedFeedForward",
    "DenseSpec",
    "ExpertsSpec",
    "FeedForwardSpec",
    "HyperSpec",
    "LayerSpec",
    "MixerSpec",
    "NoFeedForward",
    "NoMixer",
    "ParallelSpec",
    "SharedBlockSpec",
]


@dataclass(frozen=True, slots=True)
class AttentionGate:
    """Gates that multiply the output of attention, made by a product of their own."""

    function: GateFunction = GateFunction.SIGMOID
    is_of_heads: bool = False
    """True if each head has one gate, rather than each of its outputs"""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention over the keys and values of earlier tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on query-key products"""
    cap: float
    """Soft cap on scaled query-key products: cap * tanh(product / cap); 0: none"""
    window: int
    """Number of tokens that a token sees, itself included; 0: all. Tokens of encoders see as many
    after them"""
    rotary: RotarySpec | None
    """RoPE of queries and keys; None: there is none"""
    qkv_bias: bool
    output_bias: bool
    has_sinks: bool
    """True if each head's softmax has one more logit, without a value"""
    qk_norm: QkNorm
    gate: AttentionGate | None
    """Gates of the outputs; None: there are none"""
    norms_values: bool = False
    """True if values have an RMSNorm over each head, without a weight"""
    keys_are_values: bool = False
    """True if values are made of the same product as keys"""
    is_chunked: bool = False
    """True if tokens see their own chunk of `window` tokens, not the last `window`"""
    reads_layer: int | None = None
    """Layer whose keys and values this one reads; None: it has its own"""
    foreign_group: int | None = None
    """Cache group of another model's pages that this layer reads as its own; None: it reads none"""
    input_width: int = 0
    """Width of the input; 0: that of the residual"""
    alibi_bias: float = 0.0
    """Exponent of the smallest slope by which scores fall with the distance (ALiBi); 0: none"""
    clip: float = 0.0
    """Bound of the numbers in queries, keys and values, before the rotation; 0: none"""
    index: BlockIndex | None = None
    """Indexer that chooses the blocks of tokens that are seen; None: all are"""
    value_width: int = 0
    """Width of a head's values; 0: that of its keys"""
    relative: RelativeShape | None = None
    """Addends of scores by distance, and short convolutions; None: there are none"""

    @property
    def page_width(self) -> int:
        """Count of a token's cached numbers: keys, values, and an index key for an indexer."""
        return self.cached_width + (self.index.width if self.index else 0)

    @property
    def value_dim(self) -> int:
        """Width of a head's values and outputs."""
        return self.value_width or self.head_dim

    @property
    def cached_width(self) -> int:
        """Count of the numbers in a token's keys and values."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)

    @property
    def num_gates(self) -> int:
        """Number of gates of a token."""
        if self.gate is None:
            return 0
        return self.num_heads if self.gate.is_of_heads else self.num_heads * self.value_dim

    @property
    def gate_heads(self) -> int:
        """Number of heads of width `head_dim` that hold the gates and their padding."""
        return -(-self.num_gates // self.head_dim)

    @property
    def is_plain(self) -> bool:
        """True if attention is a plain softmax, without soft cap, sinks and biases."""
        return not self.cap and not self.has_sinks and not self.alibi_bias

    @property
    def widths(self) -> Set[int]:
        """Widths of the activations."""
        widths = {self.head_dim, self.value_dim}
        if self.index is not None:
            widths.add(self.index.width)
        if self.relative is not None:
            widths.add(self.num_heads * self.relative.rank)
        return widths

    def part(self, count: int) -> "AttentionSpec":
        """Return the shape of one of `count` equal parts. Raises ValueError if there are none."""
        num_heads = _divided("num_attention_heads", self.num_heads, count)
        heads = self.num_kv_heads
        if heads % count and count % heads:
            raise ValueError(
                f"num_key_value_heads ({heads}) is neither a multiple nor a divisor of {count}"
            )
        if self.index is not None and heads % count:
            raise ValueError(f"index_n_heads ({heads}) is not a multiple of {count}")
        return replace(self, num_heads=num_heads, num_kv_heads=max(1, heads // count))


@dataclass(frozen=True, slots=True)
class ParallelSpec:
    """Attention and Mamba-2 side by side."""

    attention: AttentionSpec
    mamba: MambaShape

    @property
    def widths(self) -> Set[int]:
        """Widths of the activations."""
        return self.attention.widths | self.mamba.widths

    def part(self, count: int) -> "ParallelSpec":
        """Return the shape of one of `count` equal parts. Raises ValueError if there are none."""
        return ParallelSpec(self.attention.part(count), self.mamba.part(count))


@dataclass(frozen=True, slots=True)
class NoMixer:
    """The place of a mixer in a layer that is a feed-forward layer alone."""

    @property
    def widths(self) -> Set[int]:
        """Widths of the activations."""
        return set()

    def part(self, count: int) -> "NoMixer":
        """Return the shape of one of `count` equal parts."""
        return self


@dataclass(frozen=True, slots=True)
class NoFeedForward:
    """The place of a feed-forward layer in a layer that is a mixer alone."""

    width = inner_width = 0

    def part(self, count: int) -> "NoFeedForward":
        """Return the shape of one of `count` equal parts."""
        return self


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A feed-forward layer of two products with an activation between them."""

    width: int
    """Intermediate size"""
    activation: Activation
    has_bias: bool

    @property
    def inner_width(self) -> int:
        """Width of the scratch space that a pass needs."""
        return self.width

    def part(self, count: int) -> "DenseSpec":
        """Return the shape of one of `count` equal parts. Raises ValueError if there are none."""
        if self.activation.cutoff is not None and count > 1:
            raise ValueError("activation_sparsity_pattern has sparse layers, which are not divided")
        return replace(self, width=_divided("intermediate_size", self.width, count))


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts: feed-forward layers among which a router chooses for each token."""

    count: int
    """Number of experts with weights"""
    routing: Routing
    width: int
    """Intermediate size of an expert"""
    activation: Activation
    has_bias: bool
    is_mxfp4: bool
    """True if the experts are stored as MXFP4"""
    shared: DenseSpec | None
    """The shared expert, which every token has; None: there is none"""
    identities: int = 0
    """Number of experts without weights, which return what they read; their numbers come last"""
    weighed_shared: int = 0
    """Number of experts that every token has, the last ones of `count`. The router weighs them
    together with those that it chooses"""

    @property
    def num_choices(self) -> int:
        """Number of experts among which the router chooses."""
        return self.count + self.identities

    @property
    def inner_width(self) -> int:
        """Width of the scratch space that a pass needs."""
        return self.width if self.shared is None else self.shared.width

    def part(self, count: int) -> "ExpertsSpec":
        """Return the shape of one of `count` equal parts. Raises ValueError if there are none."""
        return replace(
            self,
            width=_divided("the experts' intermediate size", self.width, count),
            shared=None if self.shared is None else self.shared.part(count),
        )


@dataclass(frozen=True, slots=True)
class BesideSpec:
    """A dense layer and experts side by side."""

    dense: DenseSpec
    experts: ExpertsSpec
    is_shortcut: bool = False
    """True if both read the same norm, and the experts' output joins the residual at the end of the
    next layer; False: each has norms of its own"""

    @property
    def width(self) -> int:
        """Intermediate size of an expert."""
        return self.experts.width

    @property
    def inner_width(self) -> int:
        """Width of the scratch space that a pass needs."""
        return self.dense.width

    def part(self, count: int) -> "BesideSpec":
        """Return the shape of one of `count` equal parts. Raises ValueError if there are none."""
        return replace(self, dense=self.dense.part(count), experts=self.experts.part(count))


@dataclass(frozen=True, slots=True)
class ConvolvedFeedForward:
    """A feed-forward layer whose output is convolved over the tokens of its sequence.

    It is a mixer, because it combines tokens.
    """

    content: DenseSpec | ExpertsSpec
    conv_width: int
    """Number of tokens that the convolution reads"""

    @property
    def widths(self) -> Set[int]:
        """Widths of the activations."""
        return {self.content.width, self.content.inner_width}

    def part(self, count: int) -> "ConvolvedFeedForward":
        """Return the shape of one of `count` equal parts. Raises ValueError if there are none."""
        return replace(self, content=self.content.part(count))


MixerSpec: TypeAlias = (
    AttentionSpec
    | CompressedSpec
    | ConvolvedFeedForward
    | ConvolutionShape
    | DeltaShape
    | GatedUnitShape
    | LatentSpec
    | LightningShape
    | MambaShape
    | NoMixer
    | ParallelSpec
    | SelectiveShape
)
FeedForwardSpec: TypeAlias = DenseSpec | ExpertsSpec | BesideSpec | NoFeedForward


@dataclass(frozen=True, slots=True)
class AltUpSpec:
    """Streams of the residual (https://arxiv.org/abs/2301.13310)."""

    streams: int
    active: int
    """Number of the stream that layers read and add to"""
    has_scale: bool
    """True if the active stream has a factor before the layer's input is computed from it"""
    laurel_rank: int
    """Inner width of the product beside the mixer (https://arxiv.org/abs/2411.07501)"""


@dataclass(frozen=True, slots=True)
class HyperSpec:
    """Hyper-connections: streams of the residual. Each part of a layer reads a mixture of them and
    writes new ones."""

    streams: int
    iterations: int
    """Rounds in which rows and columns of a mixture are divided by their sums"""
    epsilon: float
    """Number that is added to mixtures and sums"""


@dataclass(frozen=True, slots=True)
class SharedBlockSpec:
    """Attention and a feed-forward layer whose weights several depths share (Zamba).

    They read the residual and the embedding. The next layer reads the residual and their output.
    """

    number: int
    """Number of the depth among those with a block"""
    depth: int
    """Number of the stored layer that has the product of the block's output"""
    attention_rank: int
    """Rank of the products that the depth adds to queries, keys and values; 0: none"""
    gate_rank: int
    """Rank of the product that the depth adds to the feed-forward layer's first one; 0: none"""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: norm → mixer → residual → norm → feed-forward layer → residual."""

    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    input_width: int = 0
    """Width of the input that each token has for this layer alone, added at its end; 0: none"""
    has_scalar: bool = False
    """True if the residual is multiplied by a number at the layer's end"""
    altup: AltUpSpec | None = None
    """Streams of AltUp; None: there are none"""
    hyper: HyperSpec | None = None
    """Streams of hyper-connections; None: there are none"""
    normed_factors: tuple[float, float] | None = None
    """Factors of the inputs of the mixer and the feed-forward layer, whose products take the
    residual's place in the sums; None: the parts add to the residual"""
    place: str = ""
    """Name of the stored layer with the tensors; empty: the layer's number"""
    shared_block: SharedBlockSpec | None = None
    """Shared block that the layer is; None: it is none"""
    sublayer: int | None = None
    """Number of the layer among those that share `place`; None: it is the only one"""
    follows_block: bool = False
    """True if the layer reads the output of a shared block beside the residual"""
    follows_shortcut: bool = False
    """True if the output of the previous layer's experts joins the residual at this layer's end"""

    @property
    def content(self) -> FeedForwardSpec:
        """The feed-forward layer, which may be a part of the mixer."""
        if isinstance(self.mixer, ConvolvedFeedForward):
            return self.mixer.content
        return self.feed_forward

    def part(self, count: int) -> "LayerSpec":
        """Return the shape of one of `count` equal parts. Raises ValueError if there are none."""
        return replace(
            self, mixer=self.mixer.part(count), feed_forward=self.feed_forward.part(count)
        )


def _divided(name: str, width: int, count: int) -> int:
    if width % count:
        raise ValueError(f"{name} ({width}) is not a multiple of {count}")
    return width // count
