"""Incremental decoding: streamed text equals the tokenizer's, character by character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from services.tokenizer.text.detokenizer import (
    Detokenizer,
    TokenTable,
    UnsupportedDecoderError,
    token_table,
)
from services.tokenizer.text.vocabulary import Vocabulary
from tests.unit.tokenizer.checkpoints import byte_fallback, byte_level

_LEVEL, _FALLBACK = byte_level(plain=("<tool>",)), byte_fallback()
_LEVEL_IDS, _FALLBACK_IDS = _LEVEL.get_vocab(), _FALLBACK.get_vocab()


def _table_of(tokenizer: Tokenizer, decoder: dict[str, object]) -> TokenTable:
    added = tokenizer.get_added_tokens_decoder().items()
    specials = {index: token.content for index, token in added if token.special}
    size = tokenizer.get_vocab_size() + 2
    return token_table(tokenizer.get_vocab(), decoder, size).without(specials)


_LEVEL_TABLE = _table_of(_LEVEL, {"type": "ByteLevel"})
_FALLBACK_TABLE = _table_of(
    _FALLBACK,
    {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
)


def _ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40)


def _texts(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


@given(_ids(_LEVEL))
def test_any_ids_decode_as_in_the_tokenizer(ids: list[int]) -> None:
    """Streamed text would differ from whole text, such as on invalid UTF-8."""
    assert "".join(_texts(Detokenizer(_LEVEL_TABLE), ids)) == _LEVEL.decode(ids)


@given(st.text(max_size=60))
def test_text_round_trips_through_byte_level_tokens(text: str) -> None:
    ids = _LEVEL.encode(text, add_special_tokens=False).ids
    expected = _LEVEL.decode(ids)
    texts = _texts(Detokenizer(_LEVEL_TABLE), ids)
    assert "".join(texts) == expected
    assert texts[-1] == ""


@given(st.text(max_size=60))
def test_text_round_trips_through_byte_fallback(text: str) -> None:
    ids = _FALLBACK.encode(text).ids
    assert "".join(_texts(Detokenizer(_FALLBACK_TABLE), ids)) == _FALLBACK.decode(ids)


@given(_ids(_FALLBACK))
@settings(max_examples=300)
def test_byte_fallback_keeps_whole_characters_and_replaces_each_stray_byte(ids: list[int]) -> None:
    """The tokenizer does the same for a run of bytes that is all text, or has no character.

    A mixed run keeps its characters here, while the tokenizer would drop them afterwards.
    """
    expected, run, is_mixed = "", b"", False
    for token in [*ids, None]:
        name = "" if token is None else _FALLBACK.id_to_token(token) or ""
        if name.startswith("<0x"):
            run += bytes.fromhex(name[3:5])
        elif token is None or name not in ("<unk>", "<s>", "</s>"):
            decoded = _decode_bytes(run)
            is_mixed |= "\ufffd" in decoded and decoded.strip("\ufffd") != ""
            expected, run = expected + decoded + name.replace("▁", " "), b""
    expected = expected.removeprefix(" ")
    assert "".join(_texts(Detokenizer(_FALLBACK_TABLE), ids)) == expected
    assert is_mixed or _FALLBACK.decode(ids) == expected


def _decode_bytes(data: bytes) -> str:
    """Decode character by character; a byte that begins no character is U+FFFD."""
    text = ""
    while data:
        size = next((size for size in range(1, 5) if _is_text(data[:size])), 0)
        text += data[:size].decode() if size else "\ufffd"
        data = data[size or 1 :]
    return text


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(_ids(_LEVEL), st.integers(0, 40))
def test_output_after_a_prompt_equals_the_rest_of_the_whole(ids: list[int], cut: int) -> None:
    """A prompt may end inside a character, which the output then completes.

    A special token of the prompt ends the character, because an echo shows its text.
    """
    prompt, rest = ids[:cut], ids[cut:]
    alone = Detokenizer(_LEVEL_TABLE)
    for token in prompt:
        if alone.leaves_out(token):
            alone.flush()
        alone.feed(token)
    assert Detokenizer(_LEVEL_TABLE, prompt).is_inherited == alone.holds_back
    expected = [alone.feed(token) for token in rest]
    primed = Detokenizer(_LEVEL_TABLE, prompt)
    assert [primed.feed(token) for token in rest] == expected


@given(_ids(_LEVEL))
def test_peek_returns_what_feed_adds(ids: list[int]) -> None:
    """The chosen token's text would differ from its text as a candidate."""
    detokenizer = Detokenizer(_LEVEL_TABLE)
    for token in ids:
        foretold = detokenizer.peek(token)
        added = detokenizer.feed(token)
        assert foretold == (_LEVEL.id_to_token(token) if detokenizer.leaves_out(token) else added)


