"""The architectures that can be served, and how each differs from the plain Llama decoder."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from services.engine.model.checkpoint.config import JsonObject

__all__ = ["FAMILIES", "ExpertNames", "Family", "Names", "QkNorm", "WindowRule"]


class WindowRule(Enum):
    """Which layers attend over a sliding window only."""

    NONE = "no layer"
    ALL = "every layer, when sliding_window is set and use_sliding_window not false"
    LISTED = "when use_sliding_window is true: those layer_types names, or from max_window_layers"
    PATTERN = "those layer_types names, or all but every sliding_window_pattern-th"


class QkNorm(Enum):
    """An RMSNorm that queries and keys pass before the rotation."""

    NONE = "none"
    HEAD = "over each head"
    ALL_HEADS = "over all heads of a token together"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A mixture of experts. "{}" stands for the number of an expert."""

    router: str
    gate: tuple[str, ...]
    down: str
    """Without a "{}" it holds all experts, as `gate` does then, whose two products interleave"""

    @property
    def are_stacked(self) -> bool:
        return "{}" not in self.down


@dataclass(frozen=True, slots=True)
class Names:
    """What a checkpoint calls its tensors, without .weight and .bias; None: there is no such one.

    Those of a layer stand behind its number.
    """

    roots: tuple[str, ...] = ("model.", "")
    """What all names but the output projection's begin with, in one file or another"""
    embedding: str = "embed_tokens"
    positions: str | None = None
    """A learned embedding for each position, in place of a rotation"""
    layers: str = "layers"
    final_norm: str = "norm"
    attention_norm: str | None = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Or one tensor that holds the three one below the other"""
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str | None = None
    """A logit for each head that takes part in its softmax and stands for no token"""
    output: str = "self_attn.o_proj"
    attention_post_norm: str | None = None
    """A norm of what attention adds to the residual"""
    feed_forward_norm: str | None = "post_attention_layernorm"
    gate: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Or one tensor that holds both"""
    down: str = "mlp.down_proj"
    feed_forward_post_norm: str | None = None
    experts: ExpertNames | None = None
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    """Patterns of tensors that old conversions stored, and config.json determines"""


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. Every default is Llama's."""

    architecture: str
    names: Names = field(default_factory=Names)
    keys: Mapping[str, str] = field(default_factory=dict)
    """What its config.json calls keys that we read under Llama's name"""
    section: str | None = None
    """The object of config.json that describes the decoder, where there is more to the model"""
    defaults: JsonObject = field(default_factory=dict)
    """What transformers takes for keys that config.json leaves out, by the file's own names"""
    qkv_bias: bool = False
    """q, k and v always have a bias, whatever attention_bias says"""
    reads_attention_bias: bool = False
    """attention_bias gives q, k, v and o a bias"""
    reads_mlp_bias: bool = False
    """mlp_bias gives gate, up and down a bias"""
    qk_norm: QkNorm = QkNorm.NONE
    layer_norm: bool = False
    """Its norms are LayerNorms with a bias, not RMSNorms"""
    norm_offset: bool = False
    """A norm's weight is stored less one"""
    transposed: bool = False
    """Weights lie as [inputs, outputs]"""
    gated: bool = True
    """The feed-forward layer has a second product, which the first one's activation gates"""
    inner_factor: int | None = None
    """intermediate_size, in hidden sizes, where config.json does not say"""
    windows: WindowRule = WindowRule.NONE
    local_rotary: bool = False
    """Layers with a window rotate by frequencies of their own"""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of their width"""
    reads_multipliers: bool = False
    """embedding_multiplier, residual_multiplier, attention_multiplier, logits_scaling"""
    reads_no_rope_layers: bool = False
    """no_rope_layers has a 0 for each layer that does not rotate"""
    reads_soft_caps: bool = False
    """attn_logit_softcapping and final_logit_softcapping bend logits below a bound"""
    clamped_swiglu: bool = False
    """Its activation is gpt-oss's, with swiglu_alpha and swiglu_limit"""


_GEMMA = Names(
    attention_post_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    feed_forward_post_norm="post_feedforward_layernorm",
)
_QWEN: JsonObject = {"use_sliding_window": False, "max_window_layers": 28}
_GEMMA3 = Family(
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
)

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
        _GEMMA3,
        replace(
            _GEMMA3,
            architecture="Gemma3ForConditionalGeneration",
            names=replace(
                _GEMMA,
                roots=("language_model.model.", "model.language_model."),
                ignored=("*vision_tower.*", "*multi_modal_projector.*"),
            ),
            section="text_config",
        ),
        Family(
            "Phi3ForCausalLM",
            names=Names(qkv=("self_attn.qkv_proj",), gate=("mlp.gate_up_proj",)),
            defaults={"rms_norm_eps": 1e-5},
            windows=WindowRule.ALL,
        ),
        Family(
            "Olmo2ForCausalLM",
            names=Names(
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
            names=Names(gate=("mlp.c_fc",), down="mlp.c_proj"),
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
            names=Names(
                roots=("transformer.", ""),
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
            names=Names(
                experts=ExpertNames(
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
            names=Names(
                experts=ExpertNames(
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
            "GptOssForCausalLM",
            names=Names(
                sinks="self_attn.sinks",
                experts=ExpertNames(
                    router="mlp.router",
                    gate=("mlp.experts.gate_up_proj",),
                    down="mlp.experts.down_proj",
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
"""By the name that config.json gives them."""
