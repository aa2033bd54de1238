"""tokenizer.json and the files beside it, made from the tokenizer in a GGUF file."""

from collections.abc import Iterator
from dataclasses import replace

from services.common.gguf.gguf_encoders import is_encoder
from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from services.common.json_values import Json
from services.common.tokenizer_files.definition import (
    SPACE,
    PieceKind,
    Pieces,
    TokenizerError,
    byte_level,
    sentencepiece_bpe,
)
from services.common.tokenizer_files.frame import frame
from services.common.tokenizer_files.unigram import Normalization, sentencepiece_unigram
from services.common.tokenizer_files.word_piece import CONTINUATION, word_piece

__all__ = ["chat_templates_of", "tokenizer_config_of", "tokenizer_of"]

_PREFIX = "tokenizer.ggml"
_GEMMA4 = "gemma4"
"""Name of Gemma 4's tokenizer, and of the pre-tokenizer that goes with it"""
_BERT = "bert"
_MODERN_BERT = "modern-bert"
"""Pre-tokenizer of ModernBERT"""
_BERT_UNKNOWN, _BERT_FIRST, _BERT_LAST = 100, 101, 102
"""Ids of llama.cpp for special tokens that a file does not name"""
_ROLES = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "pad": "padding",
    "cls": "cls",
    "sep": "seperator",  # llama.cpp's spelling
    "mask": "mask",
}
"""Special tokens of tokenizer_config.json, and llama.cpp's names of them"""


def tokenizer_of(file: GgufFile) -> dict[str, Json]:
    """Return the content of tokenizer.json. Raises GgufError for a kind that is not supported."""
    kind = file.text(f"{_PREFIX}.model")
    if kind not in _KINDS:
        raise GgufError(
            f"{file.path}: the tokenizer {kind} is not supported. Supported: {', '.join(_KINDS)}."
        )
    try:
        made = _KINDS[kind](file)
        return made if kind == _BERT or not is_encoder(file) else {**made, **_frame(file)}
    except TokenizerError as error:
        raise GgufError(f"{file.path} has a tokenizer that is not read: {error}.") from None


def tokenizer_config_of(file: GgufFile) -> dict[str, Json]:
    """Return the content of tokenizer_config.json."""
    tokens = _tokens(file)
    values: dict[str, Json] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, name in _ROLES.items():
        key = f"{_PREFIX}.{name}_token_id"
        if key in file.metadata and 0 <= (token := file.integer(key)) < len(tokens):
            values[f"{role}_token"] = tokens[token]
    if file.text(f"{_PREFIX}.model") == _BERT or is_encoder(file):  # tokenizer.json frames texts
        return values
    return {**values, "add_bos_token": _adds_bos(file), "add_eos_token": _adds_eos(file)}


def _adds_bos(file: GgufFile) -> bool:
    """Return whether a text begins with BOS."""
    kind = file.text(f"{_PREFIX}.model")
    pre_tokenizer = _pre_tokenizer(file) if _KINDS[kind] is _merged else None
    has_bos = kind == "llama" if pre_tokenizer is None else pre_tokenizer.has_bos
    says_bos = file.flag(f"{_PREFIX}.add_bos_token", has_bos)
    return says_bos or (pre_tokenizer is not None and pre_tokenizer.needs_bos)


def _adds_eos(file: GgufFile) -> bool:
    """Return whether a text ends with EOS."""
    return file.flag(f"{_PREFIX}.add_eos_token", file.text(f"{_PREFIX}.model") == "t5")


def _frame(file: GgufFile) -> dict[str, Json]:
    """Return the post-processor that puts an encoder's special tokens around texts and pairs.

    Raises TokenizerError if the file names none of the tokens that it asks for.
    """
    ends = [_special(file, "eos")] if _adds_eos(file) else []
    between = []
    if _separates(file):
        separator = f"{_PREFIX}.{_ROLES['sep']}_token_id"
        between = [_special(file, "sep" if separator in file.metadata else "eos")]
    first = [_special(file, "bos")] if _adds_bos(file) else []
    return {"post_processor": frame(_tokens(file), first, ends, between=between)}


def _separates(file: GgufFile) -> bool:
    """Return whether SEP goes before the second text of a pair, beside the EOS of the first."""
    pre_tokenizer = None
    if _KINDS[file.text(f"{_PREFIX}.model")] is _merged:
        pre_tokenizer = file.text(f"{_PREFIX}.pre", "default")
    if (
        pre_tokenizer == _MODERN_BERT
    ):  # its converter always says so, and its own tokenizer does not
        return False
    separates = pre_tokenizer is not None and PRE_TOKENIZERS[pre_tokenizer].separates
    return file.flag(f"{_PREFIX}.add_sep_token", separates)


def _special(file: GgufFile, role: str) -> int:
    key = f"{_PREFIX}.{_ROLES[role]}_token_id"
    token = file.integer(key, -1)
    if not 0 <= token < len(_tokens(file)):
        raise TokenizerError(f"it needs a token under {key}")
    return token


def chat_templates_of(file: GgufFile) -> dict[str, str]:
    """Return the chat templates by the names of their files, without the suffix."""
    key = "tokenizer.chat_template"
    named = {
        f"additional_chat_templates/{name}": file.text(f"{key}.{name}")
        for name in file.texts(f"{key}s")
        if name.isidentifier() and f"{key}.{name}" in file.metadata
    }
    default = {"chat_template": file.text(key)} if key in file.metadata else {}
    return {**default, **named}


