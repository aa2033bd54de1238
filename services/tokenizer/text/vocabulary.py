"""The checkpoint's tokenizer: text to ids and back, its special ids, its identity."""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, compress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from services.common.settings import StartupError
from services.tokenizer.text.chat_templates import DEFAULT_TEMPLATE, read_chat_templates
from services.tokenizer.text.checkpoint_files import read_json, read_text
from services.tokenizer.text.coverage import bytes_per_token
from services.tokenizer.text.detokenizer import (
    Detokenizer,
    TokenTable,
    UnsupportedDecoderError,
    token_table,
)
from services.tokenizer.text.infill import infill_control_tokens

__all__ = ["TextEncoding", "Vocabulary"]

_CONTROL_SHAPE = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_MARKER = "☺"  # the sign that Meta's and Mistral's own infill code puts before a suffix
_FAST_CLASS = "PreTrainedTokenizerFast"  # of a checkpoint that names none
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_IMAGE_PLACEHOLDERS = {"<image_soft_token>"}  # Gemma 3's, in its text-only models too
_NEVER = -1e9  # a Unigram score that no segmentation can afford
_LINE = re.compile(r"\n(?=[^\W\d_])")
_MARGIN = 16_384  # characters
_CHUNK = 65_536  # characters
_SPARSE = 8  # characters per token that hardly any text has


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

    def __init__(self, directory: Path, answer_marks: Collection[str] = ()) -> None:
        """`answer_marks`: texts of added tokens that frame calls and reasoning in any family.

        Raises StartupError when the directory holds no tokenizer that can be served.
        """
        text = read_text(directory / "tokenizer.json")
        if text is None:
            raise StartupError(f"{directory} has no tokenizer.json.")
        config = read_json(directory / "tokenizer_config.json")
        special_map = read_json(directory / "special_tokens_map.json")
        model_config = read_json(directory / "config.json")
        try:
            definition: dict[str, Any] = json.loads(text)
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise StartupError(f"{directory / 'tokenizer.json'} can't be read: {error}.") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

        self.ids: Mapping[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.model_vocabulary_size = _of_text(model_config, "vocab_size")
        self._refuse_ids_beyond_the_embedding(directory / "tokenizer.json")
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

        self.special_names: Mapping[str, str] = {
            name: self._names[token]
            for name in _SPECIAL_NAMES
            if (token := special_id(name)) is not None
        }
        """Texts of the special tokens by their role ("bos_token"), as chat templates know them."""
        self.tokenizer_class = str(config.get("tokenizer_class") or _FAST_CLASS)
        """transformers' class of the tokenizer"""
        self.bos_id = special_id("bos_token")
        self.eos_id = special_id("eos_token")
        self.pad_id = special_id("pad_token")
        self.unk_id = special_id("unk_token")
        self._settle_added_tokens(config)
        empty = self._tokenizer.encode("", add_special_tokens=True).ids
        self.adds_bos = self.bos_id is not None and empty[:1] == [self.bos_id]

        self.chat_templates: Mapping[str, str] = read_chat_templates(directory, config)
        self.context_length = _of_text(model_config, "max_position_embeddings")
        self.control_tokens = self._control_tokens(added.values(), answer_marks)
        """Texts of the tokens that steer the model rather than spell text."""
        self._plain = _without_control_tokens(definition, self.control_tokens)
        normalizer = self._tokenizer.normalizer
        self.bytes_per_token = bytes_per_token(
            definition, normalizer.normalize_str if normalizer is not None else str
        )
        """How much text a token stands for at most; `bytes_per_token` says how sure that is."""
        self._adds_space = self.encode_plain("a") != self._after_marker("a")
        try:
            self._decoder = decoder = definition.get("decoder")
            self.table = token_table(self.ids, decoder, self.size, self.special_tokens)
            self.full_table = token_table(self.ids, decoder, self.size, ())
        except UnsupportedDecoderError as error:
            raise StartupError(
                f"{directory / 'tokenizer.json'} is not supported: {error}."
            ) from None
        pieces = self.table.pieces[: self.model_vocabulary_size or None]
        self._joined_pieces = b"".join(pieces)
        self._piece_ends = list(accumulate(map(len, pieces)))
        self._longest_piece = max(map(len, pieces), default=0)
        self.fingerprint = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
        self.configuration_hash = hashlib.sha256(
            json.dumps(model_config, sort_keys=True).encode()
        ).hexdigest()

    @property
    def chat_template(self) -> str:
        """The default one; "" where there is none."""
        return self.chat_templates.get(DEFAULT_TEMPLATE, "")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text: special tokens are parsed, the tokenizer's own (BOS) added if asked."""
        ids: list[int] = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )[0].ids
        return ids

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool = True) -> TextEncoding:
        """As `encode`, with offsets. Special tokens in the text are parsed either way."""
        # of one text alone, `encode` would keep the interpreter locked meanwhile
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        offsets: list[tuple[int, int]] = encoding.offsets
        # the mask also marks special tokens that stand in the text; those have a width
        is_added = [
            bool(special) and start == end
            for special, (start, end) in zip(encoding.special_tokens_mask, offsets, strict=True)
        ]
        return TextEncoding(
            ids=encoding.ids,
            tokens=self.names(encoding.ids),
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

    def least_tokens(self, text: str, enough: int) -> int:
        """A number of tokens that no encoding of the text is below.

        The bytes alone tell it, where they tell more than `enough`. Else of a text that is
        suspiciously long for `enough` tokens as much is encoded as has more.
        """
        least = -(-len(text.encode()) // self.bytes_per_token)
        if least > enough or len(text) <= enough * _SPARSE + _CHUNK:
            return least
        reach = self._reach(text, enough + 1, range(0, len(text), _CHUNK))
        return enough + 1 if reach < len(text) else least

    def beginning(self, text: str, count: int) -> str:
        """So much of a text that its first `count` tokens are those of the whole. See `end`."""
        least = self._reach(text, count, range(0, len(text), _CHUNK)) + _MARGIN
        line = _LINE.search(text, least, least + _MARGIN)
        return text[: line.end() + 1 if line is not None else least + _MARGIN]

    def end(self, text: str, count: int) -> str:
        """So much of a text that its last `count` tokens are those of the whole.

        It is cut before a line that begins with a letter: tokenizers neither join a line break to
        that nor look back across it. Where there is no such line, the margin leaves room for the
        tokens to become the same again, which those of an unbroken run ("xxxx") may not.
        """
        reach = self._reach(text, count, range(len(text) - _CHUNK, 0, -_CHUNK))
        last = len(text) - reach - _MARGIN
        first = max(0, last - _MARGIN)
        # the break goes along: what a tokenizer puts before a text does not reach across it
        lines = _LINE.finditer(text, first, max(0, last))
        return text[max((line.start() for line in lines), default=first) :]

    def _reach(self, text: str, count: int, begins: Iterable[int]) -> int:
        """Characters of chunks that begin at these places which hold `count` tokens of the text
        at least."""
        reach = min(len(text), count * self.bytes_per_token)
        if reach <= count * _SPARSE + _CHUNK:
            return reach
        tokens = read = 0
        for begin in begins:
            chunk = text[begin : begin + _CHUNK]
            read += len(chunk)
            # both halves of a token that was torn have a token per byte at most
            tokens += len(self.encode(chunk, add_special_tokens=False)) - self.bytes_per_token
            if tokens >= count:
                return min(read, reach)
        return reach

    def names(self, ids: Iterable[int]) -> list[str]:
        """The vocabulary's string of each id; "" for ids that have none."""
        return [self._names.get(token, "") for token in ids]

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of a text that comes in parts, each with whether it is a user's: control tokens are
        parsed in the others."""
        ids: list[int] = []
        for text, is_users in parts:
            if is_users:
                ids += self.encode_continuation(text) if ids else self.encode_plain(text)
            elif not ids or not self._adds_space:
                ids += self._encode_bare(text)
            else:
                ids += self._encode_inside(text)
        return ids

    def spellings(self, word: str) -> list[list[int]]:
        """Ids of a word inside a text, without a space in front of it and with one; control tokens
        are parsed. Fewer than two where that makes no difference, or the word has no tokens."""
        word = word.lstrip() or word
        encode = self._encode_inside if self._adds_space else self._encode_bare
        spelled = {tuple(encode(form)): None for form in (word, f" {word}")}
        return [list(ids) for ids in spelled if ids]

    def _encode_bare(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def _encode_inside(self, text: str) -> list[int]:
        """The same without the space that the tokenizer puts before a text."""
        return self._encode_bare(_MARKER + text)[len(self._encode_bare(_MARKER)) :]

    def table_with(self, kept: Collection[str]) -> TokenTable:
        """As `table`, with the texts of these special tokens."""
        skipped = [token for token, text in self.special_tokens.items() if text not in kept]
        if len(skipped) == len(self.special_tokens):
            return self.table
        return token_table(self.ids, self._decoder, self.size, skipped)

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, flush: bool = True
    ) -> list[str]:
        """What each id adds to the text. Unless `flush` is false, bytes of a character that is
        unfinished at the end become U+FFFD, added by the id that began it."""
        detokenizer = Detokenizer(self.table if skip_special_tokens else self.full_table)
        texts: list[str] = []
        began, is_held = 0, False
        for place, token in enumerate(ids):
            text = detokenizer.feed(token)
            if detokenizer.holds_back and (text or not is_held):
                began = place
            is_held = detokenizer.holds_back
            texts.append(text)
        if flush and (rest := detokenizer.flush()):
            texts[began] += rest
        return texts

    # there is one vocabulary for the life of the process
    @lru_cache(maxsize=8)  # noqa: B019  # each may hold the whole vocabulary
    def ids_containing(self, strings: tuple[str, ...]) -> tuple[int, ...]:
        """The ids that the model knows whose text contains one of the strings, none of them
        empty."""
        found = bytearray(len(self._piece_ends))
        for string in strings:
            wanted = string.encode()
            if len(wanted) > self._longest_piece:
                continue
            place = self._joined_pieces.find(wanted)
            while place >= 0:
                index = bisect_right(self._piece_ends, place)
                end = self._piece_ends[index]
                if place + len(wanted) <= end:
                    found[index] = True
                    place = end - 1
                place = self._joined_pieces.find(wanted, place + 1)
        return tuple(compress(range(len(found)), found))

    def _refuse_ids_beyond_the_embedding(self, file: Path) -> None:
        beyond = {
            token: index
            for token, index in self.ids.items()
            if index >= self.model_vocabulary_size > 0 and token not in _IMAGE_PLACEHOLDERS
        }
        if beyond:
            token = max(beyond, key=beyond.__getitem__)
            raise StartupError(
                f"{file}: the token {token!r} has the id {beyond[token]}, but by config.json's "
                f"vocab_size the embedding has {self.model_vocabulary_size} rows."
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

    def _control_tokens(
        self, added: Iterable[Any], answer_marks: Collection[str]
    ) -> frozenset[str]:
        """Added tokens: those marked special, those of infill, of calls and of reasoning in any
        family, and those that a chat template writes."""
        known = infill_control_tokens().union(answer_marks)
        templates = "\0".join(self.chat_templates.values())
        return frozenset(
            token.content
            for token in added
            if token.special
            or token.content in known
            or _CONTROL_SHAPE.fullmatch(token.content)
            or (token.content.strip() and token.content in templates)
        )


def _of_text(config: Mapping[str, Any], key: str) -> int:
    """A number of config.json, or of its section on text, if it has one; 0 for none."""
    section = config.get("text_config")
    value = config.get(key) or (section.get(key) if isinstance(section, Mapping) else None)
    return int(value or 0)


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
