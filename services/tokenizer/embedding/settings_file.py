"""Settings of a checkpoint, with errors that name their file and their key."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.settings import StartupError
from services.tokenizer.text.checkpoint_files import read_json

__all__ = ["SettingsFile"]


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The object of a JSON file, or one within it. A key with null counts as absent."""

    path: Path
    values: Mapping[str, Any]
    section_name: str = ""
    """Key of the object in the file, with a dot behind it; empty = the whole file"""

    @classmethod
    def read(cls, path: Path) -> "SettingsFile":
        """Read a file; one that does not exist is empty. Raises StartupError."""
        return cls(path, read_json(path))

    def holds(self, key: str) -> bool:
        """Return whether the file names the key, even if with null."""
        return key in self.values

    def integer(self, key: str) -> int | None:
        """Return a positive integer. Raises StartupError for another value."""
        value = self.values.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise self.error(key, "must be a positive integer")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false. Raises StartupError for another value."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def text(self, key: str) -> str | None:
        """Return a text. Raises StartupError for another value."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "must be a text")
        return value

    def texts(self, key: str) -> list[str] | None:
        """Return a list of texts. Raises StartupError for another value."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(key, "must be a list of texts")
        return value

    def section(self, key: str) -> "SettingsFile | None":
        """Return an object within this one. Raises StartupError for another value."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return SettingsFile(self.path, value, f"{self.section_name}{key}.")

    def error(self, key: str, what: str) -> StartupError:
        """Return an error: the file, the key, and what is wrong with its value."""
        return StartupError(f"{self.path}: {self.section_name}{key} {what}.")
