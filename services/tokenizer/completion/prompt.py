"""Prompts: from text or ids to the ids that the engine sees, and to the text that echo returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import grpc

from services.tokenizer.text.detokenizer import TokenTable
from services.tokenizer.text.infill import InfillTemplate, assemble_infill
from services.tokenizer.text.vocabulary import TextEncoding, Vocabulary
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = [
    "EncodedPrompt",
    "PromptPolicy",
    "encode_prompt",
    "kept_tokens",
    "overlong",
    "split_by_tokens",
]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine sees it."""

    ids: Sequence[int]
    texts: Sequence[str]
    """What each id adds to the echoed text. Empty without echo."""
    ended_texts: Sequence[str]
    """The same where nothing is generated: a character that the ids leave unfinished is U+FFFD,
    added by the id that began it."""
    table: TokenTable
    """How the echo decodes ids."""
    is_infill: bool


@dataclass(frozen=True, slots=True)
class PromptPolicy:
    """What becomes of prompts, and of those that leave no room. Lengths are in tokens."""

    context_length: int
    max_tokens: int
    truncate: bool
    refuse_overflow: bool
    echo: bool
    infill: InfillTemplate | None
    suffix: str | None
    keep: int | None = None
    """The end of each prompt that is kept: None = all of it. At most `longest`."""

    @property
    def cuts(self) -> bool:
        """Whether a prompt that is too long is cut instead of refused."""
        return self.truncate or self.keep is not None

    @property
    def most(self) -> int:
        """The longest prompt that stays as it is."""
        return self.longest if self.keep is None else self.keep

    @property
    def cut_to(self) -> int:
        """What a longer prompt is cut to."""
        return self.longest_truncated if self.keep is None else self.keep

    @property
    def longest(self) -> int:
        """The longest prompt that leaves room for one token, where one is wanted."""
        return self.context_length - min(1, self.max_tokens)

    @property
    def longest_truncated(self) -> int:
        """What a prompt is cut to: room for max_tokens is left, or half the context for a
        max_tokens that fits none."""
        return _with_room(self.context_length, self.max_tokens)


def kept_tokens(asked: int, context_length: int, max_tokens: int) -> int:
    """How many tokens of a prompt truncate_prompt_tokens keeps; -1 leaves room for max_tokens.

    Raises OUT_OF_RANGE where so many leave no room for output.
    """
    longest = context_length - min(1, max_tokens)
    if asked > longest:
        raise _too_long(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens must be at most {longest:,}, for which the context length of "
            f"{context_length:,} has room, got {asked:,}. Use -1 to keep what fits.",
        )
    return _with_room(context_length, max_tokens) if asked == -1 else asked


def encode_prompt(
    vocabulary: Vocabulary, prompt: completion_pb2.Prompt, field: str, policy: PromptPolicy
) -> EncodedPrompt:
    """Raises INVALID_ARGUMENT for a prompt without ids, OUT_OF_RANGE for one that is too long.

    field: the path of the prompt.
    """
    is_text = prompt.WhichOneof("prompt") == "text"
    field += ".text" if is_text else ".token_ids.ids"
    if policy.infill is not None and policy.suffix is not None:
        encoded = _encode_infill(vocabulary, prompt, field, policy.infill, policy.suffix, policy)
    elif is_text:
        encoded = _encode_text(vocabulary, prompt.text, field, policy)
    else:
        given = prompt.token_ids.ids
        ids = list(given[_check_length(len(given), field, policy) :])
        encoded = _of_ids(vocabulary, ids, policy)
    wanted = len(encoded.ids) + policy.max_tokens
    if policy.refuse_overflow and wanted > policy.context_length:
        raise _too_long(
            field,
            f"{len(encoded.ids):,} prompt tokens and max_tokens {policy.max_tokens:,} exceed the "
            f"context length of {policy.context_length:,}.",
        )
    return encoded


def split_by_tokens(text: str, encoding: TextEncoding) -> list[str]:
    """The text, cut into what each token adds: a character that several tokens spell belongs to
    the last of them, a token that the tokenizer added has ""."""
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


def overlong(field: str, count: str, context_length: int, max_tokens: int) -> ServiceError:
    """OUT_OF_RANGE for a prompt of `count` tokens; lengths are in tokens."""
    return _too_long(
        field,
        f"The prompt has {count} tokens; the context length is {context_length:,}"
        + (", output included." if max_tokens else "."),
    )


def _of_ids(vocabulary: Vocabulary, ids: Sequence[int], policy: PromptPolicy) -> EncodedPrompt:
    table = vocabulary.full_table
    texts = vocabulary.decode(ids, skip_special_tokens=False) if policy.echo else []
    ended = texts
    if policy.echo and table.texts[ids[-1]] is None:  # it may end within a character
        texts = vocabulary.decode(ids, skip_special_tokens=False, flush=False)
    return EncodedPrompt(ids, texts, ended, table, is_infill=False)


def _encode_text(
    vocabulary: Vocabulary, text: str, field: str, policy: PromptPolicy
) -> EncodedPrompt:
    if _surely_exceeds(vocabulary.least_tokens(text, policy.most), field, policy):
        text = vocabulary.end(text, policy.most + 1)  # too many still: they are cut below
    texts: list[str] = []
    if policy.echo:
        encoding = vocabulary.encode_with_offsets(text)
        ids, texts = list(encoding.ids), split_by_tokens(text, encoding)
    else:
        ids = vocabulary.encode(text)
    if not ids:
        if vocabulary.bos_id is None:
            message = "The prompt has no tokens, and the model has no BOS to stand for it."
            raise invalid(field, message)
        ids, texts = [vocabulary.bos_id], [text] if policy.echo else []
    head = 1 if vocabulary.adds_bos else 0
    if cut := _check_length(len(ids), field, policy):
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
        # one token more than there is room for: it is still seen that there are too many
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
    """Whether a prompt of at least so many tokens is to be cut: told before it is encoded."""
    if least <= policy.most:
        return False
    if policy.cuts:
        return True
    raise overlong(field, f"at least {least:,}", policy.context_length, policy.max_tokens)


def _check_length(length: int, field: str, policy: PromptPolicy) -> int:
    """How many ids must be cut from the prompt."""
    if length <= policy.most:
        return 0
    if policy.cuts:
        return length - policy.cut_to
    raise overlong(field, f"{length:,}", policy.context_length, policy.max_tokens)


def _with_room(context_length: int, max_tokens: int) -> int:
    return context_length - (max_tokens if max_tokens < context_length else context_length // 2)


def _too_long(field: str, message: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.OUT_OF_RANGE, "CONTEXT_LENGTH_EXCEEDED", message, field=field
    )
