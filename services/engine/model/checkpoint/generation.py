"""Sampling defaults from a checkpoint's generation_config.json."""

from pathlib import Path

from services.engine.model.checkpoint.config import Config
from services.engine.model_description import GenerationDefaults, SuppressedIds

__all__ = ["generation_config", "load_generation_defaults", "load_suppressed_ids"]


def load_generation_defaults(directory: Path) -> GenerationDefaults:
    """Read the defaults. Raises CheckpointError if generation_config.json is malformed."""
    config = generation_config(directory)

    def number(key: str) -> float | None:
        return config.number(key) if config.has(key) else None

    greedy = config.has("do_sample") and not config.flag("do_sample", True)
    return GenerationDefaults(
        temperature=0.0 if greedy else number("temperature"),
        top_p=number("top_p"),
        top_k=config.integer("top_k") if config.has("top_k") else None,
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )


def load_suppressed_ids(directory: Path, vocab_size: int) -> SuppressedIds:
    """Read the ids that are excluded from answers. Ids outside the vocabulary are left out.

    They stand in generation_config.json, else in config.json. Raises CheckpointError if one of
    these is malformed.
    """
    configs = generation_config(directory), Config.read(directory / "config.json")

    def ids(key: str) -> tuple[int, ...]:
        found = next((each.ids(key) for each in configs if each.has(key)), ())
        return tuple(sorted({token for token in found if 0 <= token < vocab_size}))

    return SuppressedIds(ids("suppress_tokens"), ids("begin_suppress_tokens"))


def generation_config(directory: Path) -> Config:
    """Return generation_config.json, empty if absent. Raises CheckpointError if malformed."""
    file = directory / "generation_config.json"
    return Config.read(file) if file.exists() else Config(str(file), {})
