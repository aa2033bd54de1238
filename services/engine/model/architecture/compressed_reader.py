"""Compressed attention and hyper-connections, read from config.json."""

from collections.abc import Sequence
from dataclasses import replace

from services.engine.model.architecture.compressed_spec import CompressedSpec, CompressionSpec
from services.engine.model.architecture.index_spec import IndexSpec
from services.engine.model.architecture.layers import ExpertsSpec, HyperSpec, LayerSpec
from services.engine.model.architecture.rotary import RotarySpec
from services.engine.model.checkpoint.config import CheckpointError, Config, JsonObject

__all__ = ["read_compressed_layers", "with_hyper_connections"]

_SLIDING, _SPARSE, _HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_KINDS = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}
"""Kinds of layers by the published files' numbers, and the usual rates"""
_RATE_KEYS = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
_BY_TOKEN, _BY_SCORE = "hash_moe", "moe"
_USUAL_BY_TOKEN = 3
"""Number of first layers whose experts depend on token ids, if config.json doesn't say"""
_USUAL_ROTATING = 64 / 512
"""Share of a head that rotates, if config.json doesn't say"""


def read_compressed_layers(
    config: Config, context_length: int, num_layers: int
) -> list[CompressedSpec]:
    """Read the attention of all layers. Raises CheckpointError."""
    kinds = _kinds(config, num_layers)
    compressions = {kind: _compression(config, kind) for kind in set(kinds)}
    window = config.positive("sliding_window")
    kept = max(window, *(each.tokens for each in compressions.values() if each is not None), 1)
    heads, groups = config.positive("num_attention_heads"), config.positive("o_groups")
    if heads % groups:
        raise CheckpointError(
            f"{config.file}: o_groups ({groups}) must divide num_attention_heads ({heads})."
        )
    if (shared := config.positive("num_key_value_heads")) != 1:
        raise CheckpointError(f"{config.file}: num_key_value_heads must be 1, got {shared}.")
    width = config.positive("head_dim")
    rotating = _rotating(config, width)
    near, far = _rotaries(config, rotating, context_length)
    return [
        CompressedSpec(
            num_heads=heads,
            head_dim=width,
            query_width=config.positive("q_lora_rank"),
            window=window,
            kept_tokens=kept,
            scale=width**-0.5,
            rotary=near if compressions[kind] is None else far,
            rotary_width=rotating,
            groups=groups,
            group_width=config.positive("o_lora_rank"),
            norm_epsilon=config.positive_number("rms_norm_eps", 1e-6),
            compression=compressions[kind],
        )
        for kind in kinds
    ]


