"""Tokenizer of a checkpoint: control tokens, breakers, BOS, echoes, unusable files."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.settings import StartupError
from services.tokenizer.completion.prompt_encoding import split_by_tokens
from services.tokenizer.text.vocabulary import Vocabulary
from tests.unit.tokenizer.checkpoints import byte_level, write_checkpoint


@pytest.fixture(scope="module")
def steered(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Return a vocabulary whose chat template writes a token that is not special."""
    tokenizer = byte_level(("<s>", "</s>", "<|im_start|>"), ("<tool_call>", "\n\n\n", "<h1>"))
    directory = tmp_path_factory.mktemp("steered")
    return Vocabulary(
        write_checkpoint(directory, tokenizer, chat_template="<|im_start|>{{x}}<tool_call>")
    )


@given(st.lists(st.sampled_from(["<s>", "</s>", "<|im_start|>", "<tool_call>", "a", " ", "<|"])))
def test_user_text_never_becomes_a_control_token(steered: Vocabulary, parts: list[str]) -> None:
    vocabulary = steered
    control = {vocabulary.ids[token] for token in ("<s>", "</s>", "<|im_start|>", "<tool_call>")}
    ids = vocabulary.encode_plain("".join(parts))
    assert not control & set(ids)
    assert "".join(vocabulary.decode(ids, skip_special_tokens=False)) == "".join(parts)


def test_added_tokens_that_spell_text_stay_in_user_text(steered: Vocabulary) -> None:
    """HTML and blank lines would reach the model in tokens that it never saw for them."""
    ids = steered.encode_plain("<h1>\n\n\n")
    assert ids == [steered.ids["<h1>"], steered.ids["\n\n\n"]]


def test_ids_containing_a_string_are_found_by_their_text(steered: Vocabulary) -> None:
    """Many tokens contain a newline; control tokens spell no text."""
    texts = {token: "".join(steered.decode([token])) for token in steered.ids.values()}
    expected = [token for token, text in sorted(texts.items()) if "\n" in text or "h1" in text]
    assert list(steered.ids_containing(("\n", "h1"))) == expected
    assert steered.ids["\n\n\n"] in expected
    assert steered.ids_containing(("<|im_start|>",)) == ()


@given(st.lists(st.text(alphabet="abdefnrtu é\n<|>:", min_size=1, max_size=70), max_size=4))
def test_search_finds_the_same_ids_as_a_search_of_every_token(
    steered: Vocabulary, byte_fallback_vocabulary: Vocabulary, strings: list[str]
) -> None:
    """A match across two neighbours of the joined pieces does not count."""
    for vocabulary in (steered, byte_fallback_vocabulary):
        pieces = vocabulary.table.pieces[: vocabulary.model_vocabulary_size]
        expected = tuple(
            token
            for token, piece in enumerate(pieces)
            if any(string.encode() in piece for string in strings)
        )
        assert vocabulary.ids_containing(tuple(strings)) == expected


@pytest.mark.parametrize(("adds", "expected"), [(True, 1), (False, 0), (None, 0)])
def test_configuration_decides_whether_a_bos_is_added(
    adds: bool | None, expected: int, tmp_path: Path
) -> None:
    """As in transformers; prompts of such models would lack the BOS that they need."""
    config: dict[str, Any] = {} if adds is None else {"add_bos_token": adds}
    vocabulary = Vocabulary(write_checkpoint(tmp_path, byte_level(), **config))
    assert vocabulary.adds_bos == bool(expected)
    assert vocabulary.encode("ab").count(vocabulary.ids["<s>"]) == expected


def test_ids_above_the_embedding_size_are_refused(tmp_path: Path) -> None:
    """A token that only the tokenizer has would make requests fail."""
    tokenizer = byte_level(plain=("<mine>",))
    write_checkpoint(tmp_path, tokenizer)
    size = tokenizer.get_vocab_size()
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size}))
    Vocabulary(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size - 1}))
    with pytest.raises(StartupError, match=rf"tokenizer.json: .*'<mine>'.* {size - 1} "):
        Vocabulary(tmp_path)


@given(st.text(max_size=40))
def test_texts_of_tokens_join_to_the_prompt(
    steered: Vocabulary, byte_fallback_vocabulary: Vocabulary, text: str
) -> None:
    """The prompt may have characters of several tokens, added spaces and an added BOS."""
    for vocabulary in (steered, byte_fallback_vocabulary):
        encoding = vocabulary.encode_with_offsets(text)
        texts = split_by_tokens(text, encoding)
        assert len(texts) == len(encoding.ids)
        if encoding.ids:
            assert "".join(texts) == text
        if encoding.ids and encoding.is_added[0] and len(encoding.ids) > 1:
            assert texts[0] == ""


def test_fingerprint_depends_on_the_tokenizer_alone(tmp_path: Path) -> None:
    one = Vocabulary(write_checkpoint(tmp_path / "one", byte_level()))
    same = Vocabulary(write_checkpoint(tmp_path / "same", byte_level()))
    other = Vocabulary(write_checkpoint(tmp_path / "other", byte_level(("<s>", "</s>", "<x>"))))
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_unusable_directory_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no tokenizer\.json"):
        Vocabulary(tmp_path)
    directory = write_checkpoint(tmp_path, byte_level())
    (directory / "config.json").write_text("[")
    with pytest.raises(StartupError, match="is not JSON"):
        Vocabulary(directory)
    (directory / "config.json").write_text("{}")
    definition = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps({**definition, "decoder": None}))
    with pytest.raises(StartupError, match="has no decoder"):
        Vocabulary(directory)
