"""config.json of Gemma 4's assistants. Free of torch."""

from dataclasses import dataclass

from services.common.json_values import Json
from services.common.model_files.draft_heads import is_assistant_name
from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["Clusters", "assistant_clusters", "assistant_text", "assistant_width", "is_assistant"]


@dataclass(frozen=True, slots=True)
class Clusters:
    """Clusters into which an assistant divides the ids."""

    count: int
    chosen: int
    """Number of the likeliest clusters, of whose ids alone the logits are computed"""


def is_assistant(config: Config) -> bool:
    """Return whether a config.json describes an assistant of Gemma 4."""
    names = config.values.get("architectures")
    return isinstance(names, list) and any(is_assistant_name(str(name)) for name in names)


def assistant_text(config: Config) -> dict[str, Json]:
    """Return the config.json of a Gemma 4 with the assistant's layers.

    Its layers count as layers with keys of their own.
    """
    dtype = config.values.get("dtype") or config.values.get("torch_dtype") or "float32"
    return {
        "dtype": dtype,
        **config.section("text_config").values,
        "architectures": [_text_architecture(config)],
        "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "tie_word_embeddings": True,
    }


def assistant_width(config: Config) -> int:
    """Return the width of the hidden states that an assistant reads."""
    return config.positive("backbone_hidden_size", 3840 if _is_unified(config) else 1536)


def assistant_clusters(config: Config, vocab_size: int) -> Clusters | None:
    """Return the clusters of the ids; None if the logits of all ids are computed.

    Raises CheckpointError for clusters that do not divide the ids.
    """
    if not config.flag("use_ordered_embeddings", False):
        return None
    count = config.positive("num_centroids", 2048)
    chosen = config.positive("centroid_intermediate_top_k", 32)
    if vocab_size % count or chosen > count:
        raise CheckpointError(
            f"{config.file}: {count} clusters, of which {chosen} are chosen, do not divide "
            f"{vocab_size} ids."
        )
    return Clusters(count, chosen)


def _text_architecture(config: Config) -> str:
    return "Gemma4UnifiedForCausalLM" if _is_unified(config) else "Gemma4ForCausalLM"


def _is_unified(config: Config) -> bool:
    return any(name.startswith("Gemma4Unified") for name in config.texts("architectures"))
