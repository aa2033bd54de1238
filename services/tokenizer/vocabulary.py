"""The checkpoint's tokenizer: text to ids and back, its special ids, its identity."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from services.common.settings import StartupError
from services.tokenizer.detokenizer import Detokenizer, UnsupportedDecoderError, token_table
from services.tokenizer.infill import infill_control_tokens

__all__ = ["TextEncoding", "Vocabulary"]

_CONTROL_SHAPE = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_MARKER = "☺"  # the sign that Meta's and Mistral's own infill code puts before a suffix
_NEVER = -1e9  # a Unigram score that no segmentation can afford


@dataclass(frozen=True, slots=True)
class TextEncoding:
    """Ids of a text, and the code points [starts[i], ends[i]) that token i came from."""

    ids: Sequence[int]
    tokens: Sequence[str]
    starts: Sequence[int]
    ends: Sequence[int]
    is_added: Sequence[bool]
    """Whether the tokenizer added the token itself (a BOS, say)."""


class Vocabulary:
    """A tokenizer.json with what its neighbours say about it. Safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        """Raises StartupError when the directory holds no tokenizer that can be served."""
        text = _read(directory / "tokenizer.json")
        if text is None:
            raise StartupError(f"{directory} has no tokenizer.json.")
        config = _read_json(directory / "tokenizer_config.json")
        special_map = _read_json(directory / "special_tokens_map.json")
        model_config = _read_json(directory / "config.json")
        try:
            definition: dict[str, Any] = json.loads(text)
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise StartupError(f"{directory / 'tokenizer.json'} can't be read: {error}.") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

        self.ids: Mapping[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.model_vocabulary_size = int(model_config.get("vocab_size") or 0)
        self.size = max(max(self.ids.values()) + 1, self.model_vocabulary_size)
        self._names: Mapping[int, str] = {index: token for token, index in self.ids.items()}
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens: Mapping[int, str] = {
            index: token.content for index, token in sorted(added.items()) if token.special
        }

        def special_id(name: str) -> int | None:
            value = config.get(name) or special_map.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            return self.ids.get(content) if content else None

        self.bos_id = special_id("bos_token")
        self.eos_id = special_id("eos_token")
        self.pad_id = special_id("pad_token")
        self.unk_id = special_id("unk_token")
        self._settle_added_tokens(config)
        empty = self._tokenizer.encode("", add_special_tokens=True).ids
        self.adds_bos = self.bos_id is not None and empty[:1] == [self.bos_id]

        self.chat_template = _chat_template(directory, config)
        self.context_length = int(model_config.get("max_position_embeddings") or 0)
        self._plain = _without_control_tokens(definition, self._control_tokens(added.values()))
        self._adds_space = self.encode_plain("a") != self._after_marker("a")
        try:
            decoder = definition.get("decoder")
            self.table = token_table(self.ids, decoder, self.size, self.special_tokens)
            self.full_table = token_table(self.ids, decoder, self.size, ())
        except UnsupportedDecoderError as error:
            raise StartupError(
                f"{directory / 'tokenizer.json'} is not supported: {error}."
            ) from None
        self.fingerprint = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
        self.configuration_hash = hashlib.sha256(
            json.dumps(model_config, sort_keys=True).encode()
        ).hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text: special tokens are parsed, the tokenizer's own (BOS) added if asked."""
        ids: list[int] = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )[0].ids
        return ids

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool = True) -> TextEncoding:
        """As `encode`, with offsets. Special tokens in the text are parsed either way."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        offsets: list[tuple[int, int]] = encoding.offsets
        # the mask also marks special tokens that stand in the text; those have a width
        is_added = [
            bool(special) and start == end
            for special, (start, end) in zip(encoding.special_tokens_mask, offsets, strict=True)
        ]
        return TextEncoding(
            ids=encoding.ids,
            tokens=[self._names.get(token, "") for token in encoding.ids],
            starts=[start for start, _ in offsets],
            ends=[end for _, end in offsets],
            is_added=is_added,
        )

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a user's part: nothing is added, and no control token is parsed."""
        ids: list[int] = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """As `encode_plain`, without the space that some tokenizers put before a text."""
        return self._after_marker(text) if text and self._adds_space else self.encode_plain(text)

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, flush: bool = True
    ) -> list[str]:
        """What each id adds to the text. Unless `flush` is false, bytes of a character that is
        unfinished at the end become U+FFFD."""
        table = self.table if skip_special_tokens else self.full_table
        detokenizer = Detokenizer(table)
        texts = [detokenizer.feed(token) for token in ids]
        if flush and (rest := detokenizer.flush()):
            last = max(place for place, token in enumerate(ids) if table.pieces[token])
            texts[last] += rest
        return texts

    # there is one vocabulary for the life of the process
    @lru_cache(maxsize=64)  # noqa: B019
    def ids_containing(self, strings: tuple[str, ...]) -> tuple[int, ...]:
        """The ids that the model knows whose text contains one of the strings."""
        wanted = [string.encode() for string in strings]
        return tuple(
            index
            for index, piece in enumerate(self.table.pieces[: self.model_vocabulary_size or None])
            if piece and any(string in piece for string in wanted)
        )

    def _after_marker(self, text: str) -> list[int]:
        marker = self.encode_plain(_MARKER)
        ids = self.encode_plain(_MARKER + text)
        if ids[: len(marker)] != marker:
            return self.encode_plain(text)
        return ids[len(marker) :]

    def _settle_added_tokens(self, config: Mapping[str, Any]) -> None:
        """What the configuration says outright about BOS and EOS wins over tokenizer.json, as in
        transformers."""
        wants = {name: config.get(f"add_{name}_token") for name in ("bos", "eos")}
        if wants == {"bos": None, "eos": None}:
            return
        roles = {"bos": self.bos_id, "eos": self.eos_id}
        tokens = {
            name: (self._names[token], token)
            for name, token in roles.items()
            if wants[name] and token is not None
        }
        before = [tokens["bos"][0]] if "bos" in tokens else []
        after = [tokens["eos"][0]] if "eos" in tokens else []
        self._tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, "$B"],
            special_tokens=list(dict.fromkeys(tokens.values())),
        )

    def _control_tokens(self, added: Iterable[Any]) -> frozenset[str]:
        """Added tokens that steer the model rather than spell text: those marked special, those of
        the infill families, and those that the chat template writes."""
        infill = infill_control_tokens()
        return frozenset(
            token.content
            for token in added
            if token.special
            or token.content in infill
            or _CONTROL_SHAPE.fullmatch(token.content)
            or (token.content.strip() and token.content in self.chat_template)
        )


