"""Settings of a checkpoint's processor, from its three configuration files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common.json_values import Json
from services.tokenizer.text.checkpoint_files import read_json

__all__ = ["ProcessorSettings", "Section", "SettingsError", "read_processor_settings"]

_CONFIG = "config.json"
_PROCESSOR = "processor_config.json"
_IMAGE_PROCESSOR = "preprocessor_config.json"
_NESTED = "image_processor"


class SettingsError(Exception):
    """Settings with which images can't be served. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class Section:
    """A JSON object of a checkpoint. A null counts as an absent key."""

    file: str
    values: Mapping[str, Json]

    def has(self, key: str) -> bool:
        """Return whether the key has a value."""
        return self.values.get(key) is not None

    def section(self, key: str) -> "Section":
        """Return the object at `key`, empty if it is absent. Raises SettingsError for others."""
        value = self.values.get(key)
        if value is None:
            return Section(self.file, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return Section(self.file, value)

    def count(self, key: str, least: int = 1) -> int | None:
        """Return the integer at `key`, None if it is absent. Raises SettingsError for others."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(key, f"an integer of at least {least}")
        return value

    def text(self, key: str, default: str) -> str:
        """Return the string at `key`. Raises SettingsError for others."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean at `key`. Raises SettingsError for others."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def size(self, key: str, *, number_means: str, default: Mapping[str, Json]) -> "Section":
        """Return the size at `key`: an object with "height" and "width", "shortest_edge", ...

        A list is height and width; a number is both if `number_means` is "square", else the key
        that it names.
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
        return Section(self.file, value)

    def _wrong(self, key: str, wanted: str) -> SettingsError:
        return SettingsError(f"{self.file}: {key} must be {wanted}, got {self.values[key]!r}")


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """Everything that decides the tokens of an image."""

    model: Section
    """config.json"""
    processor: Section
    """processor_config.json"""
    images: Section
    """Settings of the image processor"""

    @property
    def architecture(self) -> str:
        """The first of config.json's architectures; "" without any."""
        names = self.model.values.get("architectures")
        first = names[0] if isinstance(names, list) and names else ""
        return first if isinstance(first, str) else ""

    @property
    def vision(self) -> Section:
        """Settings of the vision tower."""
        return self.model.section("vision_config")


def read_processor_settings(directory: Path) -> ProcessorSettings:
    """Read the files, as transformers does: a section of the processor precedes its own file.

    Raises StartupError for files that are not JSON objects.
    """
    processor = Section(_PROCESSOR, read_json(directory / _PROCESSOR))
    images = processor.values.get(_NESTED)
    if isinstance(images, Mapping):
        nested = Section(f"{_PROCESSOR}: {_NESTED}", images)
    else:
        nested = Section(_IMAGE_PROCESSOR, read_json(directory / _IMAGE_PROCESSOR))
    return ProcessorSettings(Section(_CONFIG, read_json(directory / _CONFIG)), processor, nested)
