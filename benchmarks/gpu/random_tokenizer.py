"""Tokenizers for checkpoints with random weights: a short text for each id of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count, islice, product
from pathlib import Path
from string import ascii_lowercase

__all__ = ["add_tokenizer"]

_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
"""Bytes that stand for themselves in a byte-level tokenizer"""
_SPACE = "Ġ"


def add_tokenizer(checkpoint: Path) -> None:
    """Write a byte-level tokenizer.json beside the weights, unless it is there.

    Its tokens are bytes and then words of two and more letters, with and without a space in front.
    There are no merges, so a text has as many tokens as bytes.
    """
    file = checkpoint / "tokenizer.json"
    if file.exists():
        return
    size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    vocabulary = {text: number for number, text in enumerate(islice(_texts(), size))}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    content: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    file.write_text(json.dumps(content))


def _texts() -> Iterator[str]:
    """Yield texts without end, none of them twice."""
    others = (chr(256 + number) for number in range(256 - len(_PRINTABLE)))
    yield from (*map(chr, _PRINTABLE), *others)
    for length in count(2):
        for letters in product(ascii_lowercase, repeat=length):
            word = "".join(letters)
            yield from (word, _SPACE + word)