def _without_control_tokens(definition: Mapping[str, Any], control: frozenset[str]) -> Tokenizer:
    """A tokenizer with the same ids that can't produce a control token from text."""
    added = [
        token for token in definition.get("added_tokens", ()) if token["content"] not in control
    ]
    # an added token gets the next free id, whatever the file says, unless the model knows it
    ids = {token["content"]: token["id"] for token in added}
    model = dict(definition["model"])
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        merged = {_merged(merge) for merge in model.get("merges", ())}
        model["vocab"] = {
            token: index
            for token, index in vocabulary.items()
            if token not in control or token in merged or token == model.get("unk_token")
        } | ids
    elif vocabulary is not None:  # Unigram: pairs whose place is their id
        names = {index: token for token, index in ids.items() if index >= len(vocabulary)}
        model["vocab"] = [
            [token, _NEVER if token in control else score] for token, score in vocabulary
        ] + [
            [names.get(index, f"<no token {index}>"), _NEVER]
            for index in range(len(vocabulary), max(names, default=0) + 1)
        ]
    plain = {**definition, "model": model, "added_tokens": added, "post_processor": None}
    tokenizer = Tokenizer.from_str(json.dumps(plain))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _merged(merge: str | Sequence[str]) -> str:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left + right


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str:
    """The default template; "" where there is none."""
    if (text := _read(directory / "chat_template.jinja")) is not None:
        return text
    template = config.get("chat_template") or ""
    if isinstance(template, str):
        return template
    named = {str(entry["name"]): str(entry["template"]) for entry in template}
    return named.get("default", "")


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} can't be read: {error}.") from None


def _read_json(path: Path) -> dict[str, Any]:
    text = _read(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object.")
    return value
