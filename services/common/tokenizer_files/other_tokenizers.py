"""Tokenizers in the files of sentencepiece, of Mistral's tekken and of tiktoken."""

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.json_values import Json
from services.common.tokenizer_files.definition import (
    LLAMA3,
    QWEN2,
    AddedToken,
    PieceKind,
    Pieces,
    TokenizerError,
    byte_level,
    byte_texts,
    sentencepiece_bpe,
)
from services.common.tokenizer_files.unigram import Normalization, sentencepiece_unigram

__all__ = ["find_other_tokenizer", "read_other_tokenizer"]

_UNIGRAM, _BPE = 1, 2
"""sentencepiece's numbers of these kinds of models"""
_IDENTITY = "identity"
_COMPOSING = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")
"""sentencepiece's names of normalisations by NFKC"""


def find_other_tokenizer(directory: Path) -> Path | None:
    """Return the file of a tokenizer that is not tokenizer.json; None if there is none."""
    files = (directory / "tekken.json", directory / "tokenizer.model")
    found = [file for file in (*files, *sorted(directory.glob("*.tiktoken"))) if file.is_file()]
    return found[0] if found else None


def read_other_tokenizer(file: Path) -> tuple[dict[str, Json], dict[str, Json]]:
    """Return the contents of tokenizer.json and of tokenizer_config.json.

    The files beside it may name further tokens, and override the configuration. Raises
    TokenizerError.
    """
    config = _beside(file, "tokenizer_config.json")
    further = _further_tokens(file, config)
    if file.name == "tekken.json":
        made, defaults = _tekken(file)
    elif _is_text(file):
        made, defaults = _tiktoken(file, further)
    else:
        made, defaults = _sentencepiece(file)
    _add(made, further)
    return made, {**defaults, **config}


def _sentencepiece(file: Path) -> tuple[dict[str, Json], dict[str, Json]]:
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        model.ParseFromString(file.read_bytes())
    except DecodeError:
        raise TokenizerError("it is damaged, or no model of sentencepiece") from None
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type not in (_UNIGRAM, _BPE):
        raise TokenizerError(
            "it is no BPE and no Unigram, the kinds of sentencepiece that are read"
        )
    pieces = Pieces(
        [piece.piece for piece in model.pieces],
        [piece.score for piece in model.pieces],
        [piece.type or PieceKind.NORMAL for piece in model.pieces],
        normalizer.add_dummy_prefix,
    )
    named = {
        role: pieces.texts[number]
        for role, number in (
            ("bos_token", trainer.bos_id),
            ("eos_token", trainer.eos_id),
            ("unk_token", trainer.unk_id),
            ("pad_token", trainer.pad_id),
        )
        if 0 <= number < len(pieces.texts)
    }
    if trainer.model_type == _UNIGRAM:
        made = sentencepiece_unigram(pieces, _normalization(model), trainer.unk_id)
    elif normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        raise TokenizerError(
            f"it is BPE that normalises texts by {normalizer.name}, and only identity is read"
        )
    else:
        made = sentencepiece_bpe(pieces, named.get("unk_token"))
    return made, {**named, "add_bos_token": "bos_token" in named, "add_eos_token": False}


def _normalization(model: Any) -> Normalization:
    """Return the normalisation of a Unigram model. Raises TokenizerError for custom rules."""
    rules = model.normalizer_spec
    if rules.precompiled_charsmap and rules.name not in _COMPOSING:
        raise TokenizerError(
            f"it normalises texts by {rules.name or 'rules without a name'}. Read are "
            f"{_IDENTITY}, {', '.join(_COMPOSING)}"
        )
    if model.trainer_spec.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        raise TokenizerError("its words have no space before them, the only form that is read")
    return Normalization(rules.precompiled_charsmap, rules.remove_extra_whitespaces)


