"""Supported architectures and their differences from the Llama decoder."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from services.engine.model.checkpoint.config import JsonObject

__all__ = [
    "FAMILIES",
    "DeltaNetNames",
    "EncoderTraits",
    "ExpertTensorNames",
    "Family",
    "HeadStage",
    "QkNorm",
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


class QkNorm(Enum):
    """RMSNorm of queries and keys before the rotation."""

    NONE = "none"
    HEAD = "over each head"
    ALL_HEADS = "over all heads of a token together"


@dataclass(frozen=True, slots=True)
class ExpertTensorNames:
    """Tensor names of a mixture of experts; "{}" stands for the number of an expert."""

    router: str
    gate: tuple[str, ...]
    down: str
    """Without "{}", each tensor stacks all experts"""
    alternates: bool = False
    """Stacks are [experts, inputs, outputs] with biases, and outputs of gate and up alternate; else
    they are [experts, outputs, inputs], all outputs of gate before those of up"""
    shared_gate: tuple[str, ...] = ()
    """The expert that every token has; empty: there is none"""
    shared_down: str = ""
    shared_router: str = ""
    """Its factor is the sigmoid of this product"""
    module: str = "mlp"
    """Module of router and experts in transformers 5, whose names adapters have"""

    @property
    def are_stacked(self) -> bool:
        return "{}" not in self.down

    @property
    def router_module(self) -> str:
        """The router's name in transformers 5."""
        return f"{self.module}.{self.router.rpartition('.')[2]}"


@dataclass(frozen=True, slots=True)
class DeltaNetNames:
    """Tensor names of a gated delta net; those of linear layers without .weight."""

    inputs: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    """Queries, keys and values, then the output gate; or one tensor, key head by key head"""
    rates: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    """Beta, then the decay; or one tensor, key head by key head"""
    convolution: str = "linear_attn.conv1d.weight"
    a_log: str = "linear_attn.A_log"
    dt_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm.weight"
    output: str = "linear_attn.out_proj"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Tensor names without .weight and .bias; None: the family has no such tensor.

    Names of a layer's tensors are relative to the layer.
    """

    roots: Mapping[str, str] = field(default_factory=lambda: {"model.": _HEAD, "": _HEAD})
    """Alternative prefixes of names, and with each the whole name of the output projection"""
    embedding: str = "embed_tokens"
    positions: str | None = None
    """Learned position embedding, instead of RoPE"""
    layers: str = "layers"
    final_norm: str = "norm"
    attention_norm: str | None = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three tensors, or one that stacks their outputs"""
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str | None = None
    """Attention sinks: one extra logit in each head's softmax, without a value"""
    output: str = "self_attn.o_proj"
    attention_post_norm: str | None = None
    """Norm of attention's output before it joins the residual"""
    feed_forward_norm: str | None = "post_attention_layernorm"
    gate: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Two tensors, or one that stacks their outputs"""
    down: str = "mlp.down_proj"
    feed_forward_post_norm: str | None = None
    experts: ExpertTensorNames | None = None
    stacked_experts: ExpertTensorNames | None = None
    """Names in files that stack all experts instead; None: there are no such files"""
    delta_net: DeltaNetNames | None = None
    """Tensors of the layers that layer_types calls linear_attention"""
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    """Patterns of tensors that some files hold and the model does not need"""


@dataclass(frozen=True, slots=True)
class HeadStage:
    """A part of the head that classifies pooled texts: a linear layer, or a LayerNorm."""

    name: str
    activation: str = "identity"
    """Function after the product: "identity", "tanh", "gelu" or "relu" """
    is_norm: bool = False
    narrows: bool = False
    """Its outputs are the labels"""


@dataclass(frozen=True, slots=True)
class EncoderTraits:
    """Properties of encoders alone: every token sees all tokens of its text."""

    embedding_norm: str
    token_types: str | None = None
    """Embedding of the text of a pair that a token belongs to"""
    positions_after_padding: bool = False
    """Positions count from pad_token_id + 1"""
    norms_first: bool = False
    """Layers read norms of the residual rather than norm it after each addition"""
    attention_bias: str | None = None
    """Embedding of the distance of two tokens, a number for each head: their score's addend"""
    head: tuple[HeadStage, ...] = ()
    """Stages of ForSequenceClassification's head, whose names begin at the file's root"""


