"""Tokenizer of a checkpoint: text to ids and back, special ids, identity."""

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
from services.tokenizer.text.bytes_per_token import bytes_per_token
from services.tokenizer.text.checkpoint_files import (
    DEFAULT_TEMPLATE,
    read_chat_templates,
    read_json,
    read_text,
)
from services.tokenizer.text.detokenizer import (
    Detokenizer,
    TokenTable,
    UnsupportedDecoderError,
    token_table,
)
from services.tokenizer.text.infill import infill_control_tokens
from services.tokenizer.text.plain_tokenizer import plain_tokenizer

__all__ = ["FramedText", "TextEncoding", "Vocabulary"]

_CONTROL_SHAPE = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_MARKER = "☺"  # Meta's and Mistral's infill code puts it before a suffix
_FAST_CLASS = "PreTrainedTokenizerFast"  # the default of transformers
_SPECIAL_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_IMAGE_PLACEHOLDERS = {"<image_soft_token>"}  # Gemma 3's text-only models have it, too
_LINE = re.compile(r"\n(?=[^\W\d_])")
_MARGIN = 16_384  # characters
_CHUNK = 65_536  # characters
_SPARSE = 8  # characters per token; hardly any text has more


@dataclass(frozen=True, slots=True)
class TextEncoding:
    """Ids of a text. Token i came from the code points [starts[i], ends[i])."""

    ids: Sequence[int]
    tokens: Sequence[str]
    starts: Sequence[int]
    ends: Sequence[int]
    is_added: Sequence[bool]
    """True if the tokenizer added the token, such as a BOS"""


