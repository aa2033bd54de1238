"""Encoding of prompts: ids for the engine, and texts for an echo, from text or ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import grpc

from services.tokenizer.images.image_expander import ImagePrompt
from services.tokenizer.text.detokenizer import TokenTable
from services.tokenizer.text.infill import InfillTemplate, assemble_infill
from services.tokenizer.text.vocabulary import TextEncoding, Vocabulary
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = [
    "CONTEXT_LENGTH_EXCEEDED",
    "EncodedPrompt",
    "PromptPolicy",
    "check_cut",
    "encode_ids",
    "encode_prompt",
    "kept_tokens",
    "prompt_too_long",
    "split_by_tokens",
]

CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
"""Reason of errors for prompts that are too long"""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt in ids."""

    ids: Sequence[int]
    texts: Sequence[str]
    """Text that each id adds to the echo; empty without echo."""
    ended_texts: Sequence[str]
    """Texts of the echo if no token is generated: an unfinished character at the end is U+FFFD"""
    table: TokenTable
    """Texts of the echoed ids"""
    is_infill: bool


@dataclass(frozen=True, slots=True)
class PromptPolicy:
    """Treatment of prompts, and of prompts that are too long. Lengths are in tokens."""

    context_length: int
    max_tokens: int
    truncate: bool
    refuse_overflow: bool
    echo: bool
    infill: InfillTemplate | None
    suffix: str | None
    keep: int | None = None
    """Tokens at the end of each prompt to keep, at most `longest`; None for all."""

    @property
    def cuts(self) -> bool:
        """True if a prompt that is too long is cut, instead of refused."""
        return self.truncate or self.keep is not None

    @property
    def most(self) -> int:
        """Length of the longest prompt that is not cut."""
        return self.longest if self.keep is None else self.keep

    @property
    def cut_to(self) -> int:
        """Length that a longer prompt is cut to."""
        return self.longest_truncated if self.keep is None else self.keep

    @property
    def longest(self) -> int:
        """Length of the longest prompt that leaves room for a token, if one is requested."""
        return self.context_length - min(1, self.max_tokens)

    @property
    def longest_truncated(self) -> int:
        """Length that leaves room for max_tokens, or half the context if they exceed it."""
        return _with_room(self.context_length, self.max_tokens)


def kept_tokens(asked: int, context_length: int, max_tokens: int) -> int:
    """Return the number of tokens that truncate_prompt_tokens keeps; -1 leaves max_tokens free.

    Raises OUT_OF_RANGE if so many tokens leave no room for output.
    """
    longest = context_length - min(1, max_tokens)
    if asked > longest:
        raise _too_long(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens must be at most {longest:,} with a context length of "
            f"{context_length:,}, got {asked:,}. Use -1 to keep what fits.",
        )
    return _with_room(context_length, max_tokens) if asked == -1 else asked


def encode_prompt(
    vocabulary: Vocabulary,
    prompt: completion_pb2.Prompt,
    field: str,
    policy: PromptPolicy,
    images: ImagePrompt | None = None,
) -> EncodedPrompt:
    """Encode the prompt at the path `field` of the request.

    images: the same prompt with its images; None if the request has none. Raises INVALID_ARGUMENT
    for a prompt without ids, OUT_OF_RANGE for one that is too long.
    """
    is_text = prompt.WhichOneof("prompt") == "text"
    field += ".text" if is_text else ".token_ids.ids"
    if policy.infill is not None and policy.suffix is not None:
        encoded = _encode_infill(vocabulary, prompt, field, policy.infill, policy.suffix, policy)
    elif is_text:
        text = prompt.text if images is None else images.text
        encoded = _encode_text(vocabulary, text, field, policy, images)
    elif images is not None:
        cut = _check_length(len(images.ids), field, policy)
        check_cut(cut, images.ids, images)
        encoded = _of_ids(vocabulary, images.ids[cut:], policy)
    else:
        return encode_ids(vocabulary, prompt.token_ids.ids, field, policy)
    _check_room(len(encoded.ids), field, policy)
    return encoded


def encode_ids(
    vocabulary: Vocabulary, ids: Sequence[int], field: str, policy: PromptPolicy
) -> EncodedPrompt:
    """Return the prompt of ids that come from the path `field`.

    Raises OUT_OF_RANGE if they are too many.
    """
    kept = list(ids[_check_length(len(ids), field, policy) :])
    _check_room(len(kept), field, policy)
    return _of_ids(vocabulary, kept, policy)


def check_cut(cut: int, ids: Sequence[int], images: ImagePrompt | None) -> None:
    """Raise OUT_OF_RANGE if the first `cut` ids of a prompt hold an image, or a part of it."""
    if images is not None and cut > images.first_image(ids):
        raise _cuts_image(images.field, len(ids) - cut)


def split_by_tokens(text: str, encoding: TextEncoding) -> list[str]:
    """Return the text that each token adds; the last token that spells a character adds it."""
    places = [place for place, added in enumerate(encoding.is_added) if not added]
    texts = [""] * len(encoding.ids)
    begin = 0
    for place, following in pairwise(places):
        end = max(begin, min(encoding.ends[place], encoding.starts[following]))
        texts[place] = text[begin:end]
        begin = end
    if texts:
        texts[places[-1] if places else -1] = text[begin:]
    return texts