def test_token_that_completes_a_character_adds_all_of_it() -> None:
    detokenizer = Detokenizer(_LEVEL_TABLE)
    ids = [_LEVEL_IDS[character] for character in "ðŁĺĢ"]  # the bytes of 😀
    assert [detokenizer.feed(token) for token in ids] == ["", "", "", "😀"]
    assert not detokenizer.holds_back


def test_unfinished_character_is_the_prompts_until_a_token_continues_it() -> None:
    """A prompt that ends inside a character would show U+FFFD twice, or not at all."""
    first, second, third, _ = (_LEVEL_IDS[character] for character in "ðŁĺĢ")
    detokenizer = Detokenizer(_LEVEL_TABLE, [first, second])
    assert detokenizer.feed(_LEVEL_IDS["<s>"]) == ""
    assert detokenizer.is_inherited
    assert detokenizer.feed(third) == ""
    assert not detokenizer.is_inherited
    assert detokenizer.flush() == "\ufffd"
    assert Detokenizer(_LEVEL_TABLE, [first, second]).flush() == "\ufffd"


def test_invalid_bytes_are_replaced_as_they_arrive() -> None:
    """`DecodeStream` of `tokenizers` emits nothing for them, at quadratic cost."""
    detokenizer = Detokenizer(_LEVEL_TABLE)
    stray = _LEVEL_IDS["ĺ"]
    assert [detokenizer.feed(stray) for _ in range(5_000)] == ["\ufffd"] * 5_000


def test_leading_space_is_stripped_only_at_the_start_of_a_text() -> None:
    word = _FALLBACK_IDS["▁def"]
    begin = _FALLBACK_IDS["<s>"]
    assert Detokenizer(_FALLBACK_TABLE).feed(word) == "def"
    assert Detokenizer(_FALLBACK_TABLE, [begin]).feed(word) == "def"
    assert Detokenizer(_FALLBACK_TABLE, [begin, word]).feed(word) == " def"
    assert Detokenizer(_FALLBACK_TABLE, [begin], begins_text=False).feed(word) == " def"


def test_ids_without_a_token_add_nothing() -> None:
    assert Detokenizer(_LEVEL_TABLE).feed(_LEVEL.get_vocab_size() + 1) == ""


def test_error_names_an_unknown_decoder() -> None:
    with pytest.raises(UnsupportedDecoderError, match="CTC"):
        token_table({"a": 0}, {"type": "CTC"}, 1)


@pytest.mark.parametrize("cleanup", [True, False])
def test_word_pieces_decode_as_in_tokenizers(cleanup: bool) -> None:
    tokens = ["what", "'", "s", "a", "mutex", "##es", "?", ".", "n't", "'m", "[CLS]", "x"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    decoder = decoders.WordPiece(cleanup=cleanup)
    definition = {"type": "WordPiece", "prefix": "##", "cleanup": cleanup}
    table = token_table(vocabulary, definition, len(tokens))
    for ids in ([0, 3, 4, 5, 6], [4, 8, 9, 7], [10, 0, 3, 11, 5, 7], [3, 1, 2]):
        detokenizer = Detokenizer(table)
        mine = "".join(map(detokenizer.feed, ids)) + detokenizer.flush()
        assert mine == decoder.decode([tokens[index] for index in ids])


def test_vocabulary_decodes_special_tokens_on_request(vocabulary: Vocabulary) -> None:
    assert vocabulary.bos_id is not None
    ids = [vocabulary.bos_id, *vocabulary.encode_plain("def")]
    assert "".join(vocabulary.decode(ids)) == "def"
    assert "".join(vocabulary.decode(ids, skip_special_tokens=False)).startswith("<s>")
