"""Settings of a checkpoint's processor, from its three configuration files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.tokenizer.text.checkpoint_files import read_json
from services.tokenizer.text.section import Section

__all__ = ["ProcessorSettings", "read_processor_settings"]

_CONFIG = "config.json"
_PROCESSOR = "processor_config.json"
_IMAGE_PROCESSOR = "preprocessor_config.json"
_NESTED = "image_processor"


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """Everything that decides the tokens of an image."""

    model: Section
    """Content of config.json"""
    processor: Section
    """Content of processor_config.json"""
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