def with_hyper_connections(config: Config, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return layers with streams, the first of which take experts by token ids.

    Raises CheckpointError.
    """
    hyper = HyperSpec(
        config.positive("hc_mult"),
        config.positive("hc_sinkhorn_iters"),
        config.positive_number("hc_eps"),
    )
    if config.has("mlp_layer_types"):
        known = (_BY_TOKEN, _BY_SCORE)
        kinds = config.kind_per_layer("mlp_layer_types", len(layers), known, cuts=True)
        are_by_token = [kind == _BY_TOKEN for kind in kinds]
    else:
        count = config.integer("num_hash_layers", _USUAL_BY_TOKEN)
        are_by_token = [layer < count for layer in range(len(layers))]
    return tuple(
        replace(_by_token(config, layer) if is_by_token else layer, hyper=hyper)
        for layer, is_by_token in zip(layers, are_by_token, strict=True)
    )


def _by_token(config: Config, layer: LayerSpec) -> LayerSpec:
    experts = layer.feed_forward
    if not isinstance(experts, ExpertsSpec):
        key = config.file_key("num_local_experts")
        raise CheckpointError(f"{config.file}: {key} must be positive: each layer has experts.")
    routing = replace(experts.routing, has_bias=False, is_by_token=True)
    return replace(layer, feed_forward=replace(experts, routing=routing))


def _kinds(config: Config, num_layers: int) -> Sequence[str]:
    if config.has("layer_types"):
        return config.kind_per_layer("layer_types", num_layers, tuple(_KINDS.values()), cuts=True)
    if not config.has("compress_ratios"):
        further = [(_HEAVY, _SPARSE)[layer % 2] for layer in range(max(num_layers - 2, 0))]
        return [_HEAVY, _HEAVY, *further][:num_layers]
    ratios = config.integers("compress_ratios")  # layers that predict further tokens come last
    if len(ratios) < num_layers or set(ratios) - _KINDS.keys():
        raise CheckpointError(
            f"{config.file}: compress_ratios must have one of {', '.join(map(str, _KINDS))} for "
            f"each of {num_layers} layers, got {list(ratios)}."
        )
    return [_KINDS[ratio] for ratio in ratios[:num_layers]]


def _compression(config: Config, kind: str) -> CompressionSpec | None:
    if kind == _SLIDING:
        return None
    rate = config.positive(_RATE_KEYS[kind], _stated_rate(config, kind))
    if kind == _HEAVY:
        return CompressionSpec(rate, overlaps=False, index=None)
    index = IndexSpec(
        config.positive("index_n_heads"), config.positive("index_head_dim"), is_interleaved=True
    )
    return CompressionSpec(rate, True, index, config.positive("index_topk"))


def _stated_rate(config: Config, kind: str) -> int:
    """Return the rate under `compress_rates`, or the usual one if there is no such key."""
    if not config.has("compress_rates"):
        return next(rate for rate, each in _KINDS.items() if each == kind)
    rates = config.section("compress_rates")
    if config.has(_RATE_KEYS[kind]) and not rates.has(kind):
        return config.positive(_RATE_KEYS[kind])
    rate = rates.values.get(kind)
    if type(rate) is not int or rate <= 0:
        raise CheckpointError(
            f"{config.file}: compress_rates must have a positive integer under {kind}, got {rate}."
        )
    return rate


def _rotating(config: Config, width: int) -> int:
    """Return how many numbers of a head rotate."""
    if config.has("partial_rotary_factor"):
        rotating = int(width * config.positive_number("partial_rotary_factor"))
        stated = config.positive("qk_rope_head_dim", rotating)
        if stated != rotating:
            raise CheckpointError(
                f"{config.file}: qk_rope_head_dim must be partial_rotary_factor times head_dim "
                f"({rotating}), got {stated}."
            )
    else:
        rotating = config.positive("qk_rope_head_dim", max(int(width * _USUAL_ROTATING), 1))
    rope = config.section("rope_parameters")
    for name in ("main", "compress"):
        section = rope.section(name)
        if not section.has("partial_rotary_factor"):
            continue
        share = section.positive_number("partial_rotary_factor")
        if int(width * share) != rotating:
            raise CheckpointError(
                f"{config.file}: partial_rotary_factor of rope_parameters.{name} ({share}) must be "
                f"the share of head_dim that rotates ({rotating} of {width})."
            )
    narrowest = min(width, config.positive("index_head_dim"))
    if rotating % 2 or rotating > narrowest:
        raise CheckpointError(
            f"{config.file}: qk_rope_head_dim ({rotating}) must be even and at most head_dim and "
            f"index_head_dim ({narrowest})."
        )
    return rotating


def _rotaries(config: Config, width: int, context_length: int) -> tuple[RotarySpec, RotarySpec]:
    """Return the RoPE of layers with a window alone, and that of the others."""
    rope = config.section("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    near: JsonObject
    far: JsonObject
    if rope.has("main") or rope.has("compress"):
        for name in ("main", "compress"):
            if not rope.section(name).has("rope_theta"):
                raise CheckpointError(f"{config.file} lacks rope_theta of rope_parameters.{name}.")
        near, far = rope.section("main").values, rope.section("compress").values
    else:
        near = {"rope_theta": config.positive_number("rope_theta")}
        far = rope.values | {"rope_theta": config.positive_number("compress_rope_theta")}
        if "yarn" in (far.get("rope_type"), far.get("type")):
            far.setdefault("attention_factor", 1.0)

    def read(values: JsonObject) -> RotarySpec:
        section = Config(config.file, {"rope_parameters": values})
        return RotarySpec.from_config(section, width, context_length, is_whole=True)

    return read(near), read(far)
