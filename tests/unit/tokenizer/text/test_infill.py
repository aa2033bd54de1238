"""Infill prompts: the order of every family, and no control token from a user's text."""

from pathlib import Path

import pytest

from services.tokenizer.text.infill import (
    INFILL_FAMILIES,
    InfillFamily,
    InfillOrder,
    InfillTemplate,
    assemble_infill,
    detect_infill,
)
from services.tokenizer.text.vocabulary import Vocabulary
from tests.unit.tokenizer.checkpoints import byte_fallback, byte_level, write_checkpoint

_P, _S = [7, 8], [9]
_ORDERS: dict[str, list[str | list[int]]] = {
    "qwen": ["<|fim_prefix|>", _P, "<|fim_suffix|>", _S, "<|fim_middle|>"],
    "starcoder": ["<fim_prefix>", _P, "<fim_suffix>", _S, "<fim_middle>"],
    "codellama": ["<s>", "▁<PRE>", _P, "▁<SUF>", _S, "▁<MID>"],
    "deepseek": ["<｜fim▁begin｜>", _P, "<｜fim▁hole｜>", _S, "<｜fim▁end｜>"],
    "codestral": ["<s>", "[SUFFIX]", _S, "[PREFIX]", _P],
}


def _tokens(family: InfillFamily) -> tuple[str, ...]:
    return tuple(filter(None, (family.prefix, family.suffix, family.middle, *family.stops)))


@pytest.mark.parametrize("family", INFILL_FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_each_family_is_detected_and_assembled_in_its_order(
    family: InfillFamily, special: bool, tmp_path: Path
) -> None:
    """A model writes nonsense if the order differs from its training."""
    tokens = _tokens(family)
    tokenizer = (
        byte_level(("<s>", "</s>", *tokens)) if special else byte_level(("<s>", "</s>"), tokens)
    )
    vocabulary = Vocabulary(write_checkpoint(tmp_path, tokenizer))
    template = detect_infill(vocabulary.ids, vocabulary.bos_id, INFILL_FAMILIES)
    assert template is not None
    assert template.family == family.name
    assert set(template.stop_ids) == {vocabulary.ids[stop] for stop in family.stops}
    expected: list[int] = []
    for part in _ORDERS[family.name]:
        expected += [vocabulary.ids[part]] if isinstance(part, str) else part
    assert assemble_infill(template, _P, _S) == expected
    text = "def " + "".join(tokens)
    assert not set(vocabulary.encode_plain(text)) & {vocabulary.ids[token] for token in tokens}
    assert vocabulary.ids[tokens[0]] in vocabulary.encode(text)


def test_vocabulary_without_infill_tokens_has_no_template(vocabulary: Vocabulary) -> None:
    assert detect_infill(vocabulary.ids, vocabulary.bos_id, INFILL_FAMILIES) is None


def test_cut_takes_the_ids_farthest_from_the_gap() -> None:
    template = InfillTemplate("x", InfillOrder.PREFIX_SUFFIX_MIDDLE, 1, 2, 3, None, ())
    prefix, suffix = list(range(100, 120)), list(range(200, 220))
    ids = assemble_infill(template, prefix, suffix, limit=23)
    assert ids == [1, *prefix[-15:], 2, *suffix[:5], 3]
    assert len(assemble_infill(template, prefix[:2], suffix, limit=23)) == 23
    assert assemble_infill(template, prefix, suffix, limit=2) == [1, 2, 3]


def test_no_space_is_added_before_a_suffix(tmp_path: Path) -> None:
    """A tokenizer that prepends a space would put one into the middle of the file."""
    vocabulary = Vocabulary(write_checkpoint(tmp_path, byte_fallback()))
    assert "".join(vocabulary.decode([5, *vocabulary.encode_continuation("def")])).endswith("def")
    assert vocabulary.encode_plain("def")[0] == vocabulary.ids["▁def"]
    assert vocabulary.encode_continuation("def") == [vocabulary.ids[letter] for letter in "def"]
