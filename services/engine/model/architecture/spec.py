"""Typed architecture of a checkpoint, read from config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from services.common.gguf.gguf_config import MARK
from services.common.json_values import Json
from services.engine.model.architecture.activation import Activation, Nonlinearity
from services.engine.model.architecture.rotary import RotarySpec
from services.engine.model.checkpoint.architectures import family_of
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.families import Family, WindowRule
from services.engine.model.checkpoint.fp8 import Fp8Format
from services.engine.model.checkpoint.gguf_families import gguf_family
from services.engine.model.checkpoint.schemes import SCHEMES, Scheme

__all__ = ["ExpertsSpec", "ModelSpec"]


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts: feed-forward layers among which a router chooses for each token."""

    count: int
    per_token: int
    width: int
    """Intermediate size of an expert"""
    normalized: bool
    """True if the weights of a token's experts are scaled to sum to 1"""
    layers: tuple[bool, ...]
    """For each layer, whether it has experts rather than one dense feed-forward layer"""
    is_mxfp4: bool
    """True if the experts are stored as MXFP4"""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and constants of a model: all that the forward pass needs besides weights."""

    family: Family
    """Names and storage conventions of its tensors"""
    vocab_size: int
    """Width of the logits"""
    context_length: int
    """Maximum tokens of a sequence"""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    tied_embeddings: bool
    """True if the output projection is the embedding table"""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    activation: Activation
    experts: ExpertsSpec | None
    attention_scale: float
    """Factor on query-key products"""
    attention_cap: float
    """Soft cap on scaled query-key products: cap * tanh(product / cap); 0: none"""
    logit_cap: float
    """Soft cap on the logits; 0: none"""
    embedding_scale: float
    residual_scale: float
    """Factor on what attention and feed-forward layers add to the residual"""
    logit_scale: float
    windows: tuple[int, ...]
    """Attention window of each layer in tokens, the current one included; 0: unlimited. Tokens of
    encoders see as many after them"""
    rotaries: tuple[RotarySpec | None, ...]
    """RoPE of each layer; None: the layer has none"""
    dtype: str
    """Dtype of the stored weights according to config.json: float32, bfloat16 or float16"""
    fp8: Fp8Format | None
    """Format of the weights that are stored as FP8 instead; None: there are none"""
    scheme: Scheme | None
    """Way in which quantized weights are stored; None: there are none"""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    position_offset: int = 0
    """Number of the first learned position"""
    num_token_types: int = 0
    """Texts that an encoder tells apart in a pair; 0: none"""
    num_labels: int = 0
    """Scores of a text; 0: the checkpoint has no head that scores texts"""

    @property
    def is_encoder(self) -> bool:
        """True if every token sees all tokens of its text."""
        return self.family.encoder is not None

    @property
    def has_attention_bias(self) -> bool:
        """True if scores have an addend that depends on the distance of two tokens."""
        return self.family.encoder is not None and self.family.encoder.attention_bias is not None

    @property
    def architecture(self) -> str:
        return self.family.architecture

    @property
    def has_grid_positions(self) -> bool:
        """True if the tokens of an image have a row and a column."""
        return any(rotary is not None and rotary.axes for rotary in self.rotaries)

    @property
    def has_plain_attention(self) -> bool:
        """True if attention is a plain softmax, without soft caps and sinks."""
        return not self.attention_cap and self.family.names.sinks is None

    @staticmethod
    def from_config(values: Mapping[str, Json], file: str = "config.json") -> "ModelSpec":
        """Read the parsed config.json `values`; errors call it `file`.

        Raises CheckpointError for an unknown architecture, a missing or mistyped value, and values
        that contradict one another.
        """
        whole = Config(file, dict(values))
        family = family_of(whole)
        if whole.has(MARK):
            family = gguf_family(family)
        nested = {} if family.section is None else whole.section(family.section).values
        config = Config(file, {**family.defaults, **nested, **values}, family.keys)
        stored_as = _quantization(config, family)
        hidden_size = config.positive("hidden_size")
        num_heads = config.positive("num_attention_heads")
        num_kv_heads = config.positive("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"{file}: {config.file_key('num_attention_heads')} ({num_heads}) is not a multiple "
                f"of num_key_value_heads ({num_kv_heads})."
            )
        if not config.has("head_dim") and hidden_size % num_heads:
            raise CheckpointError(
                f"{file}: {config.file_key('hidden_size')} ({hidden_size}) is not a multiple of "
                f"{config.file_key('num_attention_heads')} ({num_heads}), and head_dim is missing."
            )
        head_dim = config.positive("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise CheckpointError(f"{file}: head_dim ({head_dim}) is odd, so RoPE cannot apply.")
        num_layers = config.positive("num_hidden_layers")
        context_length = config.positive("max_position_embeddings")
        inner = None if family.inner_factor is None else family.inner_factor * hidden_size
        intermediate_size = config.positive("intermediate_size", inner)
        attention_bias = family.reads_attention_bias and config.flag("attention_bias", False)
        local = _local_layers(config, family.windows, num_layers)
        window = config.positive("sliding_window") if any(local) else 0
        encoder = family.encoder
        offset = 0
        if encoder is not None:
            window = window // 2 + 1
            if encoder.positions_after_padding:
                offset = config.integer("pad_token_id") + 1

        def multiplier(key: str) -> float:
            return config.positive_number(key, 1.0) if family.reads_multipliers else 1.0

        def cap(key: str) -> float:
            return config.number(key, 0.0) if family.reads_soft_caps else 0.0

        bos_token_ids = config.ids("bos_token_id")
        return ModelSpec(
            family=family,
            vocab_size=config.positive("vocab_size"),
            context_length=context_length - offset,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_epsilon=config.positive_number("rms_norm_eps", 1e-6),
            tied_embeddings=config.flag("tie_word_embeddings", False) or not family.has_logits,
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family.reads_mlp_bias and config.flag("mlp_bias", False),
            activation=_activation(config, family),
            experts=_experts(config, family, num_layers, intermediate_size, stored_as == "mxfp4"),
            attention_scale=_attention_scale(config, family, head_dim),
            attention_cap=cap("attn_logit_softcapping"),
            logit_cap=cap("final_logit_softcapping"),
            embedding_scale=hidden_size**0.5
            if family.scaled_embedding
            else multiplier("embedding_multiplier"),
            residual_scale=multiplier("residual_multiplier"),
            logit_scale=1 / multiplier("logits_scaling"),
            windows=tuple(window if is_local else 0 for is_local in local),
            rotaries=_rotaries(config, family, local, head_dim, context_length),
            dtype=_dtype(config),
            fp8=stored_as if isinstance(stored_as, Fp8Format) else None,
            scheme=stored_as if isinstance(stored_as, Scheme) else None,
            eos_token_ids=config.ids("eos_token_id"),
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
            position_offset=offset,
            num_token_types=0
            if encoder is None or encoder.token_types is None
            else config.integer("type_vocab_size", 2),
            num_labels=_num_labels(config) if family.head else 0,
        )


def _quantization(config: Config, family: Family) -> Fp8Format | Scheme | Literal["mxfp4"] | None:
    """Return how weights are quantized. Raises CheckpointError for what is not read."""
    if not config.has("quantization_config"):
        return None
    section = config.section("quantization_config")
    method = section.text("quant_method", "unnamed")
    if Fp8Format.is_fp8(section):
        return Fp8Format.from_config(section)
    if method in SCHEMES:
        return SCHEMES[method](section)
    if method == "mxfp4" and family.names.experts is not None and family.names.experts.are_stacked:
        return "mxfp4"
    raise CheckpointError(
        f"{config.file}: quantization_config ({method}) is not supported. Supported: "
        f"fp8, {', '.join(SCHEMES)}, and mxfp4 for the experts of gpt-oss; or serve a float32, "
        "bfloat16 or float16 checkpoint."
    )


def _activation(config: Config, family: Family) -> Activation:
    if family.clamped_swiglu:
        alpha, limit = config.number("swiglu_alpha"), config.positive_number("swiglu_limit")
        return Activation(Nonlinearity.CLAMPED_SWIGLU, alpha=alpha, limit=limit)
    name = config.text("hidden_act", "silu")
    known = {
        "silu": Nonlinearity.SILU,
        "gelu": Nonlinearity.GELU,
        "gelu_new": Nonlinearity.GELU_TANH,
        "gelu_pytorch_tanh": Nonlinearity.GELU_TANH,
    }
    if name not in known:
        raise CheckpointError(
            f"{config.file}: {config.file_key('hidden_act')} {name} is not supported. Supported: "
            f"{', '.join(known)}."
        )
    return Activation(known[name], family.gated)


def _experts(
    config: Config, family: Family, num_layers: int, intermediate_size: int, is_mxfp4: bool
) -> ExpertsSpec | None:
    if family.names.experts is None:
        return None
    # transformers 5 writes num_local_experts for every family, older releases Qwen's num_experts.
    count = config.positive("num_experts" if config.has("num_experts") else "num_local_experts")
    per_token = config.positive("num_experts_per_tok")
    if per_token > count:
        raise CheckpointError(
            f"{config.file}: num_experts_per_tok ({per_token}) exceeds the {count} experts."
        )
    plain, step = config.ids("mlp_only_layers"), config.positive("decoder_sparse_step", 1)
    return ExpertsSpec(
        count=count,
        per_token=per_token,
        width=config.positive("moe_intermediate_size", intermediate_size),
        normalized=config.flag("norm_topk_prob", False),
        layers=tuple(layer not in plain and (layer + 1) % step == 0 for layer in range(num_layers)),
        is_mxfp4=is_mxfp4,
    )


def _num_labels(config: Config) -> int:
    """Return the labels of a classifier, whose file names them or tells their number."""
    names = config.section("id2label").values
    return len(names) or config.positive("num_labels", 2)


def _attention_scale(config: Config, family: Family, head_dim: int) -> float:
    if config.flag("scale_attn_by_inverse_layer_idx", False):
        raise CheckpointError(f"{config.file}: scale_attn_by_inverse_layer_idx is not supported.")
    if not config.flag("scale_attn_weights", True):
        return 1.0
    if family.reads_multipliers:
        return config.positive_number("attention_multiplier", 1.0)
    return 1 / math.sqrt(config.positive_number("query_pre_attn_scalar", head_dim))


def _local_layers(config: Config, rule: WindowRule, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it attends over a sliding window only."""
    has_windows = rule is not WindowRule.NONE and config.has("sliding_window")
    if not has_windows or not config.flag("use_sliding_window", True):
        return (False,) * num_layers
    if rule is WindowRule.ALL:
        return (True,) * num_layers
    if config.has("layer_types"):
        return _listed_layers(config, num_layers)
    if rule is WindowRule.SPACED:
        pattern = config.positive("sliding_window_pattern")
        return tuple(layer % pattern != 0 for layer in range(num_layers))
    if rule is WindowRule.PATTERN:
        pattern = config.positive("sliding_window_pattern")
        return tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
    first = config.integer("max_window_layers")
    return tuple(layer >= first for layer in range(num_layers))


