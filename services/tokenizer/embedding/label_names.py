"""Names of the labels that a checkpoint sorts texts into."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from services.common.settings import StartupError
from services.tokenizer.text.checkpoint_files import read_json

__all__ = ["LabelNames"]

_FILE = "config.json"


class LabelNames:
    """Names of the labels in a checkpoint's config.json."""

    def __init__(self, directory: Path) -> None:
        """Read `id2label`; a checkpoint without it names no label. Raises StartupError."""
        listed = read_json(directory / _FILE).get("id2label") or {}
        if not isinstance(listed, dict):
            raise StartupError(f"{directory / _FILE}: id2label must be names by index.")
        self._names: Mapping[str, str] = {index: str(name) for index, name in listed.items()}

    def first(self, count: int) -> Sequence[str]:
        """Return the names of `count` labels: LABEL_0, LABEL_1, ... for labels without one."""
        return [self._names.get(str(index), f"LABEL_{index}") for index in range(count)]
