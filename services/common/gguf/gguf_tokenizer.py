"""tokenizer.json and its companions, of the tokenizer in a GGUF file."""

from collections.abc import Iterator, Mapping
from enum import IntEnum

from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.json_values import Json

__all__ = ["chat_templates_of", "tokenizer_config_of", "tokenizer_of"]

_PREFIX = "tokenizer.ggml"
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPACE = "▁"
"""Stands for a space in the tokens of sentencepiece"""


class _Kind(IntEnum):
    """Types of tokens, as sentencepiece has them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_REST_WITH_SLASH}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
)
_DIGITS = r"\p{N}"
_SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "olmo"), (_GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (_DIGITS, _GPT2)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
}
"""Expressions that cut a text into words, by the name of the pre-tokenizer in llama.cpp"""
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "tekken"}
"""Pre-tokenizers whose words are tokens without merges if the vocabulary has them"""
_COMPOSED = {"qwen2", "deepseek-r1-qwen"}
"""Pre-tokenizers after a normalisation to NFC"""
_WITH_BOS = {"llama-bpe", "llama3", "llama-v3", "tekken"}
"""Pre-tokenizers of models whose prompts begin with BOS, unless the file says otherwise"""


def tokenizer_of(file: GgufFile) -> dict[str, Json]:
    """Return the content of tokenizer.json. Raises GgufError for a kind that is not supported."""
    kind = file.text(f"{_PREFIX}.model")
    if kind == "gpt2":
        return _bytes(file)
    if kind == "llama":
        return _sentencepiece(file)
    raise GgufError(
        f"{file.path}: the tokenizer {kind} is not supported. Supported: gpt2 and llama."
    )


def tokenizer_config_of(file: GgufFile) -> dict[str, Json]:
    """Return the content of tokenizer_config.json."""
    tokens = _tokens(file)
    values: dict[str, Json] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, name in _ROLES.items():
        key = f"{_PREFIX}.{name}_token_id"
        if key in file.metadata and 0 <= (token := file.integer(key)) < len(tokens):
            values[f"{role}_token"] = tokens[token]
    is_sentencepiece = file.text(f"{_PREFIX}.model") == "llama"
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
    """Byte-level BPE, as of GPT-2."""
    name = file.text(f"{_PREFIX}.pre", "default")
    if name not in _SPLITS:
        raise GgufError(
            f"{file.path}: the pre-tokenizer {name} is not supported. Supported: "
            f"{', '.join(_SPLITS)}."
        )
    splits: list[Json] = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in _SPLITS[name]
    ]
    plain: dict[str, Json] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    merges = file.texts(f"{_PREFIX}.merges")
    pairs: list[Json] = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            raise GgufError(f"{file.path}: the merge {merge!r} does not have two parts.")
        pairs.append([left, right])
    return _tokenizer(
        file,
        normalizer={"type": "NFC"} if name in _COMPOSED else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, plain]},
        decoder={**plain, "add_prefix_space": True, "use_regex": True},
        merges=pairs,
        ignore_merges=name in _WHOLE_WORDS,
    )


def _sentencepiece(file: GgufFile) -> dict[str, Json]:
    """BPE of sentencepiece: bytes of unknown characters are tokens of their own."""
    prepends = file.flag(f"{_PREFIX}.add_space_prefix", True)
    spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back: Json = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    prefix: list[Json] = [{"type": "Prepend", "prepend": _SPACE}] if prepends else []
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    decoders: list[Json] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return _tokenizer(
        file,
        normalizer={"type": "Sequence", "normalizers": [*prefix, spaces]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": [*decoders, *(strip if prepends else [])]},
        merges=[[left, right] for left, right in _merges(file)],
        byte_fallback=True,
        fuse_unk=True,
        unk_token=_unknown(file),
    )


def _merges(file: GgufFile) -> Iterator[tuple[str, str]]:
    """Yield the pairs that make tokens, best token first, as sentencepiece merges them."""
    tokens, scores = _tokens(file), file.numbers(f"{_PREFIX}.scores")
    if len(scores) != len(tokens):
        raise GgufError(f"{file.path} has {len(tokens)} tokens, but {len(scores)} scores.")
    score_of = dict(zip(tokens, scores, strict=True))
    order = {token: place for place, token in enumerate(tokens)}
    pairs = [
        (-score, order[left], order[right], left, right)
        for token, score in score_of.items()
        for cut in range(1, len(token))
        if (left := token[:cut]) in score_of and (right := token[cut:]) in score_of
    ]
    pairs.sort()
    for *_, left, right in pairs:
        yield left, right


def _unknown(file: GgufFile) -> str | None:
    key, tokens = f"{_PREFIX}.unknown_token_id", _tokens(file)
    if key not in file.metadata:
        return None
    token = file.integer(key)
    return tokens[token] if 0 <= token < len(tokens) else None


def _tokenizer(
    file: GgufFile,
    *,
    normalizer: Json,
    pre_tokenizer: Json,
    decoder: Json,
    merges: list[Json],
    byte_fallback: bool = False,
    fuse_unk: bool = False,
    ignore_merges: bool = False,
    unk_token: str | None = None,
) -> dict[str, Json]:
    tokens = _tokens(file)
    kinds = file.numbers(f"{_PREFIX}.token_type") or [_Kind.NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise GgufError(f"{file.path} has {len(tokens)} tokens, but {len(kinds)} types.")
    vocabulary: dict[str, Json] = {}
    for index, token in enumerate(tokens):
        if vocabulary.setdefault(token, index) != index:
            raise GgufError(f"{file.path} has the token {token!r} twice.")
    added: list[Json] = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _Kind.USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_Kind.CONTROL, _Kind.USER_DEFINED, _Kind.UNKNOWN) and token
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unk_token,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": fuse_unk,
            "byte_fallback": byte_fallback,
            "ignore_merges": ignore_merges,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.texts(f"{_PREFIX}.tokens")
    if not tokens:
        raise GgufError(f"{file.path} lacks {_PREFIX}.tokens.")
    return tokens
