"""generation_config.json: how a checkpoint's makers have it generate."""

from dataclasses import dataclass
from pathlib import Path

from services.engine.model.checkpoint.config import Config

__all__ = ["GenerationDefaults", "generation_config", "load_generation_defaults"]


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The sampling its makers recommend (generation_config.json); None where it says nothing."""

    temperature: float | None = None
    """0 where do_sample is false"""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def load_generation_defaults(path: str | Path) -> GenerationDefaults:
    """Raises CheckpointError when generation_config.json is there but malformed."""
    config = generation_config(Path(path))

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


def generation_config(directory: Path) -> Config:
    """The file, or an empty one. Raises CheckpointError when it is there but malformed."""
    file = directory / "generation_config.json"
    return Config.read(file) if file.exists() else Config(str(file), {})
