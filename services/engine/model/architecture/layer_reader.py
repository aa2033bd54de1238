"""Layers of a decoder or an encoder, read from config.json."""

import math

from services.engine.model.architecture.activation import Activation, GateFunction, Nonlinearity
from services.engine.model.architecture.block_reader import with_block_indexes
from services.engine.model.architecture.compressed_reader import (
    read_compressed_layers,
    with_hyper_connections,
)
from services.engine.model.architecture.disentangled import DisentangledSpec
from services.engine.model.architecture.experts_reader import (
    expert_layers,
    num_experts,
    read_experts,
)
from services.engine.model.architecture.gemma3n_layers import gemma3n_layers
from services.engine.model.architecture.gemma4_layers import gemma4_layers
from services.engine.model.architecture.latent_reader import read_latent_layers
from services.engine.model.architecture.layers import (
    AttentionGate,
    AttentionSpec,
    DenseSpec,
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
    NoFeedForward,
    ParallelSpec,
)
from services.engine.model.architecture.lightning_reader import with_normed_residual
from services.engine.model.architecture.mamba_shape import MambaShape
from services.engine.model.architecture.recurrent_reader import read_recurrent_layers
from services.engine.model.architecture.relative_reader import (
    read_relative_layers,
    with_convolved_parts,
)
from services.engine.model.architecture.rotary import RotarySpec
from services.engine.model.architecture.shortcut_layers import shortcut_layers
from services.engine.model.architecture.single_parts import single_parts
from services.engine.model.architecture.zamba_layers import zamba_layers
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.family import Family, QkNorm, WindowRule
from services.engine.model.checkpoint.local_layers import local_layers, rotating_layers

__all__ = ["read_layers"]

_CHUNK_STEP = 32
"""Divisor of attention's chunk sizes, so that no block of the cache belongs to two chunks"""
_GATINGS = ("per-head", "per-element")
_ALIBI_BIAS = 8.0
"""Exponent of ALiBi's smallest slope in its paper"""
_MOST_WIDTH = 1 << 24
"""Upper bound of a layer's intermediate size"""


def read_layers(
    config: Config, family: Family, hidden_size: int, context_length: int, *, has_mxfp4: bool
) -> tuple[LayerSpec, ...]:
    """Read all layers. has_mxfp4: experts are stored as MXFP4.

    Raises CheckpointError for a missing or mistyped value, and for values that contradict one
    another.
    """
    num_layers = config.positive("num_hidden_layers")
    for key in family.refused:
        if config.values.get(key):
            raise CheckpointError(f"{config.file}: {key} is set, which is not supported.")
    for key in family.required:
        if not config.flag(key, True):
            raise CheckpointError(f"{config.file}: {key} is false, which is not supported.")
    recurrent = read_recurrent_layers(config, family, hidden_size, num_layers)
    missing = sorted(set(range(num_layers)) - recurrent.keys())
    if missing and (family.is_recurrent or family.has_parallel_mixers):
        raise CheckpointError(
            f"{config.file}: layer {missing[0]} of {family.architecture} must be recurrent."
        )
    if family.is_recurrent:
        return tuple(LayerSpec(recurrent[layer], NoFeedForward()) for layer in range(num_layers))
    mixers: list[MixerSpec] = []
    if family.names.compressed is not None:
        mixers += read_compressed_layers(config, context_length, num_layers)
    elif family.names.relative is not None:
        mixers += read_relative_layers(config, num_layers)
    elif family.names.latent is None:
        attention = _attention_layers(config, family, hidden_size, context_length, num_layers)
        has_indexes = family.names.block_index is not None
        mixers += with_block_indexes(config, attention) if has_indexes else attention
    else:
        mixers += read_latent_layers(config, family, hidden_size, context_length, num_layers)
    if family.names.shared_block is not None:
        states = [recurrent[layer] for layer in range(num_layers)]
        dense = _feed_forward_layers(config, family, hidden_size, num_layers, has_mxfp4)
        return zamba_layers(config, family.names.shared_block, mixers, states, dense)
    if family.has_parallel_mixers:
        mixers = [_parallel(mixer, recurrent[layer]) for layer, mixer in enumerate(mixers)]
    else:
        mixers = [recurrent.get(layer, mixer) for layer, mixer in enumerate(mixers)]
    feed_forwards = _feed_forward_layers(config, family, hidden_size, num_layers, has_mxfp4)
    if family.names.relative is not None:
        return with_convolved_parts(config, mixers, feed_forwards)
    if family.has_single_parts:
        return single_parts(config, mixers, feed_forwards)
    if family.names.sublayer_modules:
        return shortcut_layers(config, mixers, feed_forwards)
    layers = tuple(map(LayerSpec, mixers, feed_forwards))
    if family.names.altup is not None:
        return gemma3n_layers(config, layers)
    if family.names.hyper is not None:
        return with_hyper_connections(config, layers)
    if family.has_normed_residual:
        return with_normed_residual(config, layers)
    return gemma4_layers(config, layers, context_length) if family.is_gemma4 else layers