def _merged(file: GgufFile) -> dict[str, Json]:
    """Return BPE with the merges that the file lists."""
    pre_tokenizer = _pre_tokenizer(file)
    pieces, merges = _pieces(file), _merges(file)
    if not pre_tokenizer.spells_bytes:
        return sentencepiece_bpe(pieces, _unknown_text(file), merges)
    return byte_level(
        pieces.texts,
        merges,
        pre_tokenizer.splits,
        pieces.added,
        composes=pre_tokenizer.composes,
        keeps_words=pre_tokenizer.keeps_words,
    )


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    name = file.text(f"{_PREFIX}.pre", "default")
    if file.text(f"{_PREFIX}.model") == _GEMMA4:
        name = _GEMMA4
    if name not in PRE_TOKENIZERS:
        raise GgufError(
            f"{file.path}: the pre-tokenizer {name} is not supported. Supported: "
            f"{', '.join(PRE_TOKENIZERS)}."
        )
    return PRE_TOKENIZERS[name]


def _merges(file: GgufFile) -> Iterator[tuple[str, str]]:
    key = f"{_PREFIX}.merges"
    if key not in file.metadata:
        raise GgufError(f"{file.path} lacks {key}.")
    for merge in file.texts(key):
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            raise GgufError(f"{file.path}: the merge {merge!r} does not have two parts.")
        yield left, right


def _sentencepiece(file: GgufFile) -> dict[str, Json]:
    if f"{_PREFIX}.scores" not in file.metadata:
        raise GgufError(f"{file.path} lacks {_PREFIX}.scores.")
    return sentencepiece_bpe(_pieces(file), _unknown_text(file))


def _unigram(file: GgufFile) -> dict[str, Json]:
    rules = file.numbers(f"{_PREFIX}.precompiled_charsmap")
    normalization = Normalization(
        bytes(int(each) % 256 for each in rules),
        file.flag(f"{_PREFIX}.remove_extra_whitespaces", False),
    )
    return sentencepiece_unigram(_pieces(file), normalization, _unknown(file))


def _word_piece(file: GgufFile) -> dict[str, Json]:
    pieces = _pieces(file)
    texts = [
        text if kind == PieceKind.CONTROL else _bert_text(text)
        for text, kind in zip(pieces.texts, pieces.kinds, strict=True)
    ]
    first = file.integer(f"{_PREFIX}.cls_token_id", _BERT_FIRST)
    lowers = file.flag(f"{_PREFIX}.normalizer.lowercase", True)
    return word_piece(
        texts,
        replace(pieces, texts=texts).added,
        unknown=file.integer(f"{_PREFIX}.unknown_token_id", _BERT_UNKNOWN),
        first=file.integer(f"{_PREFIX}.bos_token_id", first),
        last=file.integer(f"{_PREFIX}.seperator_token_id", _BERT_LAST),
        lowers=lowers,
        strips_accents=file.flag(f"{_PREFIX}.normalizer.strip_accents", lowers),
    )


def _bert_text(text: str) -> str:
    """Return a token's text in BERT's own form. llama.cpp marks the tokens that begin a word."""
    if text.startswith(SPACE):
        return text.removeprefix(SPACE)
    is_whole = text.startswith("[") and text.endswith("]")  # in files of the first converters
    return text if is_whole else f"{CONTINUATION}{text}"


def _unknown(file: GgufFile) -> int:
    """Return the id of the unknown token, -1 if there is none."""
    kinds = file.numbers(f"{_PREFIX}.token_type")
    default = kinds.index(PieceKind.UNKNOWN) if PieceKind.UNKNOWN in kinds else -1
    return file.integer(f"{_PREFIX}.unknown_token_id", default)


def _unknown_text(file: GgufFile) -> str | None:
    tokens, token = _tokens(file), _unknown(file)
    return tokens[token] if 0 <= token < len(tokens) else None


def _pieces(file: GgufFile) -> Pieces:
    tokens = _tokens(file)
    scores = file.numbers(f"{_PREFIX}.scores") or [0.0] * len(tokens)
    kinds = file.numbers(f"{_PREFIX}.token_type") or [PieceKind.NORMAL] * len(tokens)
    for name, values in (("scores", scores), ("types", kinds)):
        if len(values) != len(tokens):
            raise GgufError(f"{file.path} has {len(tokens)} tokens, but {len(values)} {name}.")
    has_merges = _KINDS[file.text(f"{_PREFIX}.model")] is _merged
    adds_space = file.flag(f"{_PREFIX}.add_space_prefix", not has_merges)
    return Pieces(tokens, scores, [int(kind) for kind in kinds], adds_space)


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.texts(f"{_PREFIX}.tokens")
    if not tokens:
        raise GgufError(f"{file.path} lacks {_PREFIX}.tokens.")
    return tokens


_KINDS = {
    "gpt2": _merged,
    _GEMMA4: _merged,
    "llama": _sentencepiece,
    "t5": _unigram,
    _BERT: _word_piece,
}
"""Reader of each kind of tokenizer, by its name in llama.cpp"""