def _tekken(file: Path) -> tuple[dict[str, Json], dict[str, Json]]:
    """Read Mistral's tekken.json: special tokens come first."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        config = content["config"]
        pattern: str = config["pattern"]
        num_special = int(config["default_num_special_tokens"])
        count = int(config["default_vocab_size"]) - num_special
        ranks = [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"][:count]]
        special = {
            int(entry["rank"]): str(entry["token_str"])
            for entry in content.get("special_tokens") or ()
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TokenizerError(f"it is damaged ({type(error).__name__}: {error})") from None
    if not special:  # versions before v7
        names = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]")
        special = dict(enumerate((*names, *_LATER_TEKKEN)))
    texts = [special.get(i, f"<SPECIAL_{i}>") for i in range(num_special)]
    added = [AddedToken(index, text, special=True) for index, text in enumerate(texts)]
    tokens = [*texts, *byte_texts(ranks)]
    made = byte_level(tokens, _rank_merges(ranks), [pattern], added, keeps_words=True)
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    known: dict[str, Json] = {role: text for role, text in roles.items() if text in texts}
    return made, {**known, "add_bos_token": True, "add_eos_token": False}


_LATER_TEKKEN = (
    *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
    *("[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]"),
)


def _tiktoken(file: Path, further: Sequence[AddedToken]) -> tuple[dict[str, Json], dict[str, Json]]:
    """Read tiktoken's lines, each a token and its rank. The kind of model gives the expression."""
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        pairs = sorted((int(rank), base64.b64decode(token)) for token, rank in lines)
    except (OSError, ValueError, binascii.Error) as error:
        raise TokenizerError(f"it is damaged ({error})") from None
    if [rank for rank, _ in pairs] != list(range(len(pairs))):
        raise TokenizerError("its ranks are not 0 to the number of its tokens")
    if not further:
        raise TokenizerError(
            "it has no special tokens, which added_tokens_decoder in tokenizer_config.json lists"
        )
    ranks = [token for _, token in pairs]
    pattern = QWEN2 if "qwen" in file.name else LLAMA3
    made = byte_level(byte_texts(ranks), _rank_merges(ranks), [pattern], (), keeps_words=True)
    return made, {}


def _rank_merges(ranks: Sequence[bytes]) -> Iterator[tuple[str, str]]:
    """Yield the pairs that make tokens, the token with the lowest rank first."""
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    for token in ranks:
        pairs = [
            (rank_of[left], rank_of[right], left, right)
            for cut in range(1, len(token))
            if (left := token[:cut]) in rank_of and (right := token[cut:]) in rank_of
        ]
        for _, _, left, right in sorted(pairs):
            first, second = byte_texts((left, right))
            yield first, second


def _further_tokens(file: Path, config: Mapping[str, Any]) -> list[AddedToken]:
    """Return the tokens that the files beside the tokenizer add."""
    found = {
        int(number): AddedToken(int(number), str(entry["content"]), bool(entry.get("special")))
        for number, entry in (config.get("added_tokens_decoder") or {}).items()
    }
    for content, number in _beside(file, "added_tokens.json").items():
        found.setdefault(int(number), AddedToken(int(number), content, special=True))
    return [found[number] for number in sorted(found)]


def _add(made: dict[str, Json], further: Iterable[AddedToken]) -> None:
    listed = made["added_tokens"]
    assert isinstance(listed, list)
    known = {entry["id"] for entry in listed if isinstance(entry, dict)}
    for token in further:
        if token.id not in known:
            listed.append(
                {
                    "id": token.id,
                    "content": token.content,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": token.special,
                }
            )


def _beside(file: Path, name: str) -> dict[str, Any]:
    path = file.with_name(name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path.name} beside it can't be read: {error}") from None
    return content if isinstance(content, dict) else {}


def _is_text(file: Path) -> bool:
    """Return whether the file has tiktoken's lines: Meta's tokenizer.model does."""
    first = file.read_bytes()[:4096].partition(b"\n")[0].split()
    return len(first) == 2 and first[1].isdigit()