def prompt_too_long(field: str, count: str, context_length: int, max_tokens: int) -> ServiceError:
    """Return the OUT_OF_RANGE error for a prompt of `count` tokens. Lengths are in tokens."""
    return _too_long(
        field,
        f"The prompt has {count} tokens; the context length is {context_length:,}"
        + (", output included." if max_tokens else "."),
    )


def _of_ids(vocabulary: Vocabulary, ids: Sequence[int], policy: PromptPolicy) -> EncodedPrompt:
    table = vocabulary.full_table
    texts = vocabulary.decode(ids, skip_special_tokens=False) if policy.echo else []
    ended = texts
    if policy.echo and table.texts[ids[-1]] is None:  # the prompt may end inside a character
        texts = vocabulary.decode(ids, skip_special_tokens=False, flush=False)
    return EncodedPrompt(ids, texts, ended, table, is_infill=False)


def _encode_text(
    vocabulary: Vocabulary,
    text: str,
    field: str,
    policy: PromptPolicy,
    images: ImagePrompt | None,
) -> EncodedPrompt:
    added = images.added if images is not None else 0
    if _surely_exceeds(vocabulary.least_tokens(text, policy.most) + added, field, policy):
        text = vocabulary.end(text, policy.most + 1)  # one token too many, so that it is cut below
        if images is not None and text.count(images.placeholder) < len(images.runs):
            raise _cuts_image(images.field, policy.cut_to)
    texts: list[str] = []
    if policy.echo:
        encoding = vocabulary.encode_with_offsets(text)
        ids, texts = list(encoding.ids), split_by_tokens(text, encoding)
    else:
        ids = vocabulary.encode(text)
    if not ids:
        if vocabulary.bos_id is None:
            message = "The prompt has no tokens, and the model has no BOS token to use instead."
            raise invalid(field, message)
        ids, texts = [vocabulary.bos_id], [text] if policy.echo else []
    if images is not None:
        ids, texts = images.lengthen(ids, texts)
    head = 1 if vocabulary.adds_bos else 0
    if cut := _check_length(len(ids), field, policy):
        check_cut(head + cut, ids, images)
        ids, texts = ids[:head] + ids[head + cut :], texts[:head] + texts[head + cut :]
    return EncodedPrompt(ids, texts, texts, vocabulary.table, is_infill=False)


def _encode_infill(
    vocabulary: Vocabulary,
    prompt: completion_pb2.Prompt,
    field: str,
    template: InfillTemplate,
    suffix: str,
    policy: PromptPolicy,
) -> EncodedPrompt:
    text, ids_before = prompt.text, prompt.token_ids.ids
    most = policy.most
    least_before = max(vocabulary.least_tokens(text, most), len(ids_before))
    least_after = vocabulary.least_tokens(suffix, most)
    if _surely_exceeds(least_before + template.control_count + least_after, field, policy):
        # keep one token too many, so that the prompt is cut below
        if least_before > most:
            text = vocabulary.end(text, most + 1)
        if least_after > most:
            suffix = vocabulary.beginning(suffix, most + 1)
    if prompt.WhichOneof("prompt") == "text":
        before = vocabulary.encode_plain(text)
    else:
        before = list(ids_before[-most - 1 :])
    after = vocabulary.encode_continuation(suffix)
    ids = assemble_infill(template, before, after)
    if _check_length(len(ids), field, policy):
        ids = assemble_infill(template, before, after, policy.cut_to)
    return EncodedPrompt(ids, [], [], vocabulary.table, is_infill=True)


def _surely_exceeds(least: int, field: str, policy: PromptPolicy) -> bool:
    """Return whether a prompt of at least `least` tokens must be cut, before it is encoded."""
    if least <= policy.most:
        return False
    if policy.cuts:
        return True
    raise prompt_too_long(field, f"at least {least:,}", policy.context_length, policy.max_tokens)


def _check_length(length: int, field: str, policy: PromptPolicy) -> int:
    """Return the number of ids to cut from a prompt of `length` ids."""
    if length <= policy.most:
        return 0
    if policy.cuts:
        return length - policy.cut_to
    raise prompt_too_long(field, f"{length:,}", policy.context_length, policy.max_tokens)


def _check_room(length: int, field: str, policy: PromptPolicy) -> None:
    """Raise OUT_OF_RANGE if max_tokens must fit behind a prompt, but do not."""
    if policy.refuse_overflow and length + policy.max_tokens > policy.context_length:
        raise _too_long(
            field,
            f"{length:,} prompt tokens and max_tokens {policy.max_tokens:,} exceed the "
            f"context length of {policy.context_length:,}.",
        )


def _with_room(context_length: int, max_tokens: int) -> int:
    return context_length - (max_tokens if max_tokens < context_length else context_length // 2)


def _cuts_image(field: str, length: int) -> ServiceError:
    return _too_long(
        field,
        f"A cut of the prompt to {length:,} tokens would cut an image: shorten the text, or leave "
        "out images.",
    )


def _too_long(field: str, message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.OUT_OF_RANGE, CONTEXT_LENGTH_EXCEEDED, message, field=field)