def _parallel(attention: MixerSpec, mamba: MixerSpec) -> ParallelSpec:
    assert isinstance(attention, AttentionSpec)
    assert isinstance(mamba, MambaShape)
    return ParallelSpec(attention, mamba)


def _attention_layers(
    config: Config, family: Family, hidden_size: int, context_length: int, num_layers: int
) -> list[AttentionSpec]:
    num_heads = config.positive("num_attention_heads")
    num_kv_heads = _kv_heads(config, family, num_heads)
    local_kv_heads = num_kv_heads
    if family.has_mimo_keys:
        local_kv_heads = config.positive("swa_num_key_value_heads", num_kv_heads)
    key = "num_attention_heads_per_layer" if family.reads_layer_heads else "num_attention_heads"
    layer_heads = config.per_layer(key, num_layers, num_heads)
    for kv_key, kv_heads in (
        ("num_key_value_heads", num_kv_heads),
        ("swa_num_key_value_heads", local_kv_heads),
    ):
        for count in layer_heads:
            if count % kv_heads:
                raise CheckpointError(
                    f"{config.file}: {config.file_key(key)} ({count}) is not a multiple of "
                    f"{kv_key} ({kv_heads})."
                )
    head_dim = _head_dim(config, hidden_size, num_heads)
    local = local_layers(config, family, num_layers)
    is_chunked = family.windows is WindowRule.CHUNKED
    if is_chunked and any(local) and config.positive("sliding_window") % _CHUNK_STEP:
        raise CheckpointError(
            f"{config.file}: {config.file_key('sliding_window')} must be a multiple of "
            f"{_CHUNK_STEP}, got {config.positive('sliding_window')}."
        )
    window = config.positive("sliding_window") if any(local) else 0
    if family.encoder is not None or family.halves_windows:
        window = window // 2 + 1
    elif family.is_bidirectional:
        window += 1 if window else 0
    has_bias = family.reads_attention_bias and config.flag("attention_bias", False)
    has_qk_norm = family.qk_norm_key is None or config.flag(family.qk_norm_key, False)
    gate = _gate(config, family)
    qk_norm = family.qk_norm if has_qk_norm else QkNorm.NONE
    alibi_bias = config.positive_number("alibi_bias_max", _ALIBI_BIAS) if family.has_alibi else 0.0
    output_key = family.output_bias_key if family.reads_attention_bias else None
    return [
        AttentionSpec(
            num_heads=count,
            num_kv_heads=local_kv_heads if is_local else num_kv_heads,
            head_dim=head_dim,
            scale=_attention_scale(config, family, head_dim),
            cap=config.number("attn_logit_softcapping", 0.0) if family.reads_soft_caps else 0.0,
            window=window if is_local else 0,
            rotary=rotary,
            qkv_bias=family.qkv_bias or has_bias,
            output_bias=output_key is not None and config.flag(output_key, False),
            has_sinks=_has_sinks(config, family, is_local),
            qk_norm=_qk_norm_of(qk_norm, rotary),
            gate=gate,
            is_chunked=is_chunked and is_local,
            value_width=config.positive("v_head_dim") if family.has_mimo_keys else 0,
            alibi_bias=alibi_bias,
            clip=_clip(config) if family.reads_clip else 0.0,
        )
        for count, is_local, rotary in zip(
            layer_heads,
            local,
            _rotaries(config, family, local, head_dim, context_length),
            strict=True,
        )
    ]


def _has_sinks(config: Config, family: Family, is_local: bool) -> bool:
    """Return whether a layer has sinks; files of MiMo state it for each of two kinds of layers."""
    key = f"add_{'swa' if is_local else 'full'}_attention_sink_bias"
    return family.names.sinks is not None and config.flag(key, True)


