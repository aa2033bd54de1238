"""The purpose of a checkpoint, by its config.json."""

import json
from pathlib import Path

__all__ = ["generates"]

_GENERATORS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def generates(directory: Path) -> bool:
    """Return False for a checkpoint that only makes vectors of texts, such as a BertModel.

    A directory without a readable config.json counts as generating: loading it raises the reason.
    """
    try:
        architectures = json.loads((directory / "config.json").read_bytes())["architectures"]
        return any(str(name).endswith(_GENERATORS) for name in architectures)
    except (OSError, ValueError, KeyError, TypeError):
        return True