@dataclass(frozen=True, slots=True)
class FramedText:
    """Ids of a text or a pair, with the special tokens that the tokenizer puts around them."""

    ids: Sequence[int]
    parts: Sequence[int | None]
    """Text that each id belongs to, 0 or 1; None = a special token around the texts"""
    types: Sequence[int]
    """Token type of each id: 1 for the second text of a pair, if the tokenizer has types"""

    @property
    def least(self) -> int:
        """Number of special tokens, which `cut` never removes."""
        return sum(part is None for part in self.parts)

    def cut(self, most: int) -> Sequence[int]:
        """Return at most `most` ids. The texts lose their ends, the longer text first."""
        if len(self.ids) <= most:
            return self.ids
        return [token for token, kept in zip(self.ids, self._kept(most), strict=True) if kept]

    def second_text(self, most: int) -> int | None:
        """Return the index in `cut(most)` of the first token of type 1; None if there is none."""
        kept = self._kept(most)
        types = [kind for kind, stays in zip(self.types, kept, strict=True) if stays]
        return types.index(1) if 1 in types[1:] else None

    def _kept(self, most: int) -> Sequence[bool]:
        """Return for each id whether `cut` keeps it."""
        if len(self.ids) <= most:
            return [True] * len(self.ids)
        counts = [sum(part == number for part in self.parts) for number in (0, 1)]
        room = most - self.least
        shorter = min(min(counts), room // 2)
        limits = [min(count, room - shorter) for count in counts]
        if sum(limits) > room:  # both are longer than half the room
            limits = [room // 2, room - room // 2]
        taken, kept = [0, 0], []
        for part in self.parts:
            if part is None:
                kept.append(True)
                continue
            kept.append(taken[part] < limits[part])
            taken[part] += 1
        return kept


class Vocabulary:
    """The tokenizer.json of a checkpoint, with the files beside it. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        answer_marks: Collection[str] = (),
        chat_template: Path | None = None,
    ) -> None:
        """Read a checkpoint.

        answer_marks: texts of added tokens that frame tool calls and reasoning in any family.
        chat_template: file (Jinja) of the default chat template, in place of the checkpoint's.
        Raises StartupError if the directory has no tokenizer that can be served.
        """
        path = directory / "tokenizer.json"
        definition, self._tokenizer = _read_tokenizer(path)
        config = read_json(directory / "tokenizer_config.json")
        model_config = read_json(directory / "config.json")

        self.ids: Mapping[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self._names: Mapping[int, str] = {index: token for token, index in self.ids.items()}
        self.model_vocabulary_size = _text_setting(model_config, "vocab_size")
        self._check_embedding_size(path)
        self.size = max(max(self.ids.values()) + 1, self.model_vocabulary_size)
        self.context_length = _text_setting(model_config, "max_position_embeddings")
        """Context length in tokens; 0 if the checkpoint does not state it"""

        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens: Mapping[int, str] = {
            index: token.content for index, token in sorted(added.items()) if token.special
        }
        roles = self._special_ids(config, read_json(directory / "special_tokens_map.json"))
        self.special_names = {role: self._names[token] for role, token in roles.items()}
        """Texts of special tokens by role, such as "bos_token", as chat templates use them"""
        self.bos_id = roles.get("bos_token")
        self.eos_id = roles.get("eos_token")
        self.pad_id = roles.get("pad_token")
        self.unk_id = roles.get("unk_token")
        self.mask_id = roles.get("mask_token")
        self._configure_added_tokens(config)
        empty = self._tokenizer.encode("", add_special_tokens=True).ids
        self.adds_bos = self.bos_id is not None and empty[:1] == [self.bos_id]

        self.chat_templates: Mapping[str, str] = read_chat_templates(directory, config)
        if chat_template is not None:
            text = read_text(chat_template)
            if not text:
                raise StartupError(f"The chat template {chat_template} is missing or empty.")
            self.chat_templates = {**self.chat_templates, DEFAULT_TEMPLATE: text}
        self.control_tokens = self._control_tokens(added.values(), answer_marks)
        """Texts of tokens that control the model, instead of spelling text"""
        self._plain = plain_tokenizer(self._tokenizer, definition, self.control_tokens)
        self._adds_space = self.encode_plain("a") != self._after_marker("a")
        normalizer = self._tokenizer.normalizer
        self.bytes_per_token = bytes_per_token(
            definition, normalizer.normalize_str if normalizer is not None else str
        )
        """Most bytes of text that a token stands for; the function says how certain this is"""

        self._decoder = definition.get("decoder")
        try:
            self.full_table = token_table(self.ids, self._decoder, self.size)
        except UnsupportedDecoderError as error:
            raise StartupError(f"{path} is not supported: {error}.") from None
        self.table = self.full_table.without(self.special_tokens)
        self._search = _PieceSearch(self.table.pieces[: self.model_vocabulary_size or None])

        self.tokenizer_class = str(config.get("tokenizer_class") or _FAST_CLASS)
        """Name of the tokenizer's class in transformers"""
        self.fingerprint = _hash(self._tokenizer.to_str())
        self.configuration_hash = _hash(json.dumps(model_config, sort_keys=True))

    @property
    def chat_template(self) -> str:
        """The default chat template; "" without one."""
        return self.chat_templates.get(DEFAULT_TEMPLATE, "")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Special tokens in it are parsed; the tokenizer adds its own."""
        ids: list[int] = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )[0].ids
        return ids

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool = True) -> TextEncoding:
        """Return the ids of `encode` with their offsets in the text."""
        # `Tokenizer.encode` would hold the interpreter lock
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        offsets: list[tuple[int, int]] = encoding.offsets
        # the mask also marks special tokens in the text; those have a width
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

    def encode_framed(self, texts: Sequence[str | tuple[str, str]]) -> list[FramedText]:
        """Return the ids of texts, or of pairs, with special tokens parsed and added."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=True)
        return [FramedText(each.ids, each.sequence_ids, each.type_ids) for each in encodings]

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a user's text: nothing is added, and no control token is parsed."""
        ids: list[int] = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Return the ids of `encode_plain` without the space that some tokenizers prepend."""
        return self._after_marker(text) if text and self._adds_space else self.encode_plain(text)

    def least_tokens(self, text: str, enough: int) -> int:
        """Return a lower bound of the text's number of tokens.

        If its bytes alone do not prove more than `enough` tokens, a long text is encoded from its
        beginning until it has more.
        """
        least = -(-len(text.encode()) // self.bytes_per_token)
        if least > enough or len(text) <= enough * _SPARSE + _CHUNK:
            return least
        reach = self._reach(text, enough + 1, range(0, len(text), _CHUNK))
        return enough + 1 if reach < len(text) else least

    def beginning(self, text: str, count: int) -> str:
        """Return a beginning of the text that has the text's first `count` tokens; see `end`."""
        least = self._reach(text, count, range(0, len(text), _CHUNK)) + _MARGIN
        line = _LINE.search(text, least, least + _MARGIN)
        return text[: line.end() + 1 if line is not None else least + _MARGIN]

    def end(self, text: str, count: int) -> str:
        """Return an end of the text that has the text's last `count` tokens.

        The cut is before a line that begins with a letter: tokenizers neither join a line break to
        a letter nor look back across it. Without such a line, the tokens become the same again
        within the margin, except perhaps in an unbroken run ("xxxx").
        """
        reach = self._reach(text, count, range(len(text) - _CHUNK, 0, -_CHUNK))
        last = len(text) - reach - _MARGIN
        first = max(0, last - _MARGIN)
        # keep the line break: a space that a tokenizer prepends does not reach across it
        lines = _LINE.finditer(text, first, max(0, last))
        return text[max((line.start() for line in lines), default=first) :]

    def _reach(self, text: str, count: int, begins: Iterable[int]) -> int:
        """Return the number of characters of the chunks that hold at least `count` tokens."""
        reach = min(len(text), count * self.bytes_per_token)
        if reach <= count * _SPARSE + _CHUNK:
            return reach
        tokens = read = 0
        for begin in begins:
            chunk = text[begin : begin + _CHUNK]
            read += len(chunk)
            # the halves of a token that the cut divided have at most a token per byte
            tokens += len(self.encode(chunk, add_special_tokens=False)) - self.bytes_per_token
            if tokens >= count:
                return min(read, reach)
        return reach

    def names(self, ids: Iterable[int]) -> list[str]:
        """Return the vocabulary's string of each id; "" for an id without one."""
        return [self._names.get(token, "") for token in ids]

    def pieces(self, ids: Iterable[int]) -> list[bytes]:
        """Return the bytes that each id adds to a decoded text, special tokens included."""
        return [self.full_table.pieces[token] for token in ids]

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Return the ids of a text in parts. Control tokens in users' parts are not parsed."""
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
        """Return the distinct ids of a word inside a text, without and with a space before it."""
        word = word.lstrip() or word
        encode = self._encode_inside if self._adds_space else self._encode_bare
        spelled = {tuple(encode(form)): None for form in (word, f" {word}")}
        return [list(ids) for ids in spelled if ids]

    def _encode_bare(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def _encode_inside(self, text: str) -> list[int]:
        """Return the ids of `_encode_bare` without the space that the tokenizer prepends."""
        return self._encode_bare(_MARKER + text)[len(self._encode_bare(_MARKER)) :]

    def table_with(self, kept: Collection[str]) -> TokenTable:
        """Return `table` with the texts of these special tokens."""
        hidden = {token: text for token, text in self.special_tokens.items() if text not in kept}
        if len(hidden) == len(self.special_tokens):
            return self.table
        return self.full_table.without(hidden)

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, flush: bool = True
    ) -> list[str]:
        """Return the text that each id adds. flush: whether an unfinished end becomes U+FFFD."""
        detokenizer = Detokenizer(self.table if skip_special_tokens else self.full_table)
        texts: list[str] = []
        begin, is_held = 0, False
        for place, token in enumerate(ids):
            text = detokenizer.feed(token)
            if detokenizer.holds_back and (text or not is_held):
                begin = place
            is_held = detokenizer.holds_back
            texts.append(text)
        if flush and (rest := detokenizer.flush()):
            texts[begin] += rest
        return texts

    # the process has one vocabulary
    @lru_cache(maxsize=8)  # noqa: B019  # each entry may hold all ids
    def ids_containing(self, strings: tuple[str, ...]) -> tuple[int, ...]:
        """Return the model's ids whose text contains one of the strings, none of which is empty."""
        return self._search.find(strings)

    def _special_ids(self, *configs: Mapping[str, Any]) -> dict[str, int]:
        """Return the ids of special tokens by role; the first configuration with a role wins."""
        found: dict[str, int] = {}
        for role in _SPECIAL_ROLES:
            value = next(filter(None, (config.get(role) for config in configs)), None)
            content = value.get("content") if isinstance(value, dict) else value
            if content and (token := self.ids.get(content)) is not None:
                found[role] = token
        return found

    def _check_embedding_size(self, file: Path) -> None:
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

    def _configure_added_tokens(self, config: Mapping[str, Any]) -> None:
        """Let add_bos_token and add_eos_token override tokenizer.json, as transformers does."""
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
        """Return the added tokens that are special, frame parts of text, or are in templates."""
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


class _PieceSearch:
    """Search for strings in the pieces of all tokens at once."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._joined = b"".join(pieces)
        self._ends = list(accumulate(map(len, pieces)))
        self._longest = max(map(len, pieces), default=0)

    def find(self, strings: Iterable[str]) -> tuple[int, ...]:
        """Return the indices of the pieces that contain one of the strings."""
        found = bytearray(len(self._ends))
        for string in strings:
            wanted = string.encode()
            if len(wanted) > self._longest:
                continue
            place = self._joined.find(wanted)
            while place >= 0:
                index = bisect_right(self._ends, place)
                end = self._ends[index]
                if place + len(wanted) <= end:
                    found[index] = True
                    place = end - 1
                place = self._joined.find(wanted, place + 1)
        return tuple(compress(range(len(found)), found))


def _read_tokenizer(path: Path) -> tuple[dict[str, Any], Tokenizer]:
    """Return the definition and the tokenizer of a tokenizer.json. Raises StartupError."""
    text = read_text(path)
    if text is None:
        raise StartupError(f"{path.parent} has no tokenizer.json.")
    try:
        definition: dict[str, Any] = json.loads(text)
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise StartupError(f"{path} can't be read: {error}.") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return definition, tokenizer


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _text_setting(config: Mapping[str, Any], key: str) -> int:
    """Return a number of config.json or of its section on text; 0 if neither has it."""
    section = config.get("text_config")
    value = config.get(key) or (section.get(key) if isinstance(section, Mapping) else None)
    return int(value or 0)
