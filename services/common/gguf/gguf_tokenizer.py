"""tokenizer.json and its companions, of the tokenizer in a GGUF file."""

from collections.abc import Iterator, Mapping

from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.json_values import Json
from services.common.tokenizer_files.definition import (
    DEEPSEEK_LLM,
    DEEPSEEK_V3,
    GPT2,
    GPT4O,
    LLAMA3,
    NUMBER,
    QWEN2,
    QWEN35,
    TEKKEN,
    PieceKind,
    Pieces,
    TokenizerError,
    byte_level,
    sentencepiece_bpe,
)

__all__ = ["chat_templates_of", "tokenizer_config_of", "tokenizer_of"]

_PREFIX = "tokenizer.ggml"
_SENTENCEPIECE = ("llama", "gemma4")
"""Tokenizers of sentencepiece's pieces; Gemma 4's file lists their merges"""
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "olmo"), (GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), (LLAMA3,)),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (LLAMA3,)),
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-v3": DEEPSEEK_V3,
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (QWEN2,)),
    "qwen35": (QWEN35,),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (NUMBER, GPT2)),
    "tekken": (TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (GPT4O,)),
}
"""Expressions that cut a text into words, by the name of the pre-tokenizer in llama.cpp"""
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "tekken"}
"""Pre-tokenizers whose words are tokens without merges if the vocabulary has them"""
_COMPOSED = {"qwen2", "deepseek-r1-qwen", "qwen35"}
"""Pre-tokenizers after a normalisation to NFC"""
_WITH_BOS = {"llama-bpe", "llama3", "llama-v3", "tekken"}
"""Pre-tokenizers of models whose prompts begin with BOS, unless the file says otherwise"""


def tokenizer_of(file: GgufFile) -> dict[str, Json]:
    """Return the content of tokenizer.json. Raises GgufError for a kind that is not supported."""
    kind = file.text(f"{_PREFIX}.model")
    if kind not in ("gpt2", *_SENTENCEPIECE):
        raise GgufError(
            f"{file.path}: the tokenizer {kind} is not supported. Supported: gpt2, "
            f"{', '.join(_SENTENCEPIECE)}."
        )
    try:
        return _bytes(file) if kind == "gpt2" else _sentencepiece(file)
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
    is_sentencepiece = file.text(f"{_PREFIX}.model") in _SENTENCEPIECE
    has_bos = is_sentencepiece or file.text(f"{_PREFIX}.pre", "") in _WITH_BOS
    values["add_bos_token"] = file.flag(f"{_PREFIX}.add_bos_token", has_bos)
    values["add_eos_token"] = file.flag(f"{_PREFIX}.add_eos_token", False)
    return values


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


def _bytes(file: GgufFile) -> dict[str, Json]:
    name = file.text(f"{_PREFIX}.pre", "default")
    if name not in _SPLITS:
        raise GgufError(
            f"{file.path}: the pre-tokenizer {name} is not supported. Supported: "
            f"{', '.join(_SPLITS)}."
        )
    pieces = _pieces(file)
    return byte_level(
        pieces.texts,
        _merges(file),
        _SPLITS[name],
        pieces.added,
        composes=name in _COMPOSED,
        keeps_words=name in _WHOLE_WORDS,
    )


def _merges(file: GgufFile) -> Iterator[tuple[str, str]]:
    for merge in file.texts(f"{_PREFIX}.merges"):
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            raise GgufError(f"{file.path}: the merge {merge!r} does not have two parts.")
        yield left, right


def _sentencepiece(file: GgufFile) -> dict[str, Json]:
    key, tokens = f"{_PREFIX}.unknown_token_id", _tokens(file)
    if f"{_PREFIX}.scores" not in file.metadata:
        raise GgufError(f"{file.path} lacks {_PREFIX}.scores.")
    token = file.integer(key) if key in file.metadata else -1
    unknown = tokens[token] if 0 <= token < len(tokens) else None
    has_merges = file.text(f"{_PREFIX}.model") == "gemma4"
    return sentencepiece_bpe(_pieces(file), unknown, _merges(file) if has_merges else None)


def _pieces(file: GgufFile) -> Pieces:
    tokens = _tokens(file)
    scores = file.numbers(f"{_PREFIX}.scores") or [0.0] * len(tokens)
    kinds = file.numbers(f"{_PREFIX}.token_type") or [PieceKind.NORMAL] * len(tokens)
    for name, values in (("scores", scores), ("types", kinds)):
        if len(values) != len(tokens):
            raise GgufError(f"{file.path} has {len(tokens)} tokens, but {len(values)} {name}.")
    adds_space = file.flag(f"{_PREFIX}.add_space_prefix", True)
    return Pieces(tokens, scores, [int(kind) for kind in kinds], adds_space)


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.texts(f"{_PREFIX}.tokens")
    if not tokens:
        raise GgufError(f"{file.path} lacks {_PREFIX}.tokens.")
    return tokens
