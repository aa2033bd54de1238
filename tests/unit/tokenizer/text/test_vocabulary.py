"""The checkpoint's tokenizer: what a user types is never a control token, and ids have one name."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.settings import StartupError
from services.tokenizer.completion.prompt_encoding import split_by_tokens
from services.tokenizer.text.vocabulary import Vocabulary
from tests.unit.tokenizer.checkpoints import byte_level, write_checkpoint


@pytest.fixture(scope="module")
def steered(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """A vocabulary whose chat template writes a token that is not marked special."""
    tokenizer = byte_level(("<s>", "</s>", "<|im_start|>"), ("<tool_call>", "\n\n\n", "<h1>"))
    directory = tmp_path_factory.mktemp("steered")
    return Vocabulary(
        write_checkpoint(directory, tokenizer, chat_template="<|im_start|>{{x}}<tool_call>")
    )


@given(st.lists(st.sampled_from(["<s>", "</s>", "<|im_start|>", "<tool_call>", "a", " ", "<|"])))
def test_a_users_part_never_holds_a_control_token(steered: Vocabulary, parts: list[str]) -> None:
    vocabulary = steered
    control = {vocabulary.ids[token] for token in ("<s>", "</s>", "<|im_start|>", "<tool_call>")}
    ids = vocabulary.encode_plain("".join(parts))
    assert not control & set(ids)
    assert "".join(vocabulary.decode(ids, skip_special_tokens=False)) == "".join(parts)


def test_tokens_that_spell_text_stay_in_a_users_part(steered: Vocabulary) -> None:
    """Else HTML and blank lines would reach the model in tokens that it never saw for them."""
    ids = steered.encode_plain("<h1>\n\n\n")
    assert ids == [steered.ids["<h1>"], steered.ids["\n\n\n"]]


def test_breakers_are_the_tokens_that_contain_them(steered: Vocabulary) -> None:
    """By their text: a newline is one byte of many tokens, and no control token spells any."""
    texts = {token: "".join(steered.decode([token])) for token in steered.ids.values()}
    expected = [token for token, text in sorted(texts.items()) if "\n" in text or "h1" in text]
    assert list(steered.ids_containing(("\n", "h1"))) == expected
    assert steered.ids["\n\n\n"] in expected
    assert steered.ids_containing(("<|im_start|>",)) == ()


@given(st.lists(st.text(alphabet="abdefnrtu é\n<|>:", min_size=1, max_size=70), max_size=4))
def test_breakers_are_found_as_by_a_search_of_every_token(
    steered: Vocabulary, byte_fallback_vocabulary: Vocabulary, strings: list[str]
) -> None:
    """None across two tokens that only stand side by side, none missed."""
    for vocabulary in (steered, byte_fallback_vocabulary):
        pieces = vocabulary.table.pieces[: vocabulary.model_vocabulary_size]
        expected = tuple(
            token
            for token, piece in enumerate(pieces)
            if any(string.encode() in piece for string in strings)
        )
        assert vocabulary.ids_containing(tuple(strings)) == expected


@pytest.mark.parametrize(("adds", "expected"), [(True, 1), (False, 0), (None, 0)])
def test_the_configuration_decides_about_the_bos(
    adds: bool | None, expected: int, tmp_path: Path
) -> None:
    """As in transformers: without it, prompts of such models lack the BOS that they need."""
    config = {} if adds is None else {"add_bos_token": adds}
    vocabulary = Vocabulary(write_checkpoint(tmp_path, byte_level(), **config))
    assert vocabulary.adds_bos == bool(expected)
    assert vocabulary.encode("ab").count(vocabulary.ids["<s>"]) == expected


def test_ids_beyond_the_embedding_are_refused(tmp_path: Path) -> None:
    """Whoever added a token to the tokenizer alone would learn it from requests that fail."""
    tokenizer = byte_level(plain=("<mine>",))
    write_checkpoint(tmp_path, tokenizer)
    size = tokenizer.get_vocab_size()
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size}))
    Vocabulary(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size - 1}))
    with pytest.raises(StartupError, match=rf"tokenizer.json: .*'<mine>'.* {size - 1} "):
        Vocabulary(tmp_path)


@given(st.text(max_size=40))
def test_an_echoed_prompt_is_the_prompt(
    steered: Vocabulary, byte_fallback_vocabulary: Vocabulary, text: str
) -> None:
    """Split by tokens, it joins to the text verbatim: characters of several tokens, spaces that the
    tokenizer adds and the BOS included."""
    for vocabulary in (steered, byte_fallback_vocabulary):
        encoding = vocabulary.encode_with_offsets(text)
        texts = split_by_tokens(text, encoding)
        assert len(texts) == len(encoding.ids)
        if encoding.ids:
            assert "".join(texts) == text
        if encoding.ids and encoding.is_added[0] and len(encoding.ids) > 1:
            assert texts[0] == ""


def test_the_fingerprint_names_the_ids(tmp_path: Path) -> None:
    one = Vocabulary(write_checkpoint(tmp_path / "one", byte_level()))
    same = Vocabulary(write_checkpoint(tmp_path / "same", byte_level()))
    other = Vocabulary(write_checkpoint(tmp_path / "other", byte_level(("<s>", "</s>", "<x>"))))
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_a_directory_that_can_not_be_served_is_refused_in_one_sentence(tmp_path: Path) -> None:
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
