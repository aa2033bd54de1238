"""Upper bound of the text that one token stands for.

With it, a text that is too long is refused before it is encoded. The bound is derived from a
tokenizer.json, whose parts are those of Hugging Face's `tokenizers`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenizers import pre_tokenizers

__all__ = ["bytes_per_token"]

_MAX_CHARACTER_BYTES = 4  # bytes of a character in UTF-8
_UNBOUNDED_FACTOR = 8
_SHRINKING: Mapping[str, int] = {  # largest factor by which a normalizer shortens a text
    "ByteLevel": 1, "Lowercase": 3, "NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Prepend": 1,
}  # fmt: skip
_KEEPING = frozenset({  # pre-tokenizers that drop text only if they are configured to
    "ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts",
})  # fmt: skip
_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def bytes_per_token(definition: Mapping[str, Any], normalize: Callable[[str], str]) -> int:
    """Return the most bytes of UTF-8 that a token stands for.

    A token stands for the text of its vocabulary entry, times the factor by which normalizers
    shorten. There is no bound if whitespace is stripped, characters are dropped, or a run of
    unknown characters becomes one token. Then the result is `_UNBOUNDED_FACTOR` times as large;
    only a text that consists of little else exceeds it.
    """
    model = definition["model"]
    vocabulary = model["vocab"]
    names = [entry if isinstance(entry, str) else entry[0] for entry in vocabulary]
    added = definition.get("added_tokens") or ()
    normalizers = list(_steps(definition.get("normalizer")))
    splitters = list(_steps(definition.get("pre_tokenizer")))
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *splitters))
    # in a byte-level vocabulary, each character of an entry is a byte
    lengths = [len(name) if is_byte_level else len(name.encode()) for name in names]
    # added tokens are found in the text itself, or in the normalized text
    spelled = [token["content"] for token in added]
    lengths += [len(text.encode()) for text in (*spelled, *map(normalize, spelled))]
    most = max(lengths, default=_MAX_CHARACTER_BYTES)
    is_bounded = (
        _spells_everything(model, frozenset(names), is_byte_level)
        and all(map(_keeps_all, splitters))
        and not any(token.get("lstrip") or token.get("rstrip") for token in added)
    )
    for step in normalizers:
        shrinking = _shrinking(step)
        is_bounded = is_bounded and shrinking > 0
        most *= max(1, shrinking)
    return most if is_bounded else most * _UNBOUNDED_FACTOR


def _steps(part: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    """Yield the steps of nested sequences, or the single step."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for key in ("normalizers", "pretokenizers"):
        for inner in part.get(key, ()):
            yield from _steps(inner)


def _spells_everything(
    model: Mapping[str, Any], names: frozenset[str], is_byte_level: bool
) -> bool:
    """Return whether no run of characters is dropped or becomes one unknown token."""
    is_bpe = "merges" in model
    if not is_bpe and model.get("type") != "Unigram":
        return False  # whole words become unknown tokens
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if is_byte_level:
        return names >= _ALPHABET
    if model.get("byte_fallback") and names >= _BYTES:
        return True
    return is_bpe and model.get("unk_token") is not None and not model.get("fuse_unk")


def _keeps_all(step: Mapping[str, Any]) -> bool:
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"


def _shrinking(step: Mapping[str, Any]) -> int:
    """Return the largest factor by which a normalizer shortens a text; 0 = unbounded."""
    if step["type"] == "Replace":
        pattern, content = step["pattern"].get("String", ""), step["content"]
        if not pattern or not content:
            return 0
        return max(1, -(-len(pattern.encode()) // len(content.encode())))
    return _SHRINKING.get(step["type"], 0)
