"""Factors on single weights that config.json states, such as Falcon-H1's muP multipliers."""

from dataclasses import dataclass

from services.engine.model.architecture.mamba_shape import MambaShape
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.family import Family

__all__ = [
    "WeightFactors",
    "read_value_factor",
    "read_weight_factors",
    "shared_expert_factors",
]


@dataclass(frozen=True, slots=True)
class WeightFactors:
    """Factors on the outputs of one tensor in every layer."""

    name: str
    """Name of the tensor in the layer, with .weight or .bias"""
    factors: tuple[tuple[int, float], ...]
    """Counts of neighbouring outputs and their factor; a single factor is that of all outputs"""


def read_weight_factors(
    config: Config, family: Family, shape: MambaShape
) -> tuple[WeightFactors, ...]:
    """Read the factors other than 1 of the mixers and the feed-forward layers.

    Raises CheckpointError for a missing or mistyped value.
    """
    names = family.names
    assert names.mamba is not None
    if len(names.qkv) == 1:  # a GGUF file, whose weights hold the factors
        return ()
    read = config.number("attention_in_multiplier", 1.0)
    scan_read = config.number("ssm_in_multiplier", 1.0)
    opened, closed = _numbers(config, "mlp_multipliers", 2)
    query, key, value = names.qkv
    gate, _ = names.gate
    widths = (shape.outputs, shape.outputs, shape.factors, shape.factors, shape.heads)
    parts = tuple(zip(widths, _numbers(config, "ssm_multipliers", len(widths)), strict=True))
    outputs = {
        query: ((0, 1.0),),
        key: ((0, config.number("key_multiplier", 1.0)),),
        value: ((0, 1.0),),
        names.output: ((0, config.number("attention_out_multiplier", 1.0)),),
        names.mamba.inputs: parts,
        names.mamba.output: ((0, config.number("ssm_out_multiplier", 1.0)),),
        gate: ((0, opened),),
        names.down: ((0, closed),),
    }
    inputs = {query: read, key: read, value: read, names.mamba.inputs: scan_read}
    found = []
    for name, factors in outputs.items():
        before = inputs.get(name, 1.0)
        weight = tuple((count, factor * before) for count, factor in factors)
        found += [WeightFactors(f"{name}.weight", weight), WeightFactors(f"{name}.bias", factors)]
    return tuple(each for each in found if any(factor != 1 for _, factor in each.factors))


def read_value_factor(config: Config, family: Family) -> tuple[WeightFactors, ...]:
    """Read MiMo's factor of attention's values, if there is one. Raises CheckpointError."""
    if not family.has_mimo_keys:
        return ()
    factor = config.positive_number("attention_value_scale", 1.0)
    if factor == 1:
        return ()
    if len(family.names.qkv) == 1:
        raise CheckpointError(
            f"{config.file}: {family.architecture} with queries, keys and values in one tensor is "
            "not supported."
        )
    *_, value = family.names.qkv
    parts = ("weight", "bias")
    return tuple(WeightFactors(f"{value}.{part}", ((0, factor),)) for part in parts)


def shared_expert_factors(family: Family, factor: float) -> tuple[WeightFactors, ...]:
    """Return the factor on the shared expert's output."""
    assert family.names.experts is not None
    return (WeightFactors(f"{family.names.experts.shared_down}.weight", ((0, factor),)),)


def _numbers(config: Config, key: str, count: int) -> tuple[float, ...]:
    numbers = config.numbers(key) if config.has(key) else (1.0,) * count
    if len(numbers) != count:
        raise CheckpointError(f"{config.file}: {key} must be {count} numbers, got {len(numbers)}.")
    return numbers
