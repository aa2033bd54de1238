"""Lower bound of a text's tokens: it never exceeds the true number, with any tokenizer."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from services.tokenizer.text.vocabulary import Vocabulary
from tests.unit.tokenizer.checkpoints import byte_fallback, byte_level, write_checkpoint

# characters that normal forms shorten, texts of long tokens, special cases of tokenizers
_PARTS = ["a", " ", "\n", "▁", "é", "e\u0301", "\u212a", "\u1100\u1161\u11a8", "\U0001d400", "😀"]
_PARTS += ["\u0390", "<s>", "</s>", "K", "def", " return", "(:)", "字", "\u0308", "<b c>"]
_TEXTS = st.lists(st.one_of(st.sampled_from(_PARTS), st.text(max_size=3)), max_size=30)


def _normalized(form: normalizers.Normalizer) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = form
    tokenizer.add_tokens([AddedToken("<b c>", special=False, normalized=True)])
    return tokenizer


def _unigram() -> Tokenizer:
    spelled = [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    known = [("▁", -1.0), ("▁def", -2.0), ("a", -3.0), ("é", -3.0)]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *spelled, *known], 0, True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    return tokenizer


_KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "unigram": _unigram,
    "nfc": lambda: _normalized(normalizers.NFC()),
    "nfkc": lambda: _normalized(
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "replace": lambda: _normalized(normalizers.Replace("def", "d")),
}


@pytest.fixture(scope="module", params=_KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    directory = tmp_path_factory.mktemp("kind")
    return Vocabulary(write_checkpoint(directory, _KINDS[request.param]()))


@given(_TEXTS)
def test_text_has_at_least_the_bound_in_tokens(kind: Vocabulary, parts: list[str]) -> None:
    text = "".join(parts)
    assert kind.least_tokens(text, 2**31) <= len(kind.encode(text, add_special_tokens=False))
    assert kind.least_tokens(text, 2**31) <= len(kind.encode_plain(text))
    assert kind.least_tokens(text, 2**31) <= len(kind.encode_parts([("a", False), (text, True)]))


def test_text_of_the_longest_token_counts_as_one_token(embedded_model: Path) -> None:
    """The bound is tight, so that texts that are too long are refused before encoding."""
    vocabulary = Vocabulary(embedded_model)
    longest = max(vocabulary.full_table.pieces, key=len)
    assert vocabulary.bytes_per_token == len(longest)
    assert vocabulary.least_tokens(longest.decode(), 9) == 1
    assert vocabulary.least_tokens(longest.decode() + "x", 9) == 2
    assert vocabulary.least_tokens("", 9) == 0


def _dropping(kind: str) -> Tokenizer:
    tokenizer = byte_level()
    if kind == "stripping token":
        tokenizer.add_tokens([AddedToken("<x>", rstrip=True)])
    elif kind == "normalizer":
        tokenizer.normalizer = normalizers.Strip()
    elif kind == "pattern":
        tokenizer.normalizer = normalizers.Replace("def", "")
    elif kind == "pre-tokenizer":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
        )
    elif kind == "unknown":
        tokenizer = byte_fallback()
        tokenizer.model.byte_fallback = False
    return tokenizer


def test_bound_is_much_larger_if_the_tokenizer_may_drop_text(tmp_path: Path) -> None:
    """No bound holds then: blanks that a token strips are text without tokens."""
    plain = Vocabulary(write_checkpoint(tmp_path / "plain", byte_level())).bytes_per_token
    for kind in ("stripping token", "normalizer", "pattern", "pre-tokenizer", "unknown"):
        vocabulary = Vocabulary(write_checkpoint(tmp_path / kind, _dropping(kind)))
        assert vocabulary.bytes_per_token >= 8 * plain
