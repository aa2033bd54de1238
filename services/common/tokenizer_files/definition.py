"""Definitions of tokenizers, in the form of tokenizer.json."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from services.common.json_values import Json

__all__ = [
    "CONTRACTIONS",
    "GPT2",
    "GPT4O",
    "LLAMA3",
    "NUMBER",
    "QWEN2",
    "QWEN35",
    "REST",
    "SPACE",
    "TEKKEN",
    "WORDS",
    "AddedToken",
    "PieceKind",
    "Pieces",
    "TokenizerError",
    "byte_level",
    "byte_texts",
    "sentencepiece_bpe",
    "sentencepiece_decoder",
    "tokenizer_definition",
]

SPACE = "▁"
"""Character that stands for a space in the pieces of sentencepiece"""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Parts of the expressions below: contractions, words, and text that is neither word nor number"""
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
NUMBER = r"\p{N}"
"""Expression that takes each digit alone"""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Expressions that cut a text into words, by the model that introduced them"""
LLAMA3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_REST_WITH_SLASH}"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
)


class TokenizerError(Exception):
    """The tokenizer is not supported. The message is a clause about "it", the file."""


class PieceKind(IntEnum):
    """Kinds of sentencepiece's pieces."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in a text before the others."""

    id: int
    content: str
    special: bool
    """True if it steers the model instead of spelling text"""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of a sentencepiece model, by id."""

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    adds_space: bool
    """True if a text gets a space at its beginning"""

    @property
    def added(self) -> list[AddedToken]:
        """Tokens that are found before a text is cut into pieces."""
        whole = (PieceKind.CONTROL, PieceKind.USER_DEFINED, PieceKind.UNKNOWN)
        return [
            AddedToken(index, text, kind != PieceKind.USER_DEFINED)
            for index, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True))
            if kind in whole and text
        ]


def byte_level(
    tokens: Sequence[str],
    merges: Iterable[tuple[str, str]],
    splits: Iterable[str],
    added: Iterable[AddedToken],
    *,
    composes: bool = False,
    keeps_words: bool = False,
) -> dict[str, Json]:
    """Return byte-level BPE as in GPT-2.

    tokens: texts by id, in GPT-2's letters for bytes. splits: expressions that cut a text into
    words. composes: normalise to NFC. keeps_words: a word that is a token needs no merges.
    Raises TokenizerError for a token that occurs twice.
    """
    pieces: list[Json] = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in splits
    ]
    plain: dict[str, Json] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return tokenizer_definition(
        added,
        normalizer={"type": "NFC"} if composes else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*pieces, plain]},
        decoder={**plain, "add_prefix_space": True, "use_regex": True},
        model=_bpe(tokens, merges, ignore_merges=keeps_words),
    )


def sentencepiece_bpe(
    pieces: Pieces, unknown: str | None, merges: Iterable[tuple[str, str]] | None = None
) -> dict[str, Json]:
    """Return BPE as in sentencepiece.

    Bytes of unknown characters are tokens of their own. unknown: the text of the unknown token.
    merges: pairs, the first to merge first; None = the pair with the best score merges first.
    """
    return tokenizer_definition(
        pieces.added,
        normalizer=_normalizer(pieces.adds_space),
        pre_tokenizer=None,
        decoder=sentencepiece_decoder(pieces.adds_space),
        model=_bpe(
            pieces.texts,
            _best_merges(pieces) if merges is None else merges,
            byte_fallback=PieceKind.BYTE in pieces.kinds,
            fuse_unk=True,
            unk_token=unknown,
        ),
    )


def byte_texts(tokens: Iterable[bytes]) -> list[str]:
    """Return tokens in GPT-2's letters, which stand for bytes that are not visible characters."""
    letters = _byte_letters()
    return ["".join(letters[byte] for byte in token) for token in tokens]


def _byte_letters() -> list[str]:
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in visible)
    letters = {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [letters.get(byte, chr(byte)) for byte in range(256)]


def _best_merges(pieces: Pieces) -> Iterator[tuple[str, str]]:
    """Yield the pairs that make pieces, best piece first."""
    order = {text: place for place, text in enumerate(pieces.texts)}
    pairs = [
        (-score, order[left], order[right], left, right)
        for text, score in zip(pieces.texts, pieces.scores, strict=True)
        for cut in range(1, len(text))
        if (left := text[:cut]) in order and (right := text[cut:]) in order
    ]
    pairs.sort()
    for *_, left, right in pairs:
        yield left, right


def _normalizer(adds_space: bool) -> Json:
    prefix: list[Json] = [{"type": "Prepend", "prepend": SPACE}] if adds_space else []
    spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return {"type": "Sequence", "normalizers": [*prefix, spaces]}


def sentencepiece_decoder(adds_space: bool) -> Json:
    """Return the decoder that makes text of sentencepiece's pieces and bytes."""
    spaces: Json = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    decoders: list[Json] = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return {"type": "Sequence", "decoders": [*decoders, *(strip if adds_space else [])]}


def _bpe(
    tokens: Sequence[str],
    merges: Iterable[tuple[str, str]],
    *,
    byte_fallback: bool = False,
    fuse_unk: bool = False,
    ignore_merges: bool = False,
    unk_token: str | None = None,
) -> dict[str, Json]:
    vocabulary: dict[str, Json] = {}
    for index, token in enumerate(tokens):
        if vocabulary.setdefault(token, index) != index:
            raise TokenizerError(f"it has the token {token!r} twice")
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": [[left, right] for left, right in merges],
    }


def tokenizer_definition(
    added: Iterable[AddedToken],
    *,
    normalizer: Json,
    pre_tokenizer: Json,
    decoder: Json,
    model: Json,
) -> dict[str, Json]:
    """Return the content of tokenizer.json."""
    tokens: list[Json] = [
        {
            "id": token.id,
            "content": token.content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token.special,
        }
        for token in added
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
