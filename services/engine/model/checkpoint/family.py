"""Description of an architecture by its differences from the Llama decoder."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from services.engine.model.checkpoint.attention_names import (
    BlockIndexNames,
    LatentNames,
    RelativeNames,
)
from services.engine.model.checkpoint.compressed_names import CompressedNames, HyperNames
from services.engine.model.checkpoint.config import JsonObject
from services.engine.model.checkpoint.expert_names import ExpertTensorNames
from services.engine.model.checkpoint.recurrent_names import (
    ConvolutionNames,
    GatedUnitNames,
    LightningNames,
    MambaNames,
    SelectiveNames,
)

__all__ = [
    "AltUpNames",
    "BesideNames",
    "DeltaNetNames",
    "EncoderTraits",
    "Family",
    "HeadStage",
    "ImageSight",
    "LayerInputNames",
    "MultimodalAxes",
    "QkNorm",
    "SharedBlockNames",
    "TensorNames",
    "WindowRule",
]

_HEAD = "lm_head"


class WindowRule(Enum):
    """Rule for the layers that attend over a sliding window only."""

    NONE = "no layer"
    ALL = "every layer, when sliding_window is set and use_sliding_window not false"
    LISTED = "if use_sliding_window: as layer_types lists, or from layer max_window_layers on"
    PATTERN = "as layer_types lists, or all but every sliding_window_pattern-th"
    SPACED = "as layer_types lists, or all but the first and every sliding_window_pattern-th after"
    CHUNKED = "as layer_types lists, or layers with RoPE, which see their own chunk alone"
    LISTED_LOCAL = "those that attention_layers calls local, or every second one"
    BEHIND_DENSE = "as layer_types lists, or as PATTERN in the dense layers and anew behind them"
    EVEN = "if use_sliding_window: as layer_types lists, or even layers below max_window_layers"


class QkNorm(Enum):
    """Norm of queries and keys."""

    NONE = "none"
    HEAD = "RMSNorm over each head, before the rotation"
    HEAD_ROTATED = "RMSNorm over each head, after the rotation"
    HEAD_UNWEIGHTED = "RMSNorm over each head without weights, after the rotation if there is one"
    HEAD_LAYER_NORM = "LayerNorm over each head with weights of its own, before the rotation"
    ALL_HEADS = "RMSNorm over all heads of a token together, before the rotation"


@dataclass(frozen=True, slots=True)
class DeltaNetNames:
    """Tensor names of a gated delta net; those of linear layers without .weight."""

    inputs: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    """Products that compute queries, keys and values, then the output gate; or one tensor for each
    of the four; or one for all, key head by key head. The gate is missing if `gate` is set"""
    rates: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    """Products that compute beta, then the decay; or one tensor, key head by key head. Only beta if
    `decay` is set. Empty: both follow in the one tensor of `inputs`, which is then stored part by
    part"""
    gate: tuple[str, str] | None = None
    """Two products in a row that compute the output gate; None: one product does"""
    decay: tuple[str, str] | None = None
    """Two products in a row that compute the decay; None: one product does"""
    decays_channels: bool = False
    """True if each channel of a key has a decay, rather than each head"""
    convolution: tuple[str, ...] = ("linear_attn.conv1d.weight",)
    """Weight of the convolution: one tensor, or one each for queries, keys and values"""
    a_log: str = "linear_attn.A_log"
    has_rates: bool = False
    """True if `a_log` is stored as -exp(A_log)"""
    dt_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm.weight"
    output: str = "linear_attn.out_proj"
    tiles_values: bool = False
    """True if value heads are stored in turns: the first of each key head, then the second ones"""
    norms: tuple[str, str] | None = None
    """Norms that the mixer and the feed-forward layer of these layers read; None: those of the
    other layers"""


@dataclass(frozen=True, slots=True)
class LayerInputNames:
    """Tensor names of the inputs that each layer adds for itself."""

    table: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"
    norm: str = "per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    output: str = "per_layer_projection"
    post_norm: str = "post_per_layer_input_norm"


@dataclass(frozen=True, slots=True)
class AltUpNames:
    """Tensor names of the residual's streams."""

    router_norm: str = "altup.router_norm"
    router: str = "altup.modality_router"
    prediction: str = "altup.prediction_coefs"
    correction: str = "altup.correction_coefs"
    scale: str = "altup.correct_output_scale"
    """Full name: this tensor has no ".weight" behind it"""
    laurel_left: str = "laurel.linear_left"
    laurel_right: str = "laurel.linear_right"
    laurel_norm: str = "laurel.post_laurel_norm"
    expansion: str = "altup_projections.{}"
    """Name below the model's root rather than a layer's; "{}" is the stream's number less 1"""
    merger: str = "altup_unembed_projections.{}"