def _gate(config: Config, family: Family) -> AttentionGate | None:
    """Return the gates of attention's output; None: there are none."""
    if family.has_output_gate:
        return AttentionGate()
    if family.names.output_gate is None:
        return None
    if not family.reads_gating:
        return AttentionGate(is_of_heads=family.names.gates_heads)
    kind = "per-head" if config.values.get("gating") is True else config.text("gating")
    if kind not in _GATINGS:
        raise CheckpointError(
            f"{config.file}: gating {kind} is not supported. Supported: {', '.join(_GATINGS)}."
        )
    return AttentionGate(GateFunction.SOFTPLUS, is_of_heads=kind == "per-head")


def _kv_heads(config: Config, family: Family, num_heads: int) -> int:
    if family.reads_multi_query and not config.flag("new_decoder_architecture", False):
        return 1 if config.flag("multi_query", True) else num_heads
    return config.positive("num_key_value_heads", num_heads)


def _clip(config: Config) -> float:
    return config.positive_number("clip_qkv") if config.has("clip_qkv") else 0.0


def _qk_norm_of(norm: QkNorm, rotary: RotarySpec | None) -> QkNorm:
    """Return a layer's norm: Llama 4's layers without rotation have none."""
    rotates = rotary is not None and rotary.width > 0
    return QkNorm.NONE if norm is QkNorm.HEAD_UNWEIGHTED and not rotates else norm


def _head_dim(config: Config, hidden_size: int, num_heads: int) -> int:
    if not config.has("head_dim") and hidden_size % num_heads:
        raise CheckpointError(
            f"{config.file}: {config.file_key('hidden_size')} ({hidden_size}) is not a multiple of "
            f"{config.file_key('num_attention_heads')} ({num_heads}), and head_dim is missing."
        )
    head_dim = config.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"{config.file}: head_dim ({head_dim}) is odd, so RoPE cannot apply.")
    return head_dim


def _feed_forward_layers(
    config: Config, family: Family, hidden_size: int, num_layers: int, has_mxfp4: bool
) -> list[FeedForwardSpec]:
    inner = None if family.inner_factor is None else family.inner_factor * hidden_size
    # Qwen 3.5's mixtures have no dense layer, so their file states no width of one
    if inner is None and config.has("moe_intermediate_size"):
        inner = config.positive("moe_intermediate_size")
    activation = _activation(config, family)
    activations = [activation] * num_layers
    if config.has("xielu_beta"):
        activations = _xielus(config, activation, num_layers)
    has_bias = family.reads_mlp_bias and config.flag("mlp_bias", False)
    widths = config.per_layer("intermediate_size", num_layers, inner)
    if config.flag("block_auto_adjust_ff_dim", False):
        widths = tuple(_adjusted_width(config, width) for width in widths)
    dense = [
        DenseSpec(width, each, has_bias) for width, each in zip(widths, activations, strict=True)
    ]
    if family.names.experts is None or family.is_gemma4 or not num_experts(config):
        return [*dense]
    experts = [
        read_experts(config, family, layer, per_token, has_mxfp4=has_mxfp4)
        for layer, per_token in zip(
            dense, config.per_layer("num_experts_per_tok", num_layers), strict=True
        )
    ]
    have_experts = expert_layers(config, family, num_layers)
    return [(experts if layer in have_experts else dense)[layer] for layer in range(num_layers)]


