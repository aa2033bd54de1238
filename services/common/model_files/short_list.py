"""Models that have a short name, such as `smollm2`: short_list.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["ListedModel", "listed_model", "listed_models"]

_FILE = Path(__file__).with_name("short_list.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A model of the hub that a short name stands for."""

    name: str
    source: str
    """owner/name of the hub, with :QUANTISATION for a repository of GGUF files"""
    purpose: str
    architecture: str
    """Architecture of config.json"""
    parameters: str
    licence: str
    download: int
    """Size of the files in millions of bytes"""
    memory: int
    """Memory of the weights and of 4,096 tokens of context, in millions of bytes"""
    context: int
    """Tokens of prompt and output together"""
    aliases: tuple[str, ...] = ()


@cache
def listed_models() -> tuple[ListedModel, ...]:
    """Return all models that have a short name."""
    rows = tomllib.loads(_FILE.read_text("utf-8"))["models"]
    return tuple(ListedModel(**{**row, "aliases": tuple(row.get("aliases", ()))}) for row in rows)


def listed_model(name: str) -> ListedModel | None:
    """Return the model of a short name, in any case; None = there is none."""
    wanted = name.lower()
    return next((each for each in listed_models() if wanted in (each.name, *each.aliases)), None)