@dataclass(frozen=True, slots=True)
class SharedBlockNames:
    """Modules of Zamba's hybrid depths."""

    block: str
    """Module of attention and the feed-forward layer, which several depths share"""
    mamba: str = "mamba_decoder"
    output: str = "linear"
    """Product that the block's output passes through"""
    has_adapters: bool = False
    """True if depths add products of low rank"""
    qkv_adapters: tuple[str, ...] = tuple(
        f"self_attn.linear_{part}_adapter_list.{{}}" for part in "qkv"
    )
    """Products of low rank that a depth adds to attention's; "{}" is the depth's number"""
    gate_adapter: str = "feed_forward.gate_up_proj_adapter_list.{}"


@dataclass(frozen=True, slots=True)
class BesideNames:
    """Tensor names of the norms and factors of experts beside a dense layer."""

    dense_post_norm: str = "post_feedforward_layernorm_1"
    norm: str = "pre_feedforward_layernorm_2"
    post_norm: str = "post_feedforward_layernorm_2"
    router_scale: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Tensor names without .weight and .bias; None: the family has no such tensor.

    Names of a layer's tensors are relative to the layer.
    """

    roots: Mapping[str, str] = field(default_factory=lambda: {"model.": _HEAD, "": _HEAD})
    """Alternative prefixes of names, and with each the whole name of the output projection"""
    embedding: str = "embed_tokens"
    embedding_norm: str | None = None
    """Norm of a decoder's embeddings"""
    positions: str | None = None
    """Learned position embedding, instead of RoPE"""
    layers: str = "layers"
    final_norm: str = "norm"
    attention_norm: str | None = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Products that compute queries, keys and values: three tensors, or one that stacks them"""
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    """Norm of keys; a name with "{}" stands for one tensor for each head"""
    sinks: str | None = None
    """Attention sinks: one extra logit in each head's softmax, without a value"""
    output_gate: str | None = None
    """Gate of attention's output in a tensor of its own; None: none, or behind the queries"""
    gates_heads: bool = False
    """True if `output_gate` has one output for each head, as that of latent attention always has,
    unless reads_gating"""
    output: str = "self_attn.o_proj"
    attention_post_norm: str | None = None
    """Norm of attention's output before it joins the residual"""
    feed_forward_norm: str | None = "post_attention_layernorm"
    gate: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up products: two tensors, or one that stacks their outputs"""
    gate_alternates: bool = False
    """True if outputs of both products alternate in the one tensor of `gate`"""
    down: str = "mlp.down_proj"
    feed_forward_post_norm: str | None = None
    activation: str | None = None
    """Module of xIELU's constants"""
    experts: ExpertTensorNames | None = None
    stacked_experts: ExpertTensorNames | None = None
    """Names in files that stack all experts; None: there are no such files"""
    beside: BesideNames = field(default_factory=BesideNames)
    layer_inputs: LayerInputNames = field(default_factory=LayerInputNames)
    layer_scalar: str = "layer_scalar"
    altup: AltUpNames | None = None
    """Tensors of AltUp's streams; None: the residual is one stream"""
    sublayer_modules: tuple[str, ...] = ()
    """Modules of which a stored layer has two, with their numbers behind these names, because it
    is two layers around one mixture of experts; empty: each stored layer is one"""
    delta_net: DeltaNetNames | None = None
    """Tensors of the layers that layer_types calls linear_attention"""
    convolution: ConvolutionNames | None = None
    """Tensors of the layers that are short convolutions"""
    mamba: MambaNames | None = None
    """Tensors of the layers that are Mamba-2"""
    gated_unit: GatedUnitNames | None = None
    """Tensors of the layers that are gated linear recurrent units"""
    lightning: LightningNames | None = None
    """Tensors of the layers that are lightning attention"""
    selective: SelectiveNames | None = None
    """Tensors of the layers that are Mamba"""
    shared_block: SharedBlockNames | None = None
    """Blocks whose weights several depths share; None: each layer has its own"""
    latent: LatentNames | None = None
    """Tensors of latent attention; None: layers have queries, keys and values"""
    block_index: BlockIndexNames | None = None
    """Tensors of indexers that choose blocks of tokens; None: there are none"""
    relative: RelativeNames | None = None
    """Tensors of addends of scores by distance, and of short convolutions; None: there are none"""
    compressed: CompressedNames | None = None
    """Tensors of compressed attention; None: layers have queries, keys and values"""
    hyper: HyperNames | None = None
    """Tensors of hyper-connections; None: there are none"""
    adapter_names: Mapping[str, str] = field(default_factory=dict)
    """Parts of names, and their replacements in transformers 5, whose names adapters use; the first
    part that a name contains counts"""
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    """Patterns of tensors that some files hold and the model does not need"""

    def with_norms(self, attention: str, feed_forward: str) -> "TensorNames":
        """Return these names with other norms before the two parts of a layer."""
        return replace(self, attention_norm=attention, feed_forward_norm=feed_forward)

    @property
    def in_delta_layers(self) -> "TensorNames":
        """The names in the layers of `delta_net`."""
        if self.delta_net is None or self.delta_net.norms is None:
            return self
        mixer_norm, feed_forward_norm = self.delta_net.norms
        return replace(
            self,
            attention_norm=mixer_norm,
            attention_post_norm=None,
            feed_forward_norm=feed_forward_norm,
            feed_forward_post_norm=None,
        )