class MultimodalAxes(Enum):
    """Division of a head's pairs among time, row and column in multimodal RoPE.

    A value is transformers' default of mrope_section, the pairs of each axis.
    """

    NONE = ()
    IN_SECTIONS = (16, 24, 24)
    """All pairs of time, then all of the row, then all of the column"""
    INTERLEAVED = (24, 20, 20)
    """In turn, until row and column have theirs; the rest are of time"""
    INTERLEAVED_IN_A_QUARTER = (11, 11, 10)
    """As INTERLEAVED, where a quarter of a head rotates"""


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. Every default is Llama's."""

    architecture: str
    names: TensorNames = field(default_factory=TensorNames)
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of Llama's config.json that have another name in this family's"""
    section: str | None = None
    """Object of config.json that describes the decoder of a multimodal model"""
    defaults: JsonObject = field(default_factory=dict)
    """Defaults of transformers for absent keys, under the file's own names"""
    qkv_bias: bool = False
    """q, k and v always have a bias, regardless of attention_bias"""
    reads_attention_bias: bool = False
    """attention_bias gives q, k, v and o a bias"""
    reads_mlp_bias: bool = False
    """mlp_bias gives gate, up and down a bias"""
    has_output_gate: bool = False
    """q_proj has a gate of attention's output behind each head's queries"""
    qk_norm: QkNorm = QkNorm.NONE
    layer_norm: bool = False
    """Norms are LayerNorms with a bias rather than RMSNorms"""
    norm_offset: bool = False
    """Norm weights are stored minus one"""
    transposed: bool = False
    """Weights are stored as [inputs, outputs]"""
    interleaved_rotary: bool = False
    """The two rows of a RoPE pair are stored side by side rather than half a head apart"""
    gated: bool = True
    """The feed-forward layer has a second product, gated by the activation of the first"""
    inner_factor: int | None = None
    """Default intermediate_size, in multiples of hidden_size"""
    windows: WindowRule = WindowRule.NONE
    local_rotary: bool = False
    """Sliding-window layers have RoPE frequencies of their own"""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the square root of hidden_size"""
    reads_multipliers: bool = False
    """config.json has embedding_, residual_ and attention_multiplier and logits_scaling"""
    reads_no_rope_layers: bool = False
    """no_rope_layers has a 0 for each layer without RoPE"""
    reads_soft_caps: bool = False
    """attn_logit_softcapping and final_logit_softcapping soft-cap attention scores and logits"""
    multimodal_axes: MultimodalAxes = MultimodalAxes.NONE
    images_see_ahead: bool = False
    """The tokens of an image see each other, not only the tokens before them"""
    clamped_swiglu: bool = False
    """The activation is gpt-oss's, with swiglu_alpha and swiglu_limit"""
    encoder: EncoderTraits | None = None
    """None: it is a decoder"""
    has_logits: bool = True
    """The checkpoint can generate: it holds an output projection"""
    head: tuple[HeadStage, ...] = ()
    """Stages that turn a pooled text into scores; empty: the checkpoint has none"""


