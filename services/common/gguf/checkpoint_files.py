"""Directory that describes a GGUF file as a checkpoint in Hugging Face form."""

import json
from collections.abc import Sequence
from pathlib import Path

from services.common.gguf.gguf_config import MARK, config_of
from services.common.gguf.gguf_encoders import is_encoder
from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.gguf.gguf_image_pair import ImageModel
from services.common.gguf.gguf_images import read_image_model
from services.common.gguf.gguf_pooling import modules_of
from services.common.gguf.gguf_tokenizer import (
    chat_templates_of,
    tokenizer_config_of,
    tokenizer_of,
)
from services.common.json_values import Json

__all__ = ["MMPROJ", "PARTS", "write_checkpoint"]

PARTS = "gguf"
"""Subdirectory of the links to all parts of the file"""
MMPROJ = "mmproj"
"""Subdirectory of the link to the mmproj file, if images are served"""


def write_checkpoint(
    path: Path, directory: Path, mmproj: Sequence[Path] = (), *, needs_mmproj: bool = False
) -> None:
    """Write config.json, the tokenizer's files, the pooling, and links to all parts of the file.

    mmproj: files that may hold the model's vision tower. The key `refused_images` of config.json's
    mark says why none of them is served; with `needs_mmproj`, GgufError says it. Raises GgufError
    if the file is damaged, or if its model is not supported.
    """
    file = GgufFile(path.absolute())
    config = config_of(file)
    contents: dict[str, Json] = {"config.json": config}
    links = {PARTS: [*file.sizes]}
    try:
        images = _image_model(file, config, mmproj) if mmproj else None
    except GgufError as error:
        if needs_mmproj:
            raise
        images = None
        contents["config.json"] = _with_mark(config, "refused_images", str(error))
    if images is not None:
        file = images.text
        links[MMPROJ] = [images.mmproj]
        contents = {
            "config.json": images.config,
            "preprocessor_config.json": images.images,
            "processor_config.json": images.processor,
        }
    contents |= {
        "tokenizer.json": tokenizer_of(file),
        "tokenizer_config.json": tokenizer_config_of(file),
        **(modules_of(file) if is_encoder(file) else {}),
    }
    for name, content in contents.items():
        place = directory / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    for name, template in chat_templates_of(file).items():
        place = directory / f"{name}.jinja"
        place.parent.mkdir(exist_ok=True)
        place.write_text(template, encoding="utf-8")
    for folder, parts in links.items():
        (directory / folder).mkdir()
        for part in parts:
            (directory / folder / part.name).symlink_to(part)


def _image_model(
    file: GgufFile, config: dict[str, Json], mmproj: Sequence[Path]
) -> ImageModel | None:
    """Return the model with the only one of `mmproj` that fits it.

    Raises GgufError if none fits, or if several do.
    """
    found: list[ImageModel] = []
    errors: list[GgufError] = []
    for each in mmproj:
        try:
            found.append(read_image_model(file, config, each))
        except GgufError as error:
            errors.append(error)
    if len(found) > 1:
        names = ", ".join(model.mmproj.name for model in found)
        raise GgufError(
            f"{mmproj[0].parent} holds {len(found)} mmproj files that fit {file.path.name} "
            f"({names}). Name one with --mmproj."
        )
    if not found:
        raise errors[0]
    return found[0]


def _with_mark(config: dict[str, Json], key: str, value: str) -> dict[str, Json]:
    """Return a config whose mark has another key."""
    mark = config[MARK]
    assert isinstance(mark, dict)
    return {**config, MARK: {**mark, key: value}}
