"""Scaling of RoPE that a GGUF file describes, as rope_scaling of config.json."""

from services.common.gguf.gguf_file import GgufFile
from services.common.json_values import Json

__all__ = ["read_rope_scaling"]


_YARN = {
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Keys of YaRN, and their names in config.json"""


def read_rope_scaling(file: GgufFile) -> dict[str, Json]:
    """Return the scaling of the layers without a window."""
    prefix = file.own("rope.scaling")
    context = file.count(file.own("context_length"))
    original = file.count(f"{prefix}.original_context_length", context)
    long = file.floats("rope_factors_long.weight")
    short = file.floats("rope_factors_short.weight")
    if long is not None and short is not None:
        scaling: dict[str, Json] = {
            "rope_type": "longrope",
            "long_factor": [*long],
            "short_factor": [*short],
            "original_max_position_embeddings": original,
        }
        if f"{prefix}.attn_factor" in file.metadata:
            scaling["attention_factor"] = file.number(f"{prefix}.attn_factor")
        return scaling
    divisors = file.floats("rope_freqs.weight")
    if divisors is not None:  # Llama 3.1's scaling, computed
        return {
            "rope_type": "longrope",
            "long_factor": [*divisors],
            "short_factor": [*divisors],
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    kind = file.text(f"{prefix}.type", "none")
    if kind == "none":
        return {"rope_type": "default"}
    scaling = {
        "rope_type": kind,
        "factor": file.positive(f"{prefix}.factor"),
        "original_max_position_embeddings": original,
    }
    if kind == "yarn":
        scaling |= _read_yarn(file, prefix)
    return scaling


def _read_yarn(file: GgufFile, prefix: str) -> dict[str, Json]:
    found: dict[str, Json] = {
        ours: file.positive(f"{prefix}.{theirs}")
        for theirs, ours in _YARN.items()
        if f"{prefix}.{theirs}" in file.metadata
    }
    if weight := file.number(f"{prefix}.yarn_log_multiplier", 0.0):
        found |= {"mscale": 1.0, "mscale_all_dim": weight}
    if growth := file.number(file.own("attention.temperature_scale"), 0.0):
        found["llama_4_scaling_beta"] = growth
    return found
