"""Vision towers of checkpoints: detection of a tower, and the id of the image token."""

import json
import struct
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from services.common.gguf.checkpoint_files import MMPROJ
from services.common.gguf.gguf_config import MARK
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.vision_language import VISION_LANGUAGE, VisionLanguage

__all__ = [
    "PROCESSORS",
    "has_vision",
    "image_token_id",
    "lacks_image_settings",
    "refused_images",
    "unserved_vision",
]

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files that may hold the settings of the image processor"""
_REFUSED = "refused_images"
_MOST_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file, as in the library safetensors"""


def has_vision(directory: Path) -> bool:
    """Return whether the checkpoint holds a vision tower and the settings of its images.

    Return False for a checkpoint that can't be read, too: the loop reports the reason.
    """
    return _holds_tower(directory) and _has_settings(directory)


def lacks_image_settings(directory: Path) -> bool:
    """Return whether only the settings of images are missing, beside a tower that is served."""
    return _holds_tower(directory) and not _has_settings(directory)


def unserved_vision(directory: Path) -> str | None:
    """Return the architecture of a checkpoint that holds a vision tower that is not served.

    Return None if the checkpoint holds no tower, or a tower that `has_vision` finds.
    """
    family, names = _read(directory)
    if family is None or not _holds(names, family.unserved_vision):
        return None
    return family.architecture


def refused_images(directory: Path) -> str | None:
    """Return why the mmproj files beside a GGUF model are not served; None if none is refused."""
    try:
        mark = Config.read(directory / "config.json").section(MARK)
        return mark.text(_REFUSED) if mark.has(_REFUSED) else None
    except CheckpointError:
        return None


def image_token_id(config: Config) -> int:
    """Return the id that stands for one part of an image. Raises CheckpointError."""
    key = "image_token_id" if config.has("image_token_id") else "image_token_index"
    return config.integer(key)


def _holds_tower(directory: Path) -> bool:
    if (directory / MMPROJ).is_dir():
        return True
    family, names = _read(directory)
    return family is not None and _holds(names, family.vision)


def _has_settings(directory: Path) -> bool:
    return any((directory / name).is_file() for name in PROCESSORS)


def _read(directory: Path) -> tuple[VisionLanguage | None, Collection[str]]:
    """Return a checkpoint's architecture and its tensors' names. None for other checkpoints."""
    try:
        config = Config.read(directory / "config.json")
        family = VISION_LANGUAGE.get(next(iter(config.texts("architectures")), ""))
        return family, _tensor_names(directory)
    except (CheckpointError, OSError, ValueError, struct.error):
        return None, ()


def _holds(names: Collection[str], patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _tensor_names(directory: Path) -> Collection[str]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return Config.read(index).section("weight_map").values
    with (directory / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: dict[str, object] = json.loads(file.read(min(size, _MOST_HEADER_BYTES)))
        return header
