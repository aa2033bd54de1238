"""Directory that describes a GGUF file as a checkpoint in Hugging Face form."""

import json
from pathlib import Path

from services.common.gguf.gguf_config import config_of
from services.common.gguf.gguf_encoders import is_encoder
from services.common.gguf.gguf_file import GgufFile
from services.common.gguf.gguf_pooling import modules_of
from services.common.gguf.gguf_tokenizer import (
    chat_templates_of,
    tokenizer_config_of,
    tokenizer_of,
)

__all__ = ["PARTS", "write_checkpoint"]

PARTS = "gguf"
"""Subdirectory of the links to all parts of the file"""


def write_checkpoint(path: Path, directory: Path) -> None:
    """Write config.json, the tokenizer's files, the pooling, and links to all parts of the file.

    Raises GgufError if the file is damaged, or if its model is not supported.
    """
    file = GgufFile(path.absolute())
    contents = {
        "config.json": config_of(file),
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
    links = directory / PARTS
    links.mkdir()
    for part in file.sizes:
        (links / part.name).symlink_to(part)
