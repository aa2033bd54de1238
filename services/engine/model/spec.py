"""What a checkpoint's config.json says about its architecture, as one typed value."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from services.engine.model.config import Config, Json
from services.engine.model.errors import CheckpointError
from services.engine.model.rotary import RotarySpec

__all__ = ["FAMILIES", "Family", "ModelSpec", "WindowRule"]


class WindowRule(Enum):
    """Which layers attend over a sliding window only."""

    NONE = "no layer"
    ALL = "every layer, when sliding_window is set"
    LISTED = "those layer_types names, or from max_window_layers on"


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture differs from the plain Llama decoder."""

    architecture: str
    qkv_bias: bool = False
    """Its q, k and v projections always have a bias; else config.json's attention_bias decides."""
    reads_attention_bias: bool = False
    """config.json's attention_bias adds a bias to q, k, v and o"""
    reads_mlp_bias: bool = False
    """config.json's mlp_bias adds a bias to gate, up and down"""
    qk_norm: bool = False
    """Queries and keys pass an RMSNorm over each head before the rotation"""
    windows: WindowRule = WindowRule.NONE


FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", reads_attention_bias=True, reads_mlp_bias=True),
        Family("MistralForCausalLM", windows=WindowRule.ALL),
        Family("Qwen2ForCausalLM", qkv_bias=True, windows=WindowRule.LISTED),
        Family(
            "Qwen3ForCausalLM",
            reads_attention_bias=True,
            qk_norm=True,
            windows=WindowRule.LISTED,
        ),
    )
}
"""The architectures that can be served, by the name config.json gives them."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder's shape. Everything that the forward pass needs to know besides the weights."""

    architecture: str
    vocab_size: int
    """Width of the logits"""
    context_length: int
    """Most tokens a sequence may have"""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    tied_embeddings: bool
    """The output projection is the embedding table"""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    attention_scale: float
    """What query-key products are multiplied by"""
    windows: tuple[int, ...]
    """For each layer, how many of the latest tokens it sees (itself included); 0: all"""
    rotary: RotarySpec
    dtype: str
    """The dtype the weights are stored in, as config.json says: float32, bfloat16 or float16"""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @staticmethod
    def from_config(values: Mapping[str, Json], file: str = "config.json") -> "ModelSpec":
        """Reads the object of a config.json; `file` is its name in errors.

        Raises CheckpointError when the architecture is unknown, a value is missing or of the wrong
        type, or the values contradict one another.
        """
        config = Config(file, dict(values))
        family = _family(config)
        _refuse_what_is_not_built(config)
        hidden_size = config.positive("hidden_size")
        num_heads = config.positive("num_attention_heads")
        num_kv_heads = config.positive("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"{file}: num_attention_heads ({num_heads}) is not a multiple of "
                f"num_key_value_heads ({num_kv_heads})."
            )
        if not config.has("head_dim") and hidden_size % num_heads:
            raise CheckpointError(
                f"{file}: hidden_size ({hidden_size}) is not a multiple of "
                f"num_attention_heads ({num_heads}), and head_dim is not given."
            )
        head_dim = config.positive("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise CheckpointError(f"{file}: head_dim ({head_dim}) is odd, so RoPE cannot apply.")
        num_layers = config.positive("num_hidden_layers")
        context_length = config.positive("max_position_embeddings")
        attention_bias = family.reads_attention_bias and config.flag("attention_bias", False)
        bos_token_ids = config.ids("bos_token_id")
        return ModelSpec(
            architecture=family.architecture,
            vocab_size=config.positive("vocab_size"),
            context_length=context_length,
            hidden_size=hidden_size,
            intermediate_size=config.positive("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_epsilon=config.number("rms_norm_eps", 1e-6),
            tied_embeddings=config.flag("tie_word_embeddings", False),
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family.reads_mlp_bias and config.flag("mlp_bias", False),
            qk_norm=family.qk_norm,
            attention_scale=head_dim**-0.5,
            windows=_windows(config, family.windows, num_layers),
            rotary=RotarySpec.from_config(config, head_dim, context_length),
            dtype=_dtype(config),
            eos_token_ids=config.ids("eos_token_id"),
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        )


def _family(config: Config) -> Family:
    architectures = config.texts("architectures")
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    named = ", ".join(architectures) or "none"
    raise CheckpointError(
        f"{config.file}: the architecture {named} is not supported; these are: "
        f"{', '.join(FAMILIES)}."
    )


def _refuse_what_is_not_built(config: Config) -> None:
    if config.has("quantization_config"):
        method = config.section("quantization_config").text("quant_method", "unnamed")
        raise CheckpointError(
            f"{config.file}: quantization_config ({method}) is not supported; "
            "serve a float32, bfloat16 or float16 checkpoint."
        )
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"{config.file}: hidden_act {activation} is not supported.")


def _windows(config: Config, rule: WindowRule, num_layers: int) -> tuple[int, ...]:
    everywhere = (0,) * num_layers
    if rule is WindowRule.NONE or not config.has("sliding_window"):
        return everywhere
    if rule is WindowRule.ALL:
        return (config.positive("sliding_window"),) * num_layers
    if not config.flag("use_sliding_window", False):
        return everywhere
    window = config.positive("sliding_window")
    if not config.has("layer_types"):
        first = config.integer("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    kinds = config.texts("layer_types")
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"{config.file}: layer_types names {len(kinds)} layers, num_hidden_layers {num_layers}."
        )
    sizes = {"sliding_attention": window, "full_attention": 0}
    for kind in kinds:
        if kind not in sizes:
            raise CheckpointError(f"{config.file}: layer type {kind} is not supported.")
    return tuple(sizes[kind] for kind in kinds)


def _dtype(config: Config) -> str:
    # transformers 5 writes dtype, older releases torch_dtype.
    dtype = config.text("dtype" if config.has("dtype") else "torch_dtype", "float32")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(
            f"{config.file}: dtype {dtype} is not supported; these are: float32, bfloat16, float16."
        )
    return dtype
