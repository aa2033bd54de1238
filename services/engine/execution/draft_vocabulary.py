"""Comparison of the vocabularies of a draft model and of the engine's model."""

import json
from collections.abc import Mapping
from pathlib import Path

__all__ = ["find_difference"]


def find_difference(draft: Path, model: Path, sizes: tuple[int, int]) -> str | None:
    """Return how the vocabularies of two checkpoints differ; None if drafts mean the same.

    draft, model: directories of the checkpoints. sizes: numbers of their ids.

    Ids that only one of the tokenizers has are left out, as are added tokens: models that were
    trained further rename them, and matrices are padded. Where a tokenizer is missing, only the
    sizes are compared.
    """
    mine, theirs = _texts(draft), _texts(model)
    if mine is None or theirs is None:
        return None if sizes[0] == sizes[1] else f"it has {sizes[0]:,} ids, and not {sizes[1]:,}"
    common = mine.keys() & theirs.keys()
    if len(common) < len(theirs) / 2:
        return f"it has {len(mine):,} tokens, and not {len(theirs):,}"
    different = next((token for token in sorted(common) if mine[token] != theirs[token]), None)
    if different is None:
        return None
    return f"id {different} is {mine[different]!r}, and not {theirs[different]!r}"


def _texts(directory: Path) -> Mapping[int, str] | None:
    """Return the text of each id but added ones; None without a tokenizer.json."""
    try:
        tokenizer = json.loads((directory / "tokenizer.json").read_bytes())
    except FileNotFoundError:
        return None
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # of a Unigram model: texts with their scores
        texts = {token: text for token, (text, _) in enumerate(vocabulary)}
    else:
        texts = {token: text for text, token in vocabulary.items()}
    for added in tokenizer.get("added_tokens", ()):
        texts.pop(added["id"], None)
    return texts
