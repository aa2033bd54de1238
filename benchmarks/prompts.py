"""Random prompts, equal for every server that is measured with the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from tokenwire.load.workloads import Workload

__all__ = ["Prompts", "vocabulary_size"]


class Prompts:
    """Prompts for the requests of one measurement.

    The ids exclude both ends of the vocabulary, where special tokens are. With `tokenizer`,
    prompts are texts that encode to the wanted number of ids, for servers that take no ids.
    """

    def __init__(self, vocabulary: int, seed: str, tokenizer: Tokenizer | None = None) -> None:
        self._ids = range(vocabulary // 16, vocabulary - vocabulary // 16)
        self._seed = seed
        self._tokenizer = tokenizer

    def of(self, workload: Workload) -> Iterator[list[int] | str]:
        """Yield prompts without end."""
        rng = random.Random(f"{self._seed} {workload}")
        shared = rng.choices(self._ids, k=workload.shared)
        while True:
            ids = shared + rng.choices(self._ids, k=workload.prompt - workload.shared)
            yield ids if self._tokenizer is None else _text(self._tokenizer, ids)


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return a text of about `len(ids)` tokens that starts like `ids`.

    Decoding and encoding random ids seldom returns the same ids, so the text is cut to length.
    """
    text: str = tokenizer.decode(ids)
    for _ in range(4):
        encoding = tokenizer.encode(text)
        if len(encoding.ids) <= len(ids):
            break
        text = text[: encoding.offsets[len(ids) - 1][1]]
    return text


def vocabulary_size(model: Path) -> int:
    """Return the vocabulary size of a Hugging Face model directory."""
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    assert isinstance(size, int)
    return size