@dataclass(frozen=True, slots=True)
class HeadStage:
    """A part of the head that classifies pooled texts: a linear layer, or a LayerNorm."""

    name: str
    activation: str = "identity"
    """Function after the product: "identity", "tanh", "gelu", "relu" or "sigmoid" """
    is_norm: bool = False
    narrows: bool = False
    """True if the outputs are the labels"""
    is_difference: bool = False
    """True if the only output is the difference of the two stored ones"""


@dataclass(frozen=True, slots=True)
class EncoderTraits:
    """Properties of encoders, whose tokens see all tokens of their text."""

    embedding_norm: str
    token_types: str | None = None
    """Embedding of the text of a pair that a token belongs to"""
    positions_after_padding: bool = False
    """True if positions count from pad_token_id + 1"""
    norms_first: bool = False
    """True if layers read norms of the residual rather than norm it after each addition"""
    attention_bias: str | None = None
    """Embedding of the distance of two tokens, a number for each head: their score's addend"""
    is_disentangled: bool = False
    """True if scores add up products of tokens with the embedding of their distance"""
    has_tasks: bool = False
    """True if files may hold the adapters of the tasks in lora_adaptations"""
    up_comes_first: bool = False
    """True if the single tensor of both products holds that without the activation first"""
    head: tuple[HeadStage, ...] = ()
    """Stages of ForSequenceClassification's head, whose names begin at the file's root"""
    language_head: tuple[HeadStage, ...] = ()
    """Stages of ForMaskedLM's head, named alike; the last one makes the vocabulary's logits, by the
    embedding's weights if it has none"""


class MultimodalAxes(Enum):
    """Division of a head's pairs among time, row and column in multimodal RoPE.

    A value is transformers' default of mrope_section, the pairs of each axis.
    """

    NONE = ()
    IN_SECTIONS = (16, 24, 24)
    """All pairs of time, then all of the row, then all of the column"""
    IN_SECTIONS_OF_A_HALF = (8, 12, 12)
    """The order of IN_SECTIONS, with the default of GLM-4V, where half a head rotates"""
    INTERLEAVED = (24, 20, 20)
    """Pairs of time, row and column in turn, until row and column have theirs; then of time"""
    INTERLEAVED_IN_A_QUARTER = (11, 11, 10)
    """The order of INTERLEAVED, with the default of Qwen 3.5, where a quarter of a head rotates"""


