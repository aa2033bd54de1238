"""Objects in the JSON files of a checkpoint, with errors that name the file and the key."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.json_values import Json
from services.common.settings import StartupError
from services.tokenizer.text.checkpoint_files import read_json

__all__ = ["Section", "SettingsError"]


class SettingsError(StartupError):
    """A value of a checkpoint's settings can't be used. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class Section:
    """A JSON object of a checkpoint. A null counts as an absent key."""

    file: str
    values: Mapping[str, Json]
    prefix: str = ""
    """Key of the object in its file, with a dot behind it; empty = the whole file"""

    @classmethod
    def of_file(cls, path: Path) -> "Section":
        """Read a file; the section is empty if it does not exist. Raises StartupError."""
        return cls(str(path), read_json(path))

    def has(self, key: str) -> bool:
        """Return whether the key has a value."""
        return self.values.get(key) is not None

    def section(self, key: str) -> "Section":
        """Return the object at `key`, empty if absent. Raises SettingsError for other values."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return Section(self.file, value, f"{self.prefix}{key}.")

    def count(self, key: str, least: int = 1) -> int | None:
        """Return the integer at `key`, None if absent. Raises SettingsError for other values."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(key, f"an integer of at least {least}")
        return value

    def text(self, key: str, default: str) -> str:
        """Return the string at `key`. Raises SettingsError for other values."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean at `key`. Raises SettingsError for other values."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def size(self, key: str, *, number_means: str, default: Mapping[str, Json]) -> "Section":
        """Return the size at `key`: an object with "height" and "width", "shortest_edge", ...

        A list is height and width. A number is both if `number_means` is "square"; otherwise
        `number_means` is the key that the number belongs to.
        """
        value = self.values.get(key)
        if value is None:
            value = default
        elif isinstance(value, int):
            square = number_means == "square"
            value = {"height": value, "width": value} if square else {number_means: value}
        elif isinstance(value, list) and len(value) == 2:
            value = {"height": value[0], "width": value[1]}
        if not isinstance(value, Mapping):
            raise self._wrong(key, "a size")
        return Section(self.file, value, f"{self.prefix}{key}.")

    def texts(self, key: str, default: Sequence[str]) -> Sequence[str]:
        """Return the list of strings at `key`. Raises SettingsError for other values."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(key, "a list of strings")
        return [str(each) for each in value]

    def error(self, key: str, what: str) -> SettingsError:
        """Return an error: the file, the key, and what is wrong with its value."""
        return SettingsError(f"{self.file}: {self.prefix}{key} {what}.")

    def _wrong(self, key: str, wanted: str) -> SettingsError:
        return self.error(key, f"must be {wanted}, got {self.values[key]!r}")
