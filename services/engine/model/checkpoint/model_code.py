"""Choice between our own code of an architecture and transformers'. Free of torch."""

import re
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

from services.engine.model.checkpoint.architectures import UnknownArchitectureError, family_of
from services.engine.model.checkpoint.config import CheckpointError, Config
from tokenwire.extras import install_command

__all__ = ["ModelCode", "architecture_in_transformers", "code_of"]

_NAMES = Path("models", "auto", "modeling_auto.py")
"""File of transformers with the names of its models; importing it would import torch"""


class ModelCode(Enum):
    """Code that computes a model; the values are those of --model-code and of the API."""

    NATIVE = "native"
    TRANSFORMERS = "transformers"


def code_of(config: Config, wanted: str) -> ModelCode:
    """Return the code that runs a model. wanted: a value of --model-code.

    Raises CheckpointError for an architecture without such code. Only building a model tells
    whether transformers' code can serve it.
    """
    if wanted == ModelCode.TRANSFORMERS.value:
        architecture_in_transformers(config)
        return ModelCode.TRANSFORMERS
    try:
        family_of(config)
    except UnknownArchitectureError:
        if wanted == ModelCode.NATIVE.value or not config.texts("architectures"):
            raise
    else:
        return ModelCode.NATIVE
    architecture_in_transformers(config)
    return ModelCode.TRANSFORMERS


def architecture_in_transformers(config: Config) -> str:
    """Return the architecture of a config.json that the installed transformers knows.

    Raises CheckpointError if there is none, or transformers is not installed.
    """
    architectures = config.texts("architectures")
    named = ", ".join(architectures) or "none"
    if (folder := _folder()) is None:
        raise CheckpointError(
            f"{config.file}: the architecture {named} would run on transformers' code, which is "
            f"not installed. Install it: {install_command('transformers')}"
        )
    known = (folder / _NAMES).read_text(encoding="utf-8")
    for name in architectures:
        if re.fullmatch(r"\w+", name) and f'"{name}"' in known:
            return name
    code = ""
    if config.has("auto_map"):
        code = " The checkpoint brings code of its own (auto_map), which never runs."
    raise CheckpointError(
        f"{config.file}: the architecture {named} is not supported: neither Tokenwire nor the "
        f"installed transformers has code for it.{code}"
    )


def _folder() -> Path | None:
    """Return the folder of the installed transformers."""
    found = find_spec("transformers")
    return None if found is None or found.origin is None else Path(found.origin).parent