_GEMMA = TensorNames(
    attention_post_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    feed_forward_post_norm="post_feedforward_layernorm",
)
_QWEN_EXPERTS = ExpertTensorNames(
    router="mlp.gate",
    gate=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    down="mlp.experts.{}.down_proj",
    shared_gate=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_router="mlp.shared_expert_gate",
)
_QWEN_HYBRID: JsonObject = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "partial_rotary_factor": 0.25,
}
_QWEN: JsonObject = {"use_sliding_window": False, "max_window_layers": 28}

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", reads_attention_bias=True, reads_mlp_bias=True),
        Family("MistralForCausalLM", windows=WindowRule.ALL),
        Family("Qwen2ForCausalLM", defaults=_QWEN, qkv_bias=True, windows=WindowRule.LISTED),
        Family(
            "Qwen3ForCausalLM",
            defaults=_QWEN,
            reads_attention_bias=True,
            qk_norm=QkNorm.HEAD,
            windows=WindowRule.LISTED,
        ),
        Family(
            "Gemma2ForCausalLM",
            names=_GEMMA,
            keys={"hidden_act": "hidden_activation"},
            defaults={
                "hidden_activation": "gelu_pytorch_tanh",
                "head_dim": 256,
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "sliding_window_pattern": 2,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "tie_word_embeddings": True,
            },
            reads_attention_bias=True,
            norm_offset=True,
            windows=WindowRule.PATTERN,
            scaled_embedding=True,
            reads_soft_caps=True,
        ),
        Family(
            "Gemma3ForCausalLM",
            names=_GEMMA,
            keys={"hidden_act": "hidden_activation"},
            defaults={
                "hidden_activation": "gelu_pytorch_tanh",
                "head_dim": 256,
                "max_position_embeddings": 131072,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "sliding_window_pattern": 6,
                "rope_theta": 1e6,
                "tie_word_embeddings": True,
                "vocab_size": 262208,
            },
            reads_attention_bias=True,
            qk_norm=QkNorm.HEAD,
            norm_offset=True,
            windows=WindowRule.PATTERN,
            local_rotary=True,
            scaled_embedding=True,
            reads_soft_caps=True,
        ),
        Family(
            "Phi3ForCausalLM",
            names=TensorNames(qkv=("self_attn.qkv_proj",), gate=("mlp.gate_up_proj",)),
            defaults={"rms_norm_eps": 1e-5},
            windows=WindowRule.ALL,
        ),
        Family(
            "Olmo2ForCausalLM",
            names=TensorNames(
                attention_norm=None,
                attention_post_norm="post_attention_layernorm",
                feed_forward_norm=None,
                feed_forward_post_norm="post_feedforward_layernorm",
            ),
            defaults={"rms_norm_eps": 1e-5},
            reads_attention_bias=True,
            qk_norm=QkNorm.ALL_HEADS,
        ),
        Family(
            "GraniteForCausalLM",
            reads_attention_bias=True,
            reads_mlp_bias=True,
            reads_multipliers=True,
        ),
        Family(
            "SmolLM3ForCausalLM",
            defaults={
                "no_rope_layer_interval": 4,
                "rope_theta": 2e6,
                "tie_word_embeddings": True,
                "use_sliding_window": False,
            },
            reads_attention_bias=True,
            reads_mlp_bias=True,
            windows=WindowRule.LISTED,
            reads_no_rope_layers=True,
        ),
        Family(
            "Starcoder2ForCausalLM",
            names=TensorNames(gate=("mlp.c_fc",), down="mlp.c_proj"),
            keys={
                "attention_bias": "use_bias",
                "mlp_bias": "use_bias",
                "rms_norm_eps": "norm_epsilon",
            },
            defaults={
                "hidden_act": "gelu_pytorch_tanh",
                "norm_epsilon": 1e-5,
                "tie_word_embeddings": True,
                "use_bias": True,
            },
            reads_attention_bias=True,
            reads_mlp_bias=True,
            layer_norm=True,
            gated=False,
            windows=WindowRule.ALL,
        ),
        Family(
            "GPT2LMHeadModel",
            names=TensorNames(
                roots={"transformer.": _HEAD, "": _HEAD},
                embedding="wte",
                positions="wpe",
                layers="h",
                final_norm="ln_f",
                attention_norm="ln_1",
                qkv=("attn.c_attn",),
                output="attn.c_proj",
                feed_forward_norm="ln_2",
                gate=("mlp.c_fc",),
                down="mlp.c_proj",
                ignored=("*.attn.bias", "*.attn.masked_bias"),
            ),
            keys={
                "hidden_act": "activation_function",
                "hidden_size": "n_embd",
                "intermediate_size": "n_inner",
                "max_position_embeddings": "n_positions",
                "num_attention_heads": "n_head",
                "num_hidden_layers": "n_layer",
                "rms_norm_eps": "layer_norm_epsilon",
            },
            defaults={
                "activation_function": "gelu_new",
                "attention_bias": True,
                "layer_norm_epsilon": 1e-5,
                "mlp_bias": True,
                "tie_word_embeddings": True,
            },
            reads_attention_bias=True,
            reads_mlp_bias=True,
            layer_norm=True,
            transposed=True,
            gated=False,
            inner_factor=4,
        ),
        Family(
            "MixtralForCausalLM",
            names=TensorNames(
                experts=ExpertTensorNames(
                    router="block_sparse_moe.gate",
                    gate=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
                    down="block_sparse_moe.experts.{}.w2",
                )
            ),
            defaults={"norm_topk_prob": True, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
            windows=WindowRule.ALL,
        ),
        Family(
            "Qwen3MoeForCausalLM",
            names=TensorNames(
                experts=ExpertTensorNames(
                    router="mlp.gate",
                    gate=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
                    down="mlp.experts.{}.down_proj",
                )
            ),
            defaults={"use_sliding_window": False},
            reads_attention_bias=True,
            qk_norm=QkNorm.HEAD,
            windows=WindowRule.ALL,
        ),
        Family(
            "Qwen3NextForCausalLM",
            names=TensorNames(
                experts=_QWEN_EXPERTS,
                delta_net=DeltaNetNames(
                    inputs=("linear_attn.in_proj_qkvz",), rates=("linear_attn.in_proj_ba",)
                ),
                ignored=("mtp.*",),
            ),
            defaults={
                **_QWEN_HYBRID,
                "norm_topk_prob": True,
            },
            reads_attention_bias=True,
            has_output_gate=True,
            qk_norm=QkNorm.HEAD,
            norm_offset=True,
        ),
        Family(
            "Qwen3_5ForCausalLM",
            names=TensorNames(delta_net=DeltaNetNames(), ignored=("mtp.*", "model.visual.*")),
            defaults=_QWEN_HYBRID,
            reads_attention_bias=True,
            has_output_gate=True,
            qk_norm=QkNorm.HEAD,
            norm_offset=True,
        ),
        Family(
            "Qwen3_5MoeForCausalLM",
            names=TensorNames(
                experts=_QWEN_EXPERTS,
                stacked_experts=replace(
                    _QWEN_EXPERTS,
                    gate=("mlp.experts.gate_up_proj",),
                    down="mlp.experts.down_proj",
                ),
                delta_net=DeltaNetNames(),
                ignored=("mtp.*", "model.visual.*"),
            ),
            defaults={**_QWEN_HYBRID, "norm_topk_prob": True},
            reads_attention_bias=True,
            has_output_gate=True,
            qk_norm=QkNorm.HEAD,
            norm_offset=True,
        ),
        Family(
            "GptOssForCausalLM",
            names=TensorNames(
                sinks="self_attn.sinks",
                experts=ExpertTensorNames(
                    router="mlp.router",
                    gate=("mlp.experts.gate_up_proj",),
                    down="mlp.experts.down_proj",
                    alternates=True,
                ),
            ),
            defaults={
                "attention_bias": True,
                "head_dim": 64,
                "mlp_bias": True,
                "norm_topk_prob": True,
                "rms_norm_eps": 1e-5,
                "rope_theta": 150000.0,
                "sliding_window": 128,
                "sliding_window_pattern": 2,
                "swiglu_alpha": 1.702,
                "swiglu_limit": 7.0,
            },
            reads_attention_bias=True,
            reads_mlp_bias=True,
            windows=WindowRule.PATTERN,
            clamped_swiglu=True,
        ),
    )
}
"""Families by architecture name, as in config.json."""