class ImageSight(Enum):
    """Layers in which the tokens of an image see each other, not only the tokens before them."""

    NONE = "no layer"
    WINDOWS = "layers with a window"
    ALL = "every layer"


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. Every default is Llama's."""

    architecture: str
    names: TensorNames = field(default_factory=TensorNames)
    other_names: TensorNames | None = None
    """Names in files of other programs; None: all have the same"""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of Llama's config.json that have another name in this family's"""
    section: str | None = None
    """Object of config.json that describes the decoder of a multimodal model"""
    parts: tuple[str, ...] = ()
    """Objects of config.json that describe the parts of a layer, as MosaicML's models have them"""
    defaults: JsonObject = field(default_factory=dict)
    """Defaults of transformers for absent keys, under the file's own names"""
    qkv_bias: bool = False
    """True if q, k and v always have a bias, regardless of attention_bias"""
    reads_attention_bias: bool = False
    """True if attention_bias gives q, k, v and o a bias"""
    output_bias_key: str | None = "attention_bias"
    """Key that gives o a bias if reads_attention_bias; None: o has none"""
    reads_mlp_bias: bool = False
    """True if mlp_bias gives gate, up and down a bias"""
    experts_have_bias: bool = False
    """True if mlp_bias gives router and experts a bias too"""
    has_alibi: bool = False
    """True if scores fall with two tokens' distance (ALiBi), by alibi_bias_max, instead of RoPE"""
    reads_clip: bool = False
    """True if clip_qkv bounds queries, keys and values"""
    has_output_gate: bool = False
    """True if q_proj has a gate of attention's output behind each head's queries"""
    reads_gating: bool = False
    """True if gating says whether each head or each output has an output gate, a softplus"""
    reads_layer_heads: bool = False
    """True if num_attention_heads_per_layer may list the heads of each layer"""
    head_bias_key: str | None = None
    """Key that gives the output projection a bias; None: it has none"""
    qkv_by_head: bool = False
    """True if the tensor of q, k and v holds the first key head's, then the next one's, …"""
    reads_multi_query: bool = False
    """True if multi_query lets all heads share one key head, unless new_decoder_architecture is
    true. Where multi_query is false, each head has its own"""
    qk_norm: QkNorm = QkNorm.NONE
    qk_norm_key: str | None = None
    """Key without which queries and keys have no norm; None: they always have one"""
    layer_norm: bool = False
    """True if norms are LayerNorms rather than RMSNorms"""
    norm_bias: bool = True
    """True if LayerNorms have a bias"""
    reads_norm_kind: bool = False
    """True if a set rms_norm_eps means that norms are RMSNorms"""
    reads_parallel_residual: bool = False
    """True if use_parallel_residual makes the feed-forward layer read what attention reads"""
    shares_norm: bool = False
    """True if both parts of a layer with a parallel residual read the same norm"""
    parallel_norms: tuple[str, str] | None = None
    """Norms of the two parts if new_decoder_architecture is true and num_ln_in_parallel_attn is 2;
    None: the names of norms do not depend on config.json"""
    norm_offset: bool = False
    """True if norm weights are stored minus one"""
    transposed: bool = False
    """True if weights are stored as [inputs, outputs]"""
    interleaved_rotary: bool = False
    """True if the two rows of a RoPE pair are stored side by side rather than half a head apart"""
    gated: bool = True
    """True if the feed-forward layer has a second product, gated by the activation of the first"""
    inner_factor: int | None = None
    """Default intermediate_size, in multiples of hidden_size"""
    windows: WindowRule = WindowRule.NONE
    is_gemma4: bool = False
    """True if layers differ from one another as Gemma 4's do"""
    has_modal_tokens: bool = False
    """True if marks of images and sounds have embeddings apart from the text's, as Gemma 3n's do"""
    has_mimo_keys: bool = False
    """True if config.json has MiMo's keys of layers with a window, and of attention's values"""
    local_rotary: bool = False
    """True if sliding-window layers have RoPE frequencies of their own"""
    rotates_windows_only: bool = False
    """True if a set sliding_window means that layers without a window have no RoPE"""
    rotates_dense_layers: bool = False
    """True if prefix_dense_sliding_window_pattern = 1 gives dense layers without a window RoPE"""
    scaled_embedding: bool = False
    """True if embeddings are multiplied by the square root of hidden_size"""
    embedding_key: str | None = None
    """Key without which embeddings are not scaled; None: they always are"""
    reads_multipliers: bool = False
    """True if config.json has embedding_, residual_ and attention_multiplier and logits_scaling"""
    reads_depth: bool = False
    """True if scale_depth and num_hidden_layers scale what is added to the residual, and
    dim_model_base and hidden_size the logits"""
    reads_logit_scale: bool = False
    """True if logit_scale is a factor on the logits"""
    is_recurrent: bool = False
    """True if every layer is a recurrent mixer alone"""
    has_normed_residual: bool = False
    """True if the two parts of a layer add to what they read, times factors, rather than to the
    residual"""
    has_single_parts: bool = False
    """True if layers are a mixer or a feed-forward layer alone, as layers_block_type lists"""
    has_parallel_mixers: bool = False
    """True if every layer has attention and Mamba-2 side by side"""
    reads_position_type: bool = False
    """True if layers have RoPE only where position_embedding_type is rope"""
    rotates_with_base: bool = False
    """True if rope_parameters without rope_theta means that layers have no RoPE"""
    reads_no_rope_layers: bool = False
    """True if no_rope_layers has a 0 for each layer without RoPE"""
    reads_temperature: bool = False
    """True if attn_temperature_tuning lets the queries of layers without RoPE grow with the
    position, by attn_scale and floor_scale"""
    reads_soft_caps: bool = False
    """True if attn_logit_softcapping soft-caps attention scores, and final_logit_softcapping the
    logits"""
    multimodal_axes: MultimodalAxes = MultimodalAxes.NONE
    image_sight: ImageSight = ImageSight.NONE
    image_layers: int = 0
    """Number of layers whose inputs images change: 1 for the embeddings alone; 0: the model reads
    no images"""
    refused: tuple[str, ...] = ()
    """Keys that must be absent, null or false"""
    required: tuple[str, ...] = ()
    """Keys that must be absent, null or true"""
    position_offset: int = 0
    """Number of the first learned position"""
    rotates_latents: bool = True
    """True if a part of the keys of latent attention rotates"""
    scores_by_sigmoid: bool = False
    """True if experts are weighed by sigmoids rather than a softmax"""
    ranks_groups_by_two: bool = False
    """True if the two best experts of a group rank it, as they do with scores_by_sigmoid"""
    scales_experts_inputs: bool = False
    """True if experts read rows times their weights"""
    mixes_sparsely: bool = False
    """True if SparseMixer chooses experts, with router_jitter_noise"""
    scorings: tuple[str, ...] = ()
    """Values of scoring_func, which says how experts are weighed; empty: it is not read"""
    reads_combination: bool = False
    """True if shared_expert_combination_strategy says whether the shared expert and the sum of the
    others are added or averaged"""
    normalizes_softmax: bool = False
    """True if a softmax is over the scores of a token's own experts"""
    routes_by_token: bool = False
    """True if all layers have experts, and tokens' ids choose them in the layers that
    mlp_layer_types calls hash_moe"""
    gelu_is_tanh: bool = False
    """True if files call GELU's approximation by tanh "gelu" """
    clamped_silu: bool = False
    """True if the activation is SiLU, with factors bounded by swiglu_limit"""
    clamped_swiglu: bool = False
    """True if the activation is gpt-oss's, with swiglu_alpha and swiglu_limit"""
    encoder: EncoderTraits | None = None
    """Properties of an encoder; None: the layers are a decoder's"""
    bidirectional_key: str | None = None
    """Key in config.json that makes a checkpoint bidirectional, with halved windows"""
    has_task_adapters: bool = False
    """True if adapters of the tasks in task_names lie in directories of the checkpoint"""
    is_bidirectional: bool = False
    """True if tokens of a decoder see all tokens of their text"""
    halves_windows: bool = False
    """True if a bidirectional decoder's window is divided between both sides of a token"""
    has_logits: bool = True
    """True if the checkpoint can generate: it holds an output projection"""
    head: tuple[HeadStage, ...] = ()
    """Stages that turn a pooled text into scores; empty: the checkpoint has none"""

    @property
    def keeps_codes(self) -> bool:
        """False if something is folded into all weights, whose codes are then decoded."""
        return not (self.layer_norm or self.transposed)

    @property
    def sees_whole_texts(self) -> bool:
        """True if every token sees all tokens of its text."""
        return self.encoder is not None or self.is_bidirectional