def _adjusted_width(config: Config, width: int) -> int:
    """Return the width that LFM2 derives from the one in its file."""
    width = 2 * width // 3
    if config.has("block_ffn_dim_multiplier"):
        multiple = config.positive("block_multiple_of")
        wider = config.positive_number("block_ffn_dim_multiplier") * width
        if wider > _MOST_WIDTH:
            raise CheckpointError(f"{config.file}: block_ffn_dim_multiplier is too large.")
        width = int(wider)
        width = -(-width // multiple) * multiple
    if width <= 0:
        raise CheckpointError(
            f"{config.file}: {config.file_key('intermediate_size')} is too small for "
            "block_auto_adjust_ff_dim."
        )
    return width


def _activation(config: Config, family: Family) -> Activation:
    if family.clamped_swiglu:
        alpha, limit = config.number("swiglu_alpha"), config.positive_number("swiglu_limit")
        return Activation(Nonlinearity.CLAMPED_SWIGLU, alpha=alpha, limit=limit)
    name = config.text("hidden_act", "silu")
    if family.clamped_silu:
        if name != "silu":
            raise CheckpointError(
                f"{config.file}: hidden_act {name} is not supported here. Supported: silu."
            )
        return Activation(Nonlinearity.CLAMPED_SILU, limit=config.positive_number("swiglu_limit"))
    known = {
        "silu": Nonlinearity.SILU,
        "gelu": Nonlinearity.GELU_TANH if family.gelu_is_tanh else Nonlinearity.GELU,
        "gelu_new": Nonlinearity.GELU_TANH,
        "gelu_pytorch_tanh": Nonlinearity.GELU_TANH,
        "relu": Nonlinearity.RELU,
        "relu2": Nonlinearity.RELU_SQUARED,
    }
    if family.names.activation is not None or config.has("xielu_beta"):
        known["xielu"] = Nonlinearity.XIELU
    if name not in known:
        raise CheckpointError(
            f"{config.file}: {config.file_key('hidden_act')} {name} is not supported. Supported: "
            f"{', '.join(known)}."
        )
    return Activation(known[name], family.gated)


def _xielus(config: Config, activation: Activation, num_layers: int) -> list[Activation]:
    """Return each layer's activation, with the constants that GGUF files keep in their config."""
    constants = [config.numbers(f"xielu_{name}") for name in ("alpha_p", "alpha_n", "beta", "eps")]
    if any(len(each) < num_layers for each in constants):
        raise CheckpointError(f"{config.file}: xIELU needs 4 constants for each layer.")
    layers = [*zip(*constants, strict=False)][:num_layers]
    return [activation.with_constants(*each) for each in layers]


def _attention_scale(config: Config, family: Family, head_dim: int) -> float:
    if config.flag("scale_attn_by_inverse_layer_idx", False):
        raise CheckpointError(f"{config.file}: scale_attn_by_inverse_layer_idx is not supported.")
    if not config.flag("scale_attn_weights", True):
        return 1.0
    if family.parts and config.has("softmax_scale"):
        return config.positive_number("softmax_scale")
    if family.reads_multipliers:
        usual = head_dim**-0.5 if family.has_parallel_mixers else 1.0
        return config.positive_number("attention_multiplier", usual)
    if family.encoder is not None and family.encoder.is_disentangled:
        return 1 / math.sqrt(head_dim * DisentangledSpec.from_config(config).num_products)
    return 1 / math.sqrt(config.positive_number("query_pre_attn_scalar", head_dim))


def _rotaries(
    config: Config, family: Family, local: tuple[bool, ...], head_dim: int, context_length: int
) -> tuple[RotarySpec | None, ...]:
    num_layers = len(local)
    rope = config.section("rope_parameters")
    has_base = not rope.values or rope.has("rope_theta") or config.has("rope_theta")
    if family.names.positions is not None or (family.rotates_with_base and not has_base):
        return (None,) * num_layers
    encoder = family.encoder
    if family.has_alibi or (encoder is not None and encoder.is_disentangled):
        return (None,) * num_layers
    if family.reads_position_type and (
        not config.has("position_embedding_type")
        or config.text("position_embedding_type") != "rope"
    ):
        return (None,) * num_layers
    everywhere = RotarySpec.from_config(config, head_dim, context_length, family.multimodal_axes)
    if family.local_rotary:
        near = RotarySpec.local_from_config(config, head_dim, context_length)
        return tuple(near if is_local else everywhere for is_local in local)
    if family.rotates_windows_only and config.has("sliding_window"):
        dense = _rotating_dense_layers(config, family, num_layers)
        return tuple(
            everywhere if is_local or layer in dense else None
            for layer, is_local in enumerate(local)
        )
    if not family.reads_no_rope_layers:
        return (everywhere,) * num_layers
    nowhere = RotarySpec.growth_from_config(config) if family.reads_temperature else None
    return tuple(
        everywhere if rotates else nowhere for rotates in rotating_layers(config, num_layers)
    )


def _rotating_dense_layers(config: Config, family: Family, num_layers: int) -> set[int]:
    """Return the layers that have RoPE, even without a window, because they have no experts."""
    key = "prefix_dense_sliding_window_pattern"
    if not family.rotates_dense_layers or config.positive(key) != 1:
        return set()
    return set(range(num_layers)) - expert_layers(config, family, num_layers)