def _listed_layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    kinds = config.texts("layer_types")
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"{config.file}: layer_types names {len(kinds)} layers, num_hidden_layers {num_layers}."
        )
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise CheckpointError(f"{config.file}: layer type {kind} is not supported.")
    return tuple(kind == "sliding_attention" for kind in kinds)


def _rotaries(
    config: Config, family: Family, local: tuple[bool, ...], head_dim: int, context_length: int
) -> tuple[RotarySpec | None, ...]:
    num_layers = len(local)
    if family.names.positions is not None:
        return (None,) * num_layers
    everywhere = RotarySpec.from_config(config, head_dim, context_length, family.multimodal_axes)
    if family.local_rotary:
        near = RotarySpec.local_from_config(config, head_dim, context_length)
        return tuple(near if is_local else everywhere for is_local in local)
    if not family.reads_no_rope_layers:
        return (everywhere,) * num_layers
    interval = config.positive("no_rope_layer_interval")
    rotates = config.ids("no_rope_layers") or tuple(
        (layer + 1) % interval for layer in range(num_layers)
    )
    if len(rotates) < num_layers:
        raise CheckpointError(
            f"{config.file}: no_rope_layers names {len(rotates)} layers, "
            f"num_hidden_layers {num_layers}."
        )
    return tuple(everywhere if rotates[layer] else None for layer in range(num_layers))


def _dtype(config: Config) -> str:
    # transformers 5 writes dtype, older releases torch_dtype.
    dtype = config.text("dtype" if config.has("dtype") else "torch_dtype", "float32")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(
            f"{config.file}: dtype {dtype} is not supported. Supported: float32, bfloat16, float16."
        )
    return dtype
