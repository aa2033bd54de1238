"""Supported architectures and their differences from the Llama decoder."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from services.engine.model.checkpoint.config import JsonObject

__all__ = [
    "FAMILIES",
    "DeltaNetNames",
    "EncoderTraits",
    "ExpertStack",
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
    EVEN = "if use_sliding_window: as layer_types lists, or even layers below max_window_layers"


class QkNorm(Enum):
    """Norm of queries and keys."""

    NONE = "none"
    HEAD = "RMSNorm over each head, before the rotation"
    HEAD_ROTATED = "RMSNorm over each head, after the rotation"
    HEAD_LAYER_NORM = "LayerNorm over each head with weights of its own, before the rotation"
    ALL_HEADS = "RMSNorm over all heads of a token together, before the rotation"


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Layout of a tensor that stacks the weights of all experts."""

    transposed: bool = False
    """It is [experts, inputs, outputs] rather than [experts, outputs, inputs]"""
    alternates: bool = False
    """Outputs of gate and up alternate; else all of the gate's come first"""
    in_any_order: bool = False
    """Files of some programs hold the last two dimensions in the other order"""
    suffix: str = ""
    """End of the tensor's name"""


@dataclass(frozen=True, slots=True)
class ExpertTensorNames:
    """Tensor names of a mixture of experts; "{}" stands for the number of an expert."""

    router: str
    gate: tuple[str, ...]
    down: str
    """Without "{}", each tensor stacks all experts"""
    stack: ExpertStack = ExpertStack()
    """Layout of the tensors that stack all experts"""
    shared_gate: tuple[str, ...] = ()
    """The expert that every token has; empty: there is none"""
    shared_down: str = ""
    shared_router: str = ""
    """Its factor is the sigmoid of this product; empty: it has none"""
    module: str = "mlp"
    """Module of router and experts in transformers 5, whose names adapters have"""
    choice_bias: str = ""
    """Bias of the weights for the choice alone; empty: there is none"""
    router_name: str = ""
    """The router's name in that module; empty: the last part of `router`"""

    @property
    def are_stacked(self) -> bool:
        return "{}" not in self.down

    @property
    def router_module(self) -> str:
        """The router's name in transformers 5."""
        return f"{self.module}.{self.router_name or self.router.rpartition('.')[2]}"


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
    """With "{}" for the number of a head, there is a tensor for each head"""
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
    activation: str | None = None
    """Module of xIELU's constants"""
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
    output_bias_key: str | None = "attention_bias"
    """Key that gives o a bias if reads_attention_bias; None: o has none"""
    reads_mlp_bias: bool = False
    """mlp_bias gives gate, up and down a bias"""
    experts_have_bias: bool = False
    """mlp_bias gives router and experts a bias too"""
    has_output_gate: bool = False
    """q_proj has a gate of attention's output behind each head's queries"""
    head_bias_key: str | None = None
    """Key that gives the output projection a bias; None: it has none"""
    qkv_by_head: bool = False
    """The tensor of q, k and v holds those of the first head, then those of the next one, …"""
    qk_norm: QkNorm = QkNorm.NONE
    qk_norm_key: str | None = None
    """Key without which there is no such norm; None: there always is"""
    layer_norm: bool = False
    """Norms are LayerNorms rather than RMSNorms"""
    norm_bias: bool = True
    """LayerNorms have a bias"""
    reads_parallel_residual: bool = False
    """use_parallel_residual makes the feed-forward layer read what attention reads"""
    shares_norm: bool = False
    """With a parallel residual, both parts of a layer read the same norm"""
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
    rotates_windows_only: bool = False
    """If sliding_window is set, layers without a window have no RoPE"""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the square root of hidden_size"""
    reads_multipliers: bool = False
    """config.json has embedding_, residual_ and attention_multiplier and logits_scaling"""
    reads_logit_scale: bool = False
    """logit_scale is a factor on the logits"""
    reads_no_rope_layers: bool = False
    """no_rope_layers has a 0 for each layer without RoPE"""
    reads_soft_caps: bool = False
    """attn_logit_softcapping and final_logit_softcapping soft-cap attention scores and logits"""
    multimodal_axes: MultimodalAxes = MultimodalAxes.NONE
    images_see_ahead: bool = False
    """The tokens of an image see each other, not only the tokens before them"""
    refused: tuple[str, ...] = ()
    """Keys that must be absent, null or false"""
    mixes_sparsely: bool = False
    """SparseMixer chooses experts, with router_jitter_noise"""
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
_OLMO2 = TensorNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    feed_forward_norm=None,
    feed_forward_post_norm="post_feedforward_layernorm",
)
_GLM = Family(
    "GlmForCausalLM",
    names=TensorNames(gate=("mlp.gate_up_proj",)),
    defaults={
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
    },
    reads_attention_bias=True,
    output_bias_key=None,
    interleaved_rotary=True,
)
_COHERE = Family(
    "CohereForCausalLM",
    keys={"rms_norm_eps": "layer_norm_eps"},
    defaults={
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_parallel_residual": True,
    },
    reads_attention_bias=True,
    qk_norm=QkNorm.HEAD_LAYER_NORM,
    qk_norm_key="use_qk_norm",
    layer_norm=True,
    norm_bias=False,
    reads_parallel_residual=True,
    shares_norm=True,
    interleaved_rotary=True,
    reads_logit_scale=True,
)
_HUNYUAN = TensorNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
_EXPERTS = ExpertTensorNames(
    router="mlp.gate",
    gate=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    down="mlp.experts.{}.down_proj",
)
_USE_BIAS = {"attention_bias": "use_bias", "mlp_bias": "use_bias"}
_MIXTRAL_EXPERTS = ExpertTensorNames(
    router="block_sparse_moe.gate",
    gate=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
)
_PHIMOE = Family(
    "PhimoeForCausalLM",
    names=TensorNames(experts=replace(_MIXTRAL_EXPERTS, router_name="router")),
    defaults={
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "router_jitter_noise": 0.01,
    },
    reads_attention_bias=True,
    head_bias_key="lm_head_bias",
    layer_norm=True,
    windows=WindowRule.ALL,
    mixes_sparsely=True,
)
_QWEN_EXPERTS = replace(
    _EXPERTS,
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
            names=_OLMO2,
            defaults={"rms_norm_eps": 1e-5},
            reads_attention_bias=True,
            qk_norm=QkNorm.ALL_HEADS,
        ),
        Family(
            "Olmo3ForCausalLM",
            names=_OLMO2,
            keys={"rope_local_base_freq": "rope_theta"},
            defaults={
                "rms_norm_eps": 1e-5,
                "rope_theta": 500000.0,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
            },
            reads_attention_bias=True,
            qk_norm=QkNorm.ALL_HEADS,
            windows=WindowRule.PATTERN,
            local_rotary=True,
        ),
        _GLM,
        replace(
            _GLM,
            architecture="Glm4ForCausalLM",
            names=replace(
                _GLM.names,
                attention_post_norm="post_self_attn_layernorm",
                feed_forward_post_norm="post_mlp_layernorm",
            ),
        ),
        _COHERE,
        replace(
            _COHERE,
            architecture="Cohere2ForCausalLM",
            defaults={
                **_COHERE.defaults,
                "rope_theta": 10000.0,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
            },
            qk_norm=QkNorm.NONE,
            windows=WindowRule.PATTERN,
            rotates_windows_only=True,
        ),
        Family(
            "Exaone4ForCausalLM",
            names=_OLMO2,
            defaults={
                "num_key_value_heads": 32,
                "rms_norm_eps": 1e-5,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
            },
            qk_norm=QkNorm.HEAD,
            windows=WindowRule.PATTERN,
            rotates_windows_only=True,
        ),
        Family(
            "GPTNeoXForCausalLM",
            names=TensorNames(
                roots={"gpt_neox.": "embed_out"},
                embedding="embed_in",
                final_norm="final_layer_norm",
                qkv=("attention.query_key_value",),
                output="attention.dense",
                gate=("mlp.dense_h_to_4h",),
                down="mlp.dense_4h_to_h",
                ignored=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
            ),
            keys={
                "partial_rotary_factor": "rotary_pct",
                "rms_norm_eps": "layer_norm_eps",
                "rope_theta": "rotary_emb_base",
            },
            defaults={
                "attention_bias": True,
                "hidden_act": "gelu",
                "layer_norm_eps": 1e-5,
                "mlp_bias": True,
                "rotary_pct": 0.25,
                "use_parallel_residual": True,
            },
            reads_attention_bias=True,
            reads_mlp_bias=True,
            qkv_by_head=True,
            layer_norm=True,
            reads_parallel_residual=True,
            gated=False,
        ),
        Family(
            "PhiForCausalLM",
            names=TensorNames(
                final_norm="final_layernorm",
                output="self_attn.dense",
                gate=("mlp.fc1",),
                down="mlp.fc2",
            ),
            keys={"rms_norm_eps": "layer_norm_eps"},
            defaults={
                "attention_bias": True,
                "hidden_act": "gelu_new",
                "layer_norm_eps": 1e-5,
                "lm_head_bias": True,
                "mlp_bias": True,
                "partial_rotary_factor": 0.5,
                "use_parallel_residual": True,
            },
            reads_attention_bias=True,
            reads_mlp_bias=True,
            head_bias_key="lm_head_bias",
            layer_norm=True,
            reads_parallel_residual=True,
            shares_norm=True,
            gated=False,
            refused=("qk_layernorm",),
        ),
        Family(
            "StableLmForCausalLM",
            names=TensorNames(
                query_norm="self_attn.q_layernorm.norms.{}",
                key_norm="self_attn.k_layernorm.norms.{}",
            ),
            keys={"attention_bias": "use_qkv_bias", "rms_norm_eps": "layer_norm_eps"},
            defaults={
                "layer_norm_eps": 1e-5,
                "num_key_value_heads": 32,
                "partial_rotary_factor": 0.25,
            },
            reads_attention_bias=True,
            output_bias_key=None,
            qk_norm=QkNorm.HEAD_LAYER_NORM,
            qk_norm_key="qk_layernorm",
            layer_norm=True,
            reads_parallel_residual=True,
            shares_norm=True,
        ),
        Family(
            "NemotronForCausalLM",
            names=TensorNames(gate=("mlp.up_proj",)),
            keys={"rms_norm_eps": "norm_eps"},
            defaults={"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
            reads_attention_bias=True,
            reads_mlp_bias=True,
            layer_norm=True,
            norm_offset=True,
            gated=False,
        ),
        Family(
            "ArceeForCausalLM",
            names=TensorNames(gate=("mlp.up_proj",)),
            defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
            reads_attention_bias=True,
            reads_mlp_bias=True,
            gated=False,
        ),
        Family(
            "ApertusForCausalLM",
            names=TensorNames(
                attention_norm="attention_layernorm",
                feed_forward_norm="feedforward_layernorm",
                gate=("mlp.up_proj",),
                activation="mlp.act_fn",
            ),
            defaults={
                "hidden_act": "xielu",
                "rms_norm_eps": 1e-5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "rope_theta": 12e6,
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
                "rope_theta": 12e6,
            },
            reads_attention_bias=True,
            qk_norm=QkNorm.HEAD,
            gated=False,
        ),
        Family(
            "Ernie4_5ForCausalLM",
            keys=_USE_BIAS,
            defaults={
                "head_dim": 128,
                "num_key_value_heads": 2,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500000.0,
                "tie_word_embeddings": True,
            },
            reads_attention_bias=True,
            reads_mlp_bias=True,
            interleaved_rotary=True,
        ),
        Family(
            "InternLM3ForCausalLM",
            keys={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
            defaults={"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
            reads_attention_bias=True,
            output_bias_key="mlp_bias",
            reads_mlp_bias=True,
        ),
        Family(
            "Ministral3ForCausalLM",
            defaults={
                "head_dim": 128,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 16.0,
                    "original_max_position_embeddings": 16384,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1,
                },
            },
            windows=WindowRule.ALL,
        ),
        Family(
            "HunYuanDenseV1ForCausalLM",
            names=_HUNYUAN,
            defaults={"rms_norm_eps": 1e-5},
            reads_attention_bias=True,
            qk_norm=QkNorm.HEAD_ROTATED,
        ),
        Family(
            "SeedOssForCausalLM",
            defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
            reads_attention_bias=True,
            output_bias_key="attention_out_bias",
            reads_mlp_bias=True,
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
            names=TensorNames(experts=_MIXTRAL_EXPERTS),
            defaults={"norm_topk_prob": True, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
            windows=WindowRule.ALL,
        ),
        _PHIMOE,
        replace(_PHIMOE, architecture="PhiMoEForCausalLM"),
        Family(
            "GraniteMoeForCausalLM",
            names=TensorNames(
                experts=ExpertTensorNames(
                    router="block_sparse_moe.router.layer",
                    gate=("block_sparse_moe.input_linear",),
                    down="block_sparse_moe.output_linear",
                    stack=ExpertStack(suffix=".weight"),
                    module="block_sparse_moe",
                    router_name="router",
                )
            ),
            defaults={"norm_topk_prob": True, "num_experts_per_tok": 2, "num_local_experts": 8},
            reads_attention_bias=True,
            reads_multipliers=True,
        ),
        Family(
            "Ernie4_5_MoeForCausalLM",
            names=TensorNames(
                experts=replace(
                    _EXPERTS,
                    shared_gate=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
                    shared_down="mlp.shared_experts.down_proj",
                    choice_bias="mlp.moe_statics.e_score_correction_bias",
                ),
                ignored=("*.rotary_emb.inv_freq", "model.mtp_*"),
            ),
            keys={
                **_USE_BIAS,
                "decoder_sparse_step": "moe_layer_interval",
                "num_local_experts": "moe_num_experts",
                "num_experts_per_tok": "moe_k",
            },
            defaults={
                "moe_intermediate_size": 1536,
                "moe_layer_start_index": 1,
                "moe_norm_min": 1e-12,
                "moe_num_shared_experts": 2,
                "norm_topk_prob": True,
                "num_experts_per_tok": 6,
                "num_key_value_heads": 4,
                "num_local_experts": 64,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500000.0,
                "tie_word_embeddings": True,
            },
            reads_attention_bias=True,
            reads_mlp_bias=True,
            head_bias_key="use_bias",
            interleaved_rotary=True,
        ),
        Family(
            "HunYuanMoEV1ForCausalLM",
            names=replace(
                _HUNYUAN,
                experts=replace(
                    _EXPERTS,
                    router="mlp.gate.wg",
                    shared_gate=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
                    shared_down="mlp.shared_mlp.down_proj",
                    router_name="gate.wg",
                ),
            ),
            keys={
                "moe_intermediate_size": "intermediate_size",
                "num_experts_per_tok": "moe_topk",
                "shared_expert_intermediate_size": "intermediate_size",
            },
            defaults={
                "norm_topk_prob": True,
                "num_experts_per_tok": 1,
                "num_local_experts": 1,
                "rms_norm_eps": 1e-5,
            },
            reads_attention_bias=True,
            qk_norm=QkNorm.HEAD_ROTATED,
        ),
        Family(
            "Qwen2MoeForCausalLM",
            names=TensorNames(experts=_QWEN_EXPERTS),
            keys={"attention_bias": "qkv_bias"},
            defaults={
                **_QWEN,
                "moe_intermediate_size": 1408,
                "num_local_experts": 60,
                "num_experts_per_tok": 4,
                "num_key_value_heads": 16,
                "qkv_bias": True,
                "shared_expert_intermediate_size": 5632,
                "sliding_window": 4096,
            },
            reads_attention_bias=True,
            output_bias_key=None,
            windows=WindowRule.EVEN,
        ),
        Family(
            "OlmoeForCausalLM",
            names=TensorNames(experts=_EXPERTS),
            defaults={"num_local_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
            reads_attention_bias=True,
            qk_norm=QkNorm.ALL_HEADS,
            refused=("clip_qkv",),
        ),
        Family(
            "Qwen3MoeForCausalLM",
            names=TensorNames(experts=_EXPERTS),
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
                    stack=ExpertStack(transposed=True, alternates=True),
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
            experts_have_bias=True,
            windows=WindowRule.PATTERN,
            clamped_swiglu=True,
        ),
    )
}
"""Families by architecture name, as in config.json."""
