"""Long prompts: refused before they are encoded, or cut as if encoded whole."""

from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.completion.prompt_encoding import (
    EncodedPrompt,
    PromptPolicy,
    encode_prompt,
    split_by_tokens,
)
from services.tokenizer.text.infill import InfillOrder, InfillTemplate, assemble_infill
from services.tokenizer.text.vocabulary import Vocabulary
from tests.unit.tokenizer.checkpoints import byte_level, write_checkpoint
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.types.v1 import types_pb2 as types

_POLICY = PromptPolicy(
    context_length=8,
    max_tokens=3,
    truncate=False,
    refuse_overflow=False,
    echo=False,
    infill=None,
    suffix=None,
)
_INFILL = InfillTemplate("x", InfillOrder.PREFIX_SUFFIX_MIDDLE, 1, 2, 3, None, ())
_PIECES = ["def f(a):\n", "    return a\n", "\n", " ", "x", "é", "字\n", "😀", "<s>", "1234\n\n"]
# longer than the part that is encoded, with some lines that begin with a letter
_LONG = st.tuples(
    st.lists(st.sampled_from(_PIECES), max_size=99).map(lambda pieces: "".join(pieces) + "\nb"),
    st.integers(6_000, 9_000),
    st.lists(st.sampled_from(_PIECES), max_size=40).map("".join),
).map(lambda parts: parts[0] * (parts[1] * 8 // len(parts[0])) + parts[2])


@pytest.fixture(scope="module")
def embedded(embedded_model: Path) -> Vocabulary:
    return Vocabulary(embedded_model)


def _encode(vocabulary: Vocabulary, text: str, policy: PromptPolicy) -> EncodedPrompt:
    return encode_prompt(vocabulary, completion.Prompt(text=text), "prompts[0]", policy)


@pytest.mark.parametrize("echo", [False, True])
def test_text_that_can_not_fit_is_refused_before_encoding(
    embedded: Vocabulary, echo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes from one client would block the others for seconds, and fill the memory."""
    longest = max(embedded.table.texts, key=lambda text: len(text or "")) or ""
    policy = replace(_POLICY, echo=echo)
    fits = _encode(embedded, longest * policy.longest, policy)
    assert len(fits.ids) == policy.longest
    encoded: list[str] = []
    for name in ("encode", "encode_with_offsets", "encode_plain"):
        monkeypatch.setattr(embedded, name, encoded.append)
    with pytest.raises(ServiceError) as caught:
        _encode(embedded, longest * policy.longest + "x", policy)
    error = caught.value
    assert (error.code, error.reason, error.field) == (
        grpc.StatusCode.OUT_OF_RANGE, "CONTEXT_LENGTH_EXCEEDED", "prompts[0].text",
    )  # fmt: skip
    assert error.message == (
        "The prompt has at least 8 tokens; the context length is 8, output included."
    )
    with pytest.raises(ServiceError, match="at least"):
        _encode(embedded, longest * 4, replace(policy, infill=_INFILL, suffix=longest * 4))
    assert encoded == []


def test_error_of_a_slightly_long_text_has_its_exact_length(embedded: Vocabulary) -> None:
    with pytest.raises(ServiceError, match="The prompt has 9 tokens; the context length is 8"):
        _encode(embedded, "123456789", _POLICY)
    prompt = completion.Prompt(token_ids=types.TokenIds(ids=range(9)))
    with pytest.raises(
        ServiceError, match="The prompt has 9 tokens; the context length is 8"
    ) as caught:
        encode_prompt(embedded, prompt, "prompts[0]", _POLICY)
    assert caught.value.field == "prompts[0].token_ids.ids"


@given(_LONG, st.integers(0, 9), st.booleans())
@settings(max_examples=8)
def test_cut_prompt_equals_the_end_of_the_whole(
    embedded: Vocabulary,
    byte_fallback_vocabulary: Vocabulary,
    text: str,
    max_tokens: int,
    echo: bool,
) -> None:
    """Ids and texts are the same, though only the end of the text is encoded."""
    policy = replace(_POLICY, max_tokens=max_tokens, truncate=True, echo=echo)
    for vocabulary in (embedded, byte_fallback_vocabulary):
        read = vocabulary.end(text, policy.longest + 1)
        assert text.endswith(read)
        assert len(read) < len(text)
        whole = vocabulary.encode_with_offsets(text)
        head = 1 if vocabulary.adds_bos else 0
        kept = policy.longest_truncated - head
        encoded = _encode(vocabulary, text, policy)
        assert list(encoded.ids) == [*whole.ids[:head], *whole.ids[len(whole.ids) - kept :]]
        texts = split_by_tokens(text, whole)
        expected = [*texts[:head], *texts[len(texts) - kept :]] if echo else []
        assert list(encoded.texts) == expected


@given(_LONG, _LONG, st.sampled_from(["prefix", "suffix", "both"]))
@settings(max_examples=10)
def test_cut_infill_prompt_keeps_the_ids_next_to_the_gap(
    embedded: Vocabulary, before: str, after: str, long: str
) -> None:
    if long == "prefix":
        after = "x"
    elif long == "suffix":
        before = "x"
    policy = replace(_POLICY, truncate=True, infill=_INFILL, suffix=after)
    expected = assemble_infill(
        _INFILL,
        embedded.encode_plain(before),
        embedded.encode_continuation(after),
        policy.longest_truncated,
    )
    assert list(_encode(embedded, before, policy).ids) == expected
    ids = types.TokenIds(ids=embedded.encode_plain(before))
    prompt = completion.Prompt(token_ids=ids)
    assert list(encode_prompt(embedded, prompt, "prompts[0]", policy).ids) == expected


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Return a vocabulary whose longest token stands for much more text than the others."""
    tokenizer = byte_level(plain=("=" * 1_000,))
    return Vocabulary(write_checkpoint(tmp_path_factory.mktemp("sparse"), tokenizer))


def test_long_text_is_not_encoded_because_of_one_long_token(
    sparse: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its bytes the text may fit; encoding stops when it has too many tokens."""
    policy = replace(_POLICY, context_length=5_000)
    ruler = "=" * 1_000
    fits = f"{ruler}\nab" * 1_600  # 1.6 MB in three tokens a line
    assert len(_encode(sparse, fits, policy).ids) == 4_800
    encode, read = sparse.encode, 0

    def reading(text: str, *, add_special_tokens: bool = True) -> list[int]:
        nonlocal read
        read += len(text)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(sparse, "encode", reading)
    with pytest.raises(ServiceError, match="The prompt has at least 5,000 tokens"):
        _encode(sparse, "xyz\n" * 500_000, policy)
    assert read < 150_000
    cut = replace(policy, truncate=True)
    text = ruler * 500 + "xyz\n" * 500_000
    assert list(_encode(sparse, text, cut).ids) == encode(text)[-cut.longest_truncated :]
    assert read < len(text) // 2


@given(_LONG)
@settings(max_examples=20)
def test_long_text_with_few_tokens_is_accepted(sparse: Vocabulary, text: str) -> None:
    """The lower bound never exceeds the text's number of tokens."""
    text = ("=" * 1_000 + "\n") * 200 + text
    length = len(sparse.encode(text))
    assert sparse.least_tokens(text, length) <= length
    for enough in (100, 1_000, length - 1):
        assert sparse.least_tokens(text, enough) <= length


def test_text_without_lines_is_cut(embedded: Vocabulary) -> None:
    text = "x" * 200_000
    policy = replace(_POLICY, truncate=True)
    assert len(embedded.end(text, policy.longest)) < len(text) / 4
    kept = embedded.decode(_encode(embedded, text, policy).ids)
    assert len(kept) == policy.longest_truncated
    assert text.endswith("".join(kept))
