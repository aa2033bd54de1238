"""Token ids that the text's table does not embed: Gemma 3n's marks of images and sounds."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.engine.model.checkpoint.config import CheckpointError, Config, JsonObject

__all__ = ["ModalTokens", "read_modal_tokens"]

_DEFAULTS: Mapping[str, JsonObject] = {
    "vision": {"vocab_offset": 262144, "vocab_size": 128, "hidden_size": 2048},
    "audio": {"vocab_offset": 262272, "vocab_size": 128, "hidden_size": 1536},
}
"""transformers' values of each modality's section, in the order of the ids"""


@dataclass(frozen=True, slots=True)
class ModalTokens:
    """Consecutive ids of one modality, and the table that embeds them."""

    module: str
    """Full name of the module that holds the table"""
    first: int
    """The first id"""
    count: int
    """Number of ids in the vocabulary, at most `rows`"""
    rows: int
    """Number of rows of the table"""
    width: int
    """Width of the table"""
    epsilon: float


def read_modal_tokens(config: Config) -> tuple[ModalTokens, ...]:
    """Return the ids of each modality that are in the vocabulary.

    Raises CheckpointError for a missing or mistyped value, and for a table that is too short.
    """
    sections = {
        name: Config(config.file, {**defaults, **config.section(f"{name}_config").values})
        for name, defaults in _DEFAULTS.items()
    }
    firsts = [section.integer("vocab_offset") for section in sections.values()]
    ends = [*firsts[1:], config.positive("vocab_size")]
    found = []
    for (name, section), first, end in zip(sections.items(), firsts, ends, strict=True):
        count, rows = min(end, ends[-1]) - first, section.positive("vocab_size")
        if count > rows:
            raise CheckpointError(
                f"{config.file}: {name}_config's vocab_size must be at least {count}, got {rows}."
            )
        if count > 0:
            width = section.positive("hidden_size")
            epsilon = section.positive_number("rms_norm_eps", 1e-6)
            found.append(ModalTokens(f"model.embed_{name}", first, count, rows, width, epsilon))
    return tuple(found)
