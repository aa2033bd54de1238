"""Encoding of queries and documents of ColBERT checkpoints, against sentence-transformers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import MultiVectorEncoder

from services.common.settings import StartupError
from services.tokenizer.embedding.late_interaction import LateInteraction
from services.tokenizer.embedding.text_encoding import TextEncoder
from services.tokenizer.embedding.text_roles import TextRole
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.vocabulary import Vocabulary
from tests.text_models import CONTEXT, make_colbert, make_embedder

TEXTS = ["What is a mutex?", "a lock.", "the keys, the keys " * 5, "fruit"]


def encoded(path: Path, role: TextRole) -> list[tuple[list[int], int]]:
    """Return the ids of each text, and how many at the end are hidden from the others."""
    limits = ModelLimits("m", "", CONTEXT, 99, (), (), 0, 0, 8, 0, False, token_width=16)
    encoder = TextEncoder(Vocabulary(path), limits, None, None, role)
    prompts = encoder.encode_texts(TEXTS, [f"inputs[{place}]" for place in range(len(TEXTS))])
    return [([*each.ids], each.unattended_length) for each in prompts]


def check(path: Path) -> LateInteraction:
    """Require the ids, the attention and the scored tokens of sentence-transformers."""
    model = MultiVectorEncoder(str(path), device="cpu")
    late = LateInteraction(path, Vocabulary(path))
    for task, role in (("query", late.query), ("document", late.document)):
        for text, (ids, hidden) in zip(TEXTS, encoded(path, role), strict=True):
            features = model.preprocess([text], prompt=model.prompts.get(task), task=task)
            assert features["input_ids"][0].tolist() == ids
            attended = features["attention_mask"][0].tolist()
            assert attended == [1] * (len(ids) - hidden) + [0] * hidden
            mask = model(features, task=task)["attention_mask"][0].bool().tolist()
            assert mask == role.keeps(ids)
    return late


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"attend_to_expansion_tokens": True},
        {"do_query_expansion": False},
        {"skiplist_words": None, "document_length": CONTEXT},
        {"query_prefix": "", "document_prefix": "the "},
        {"query_prefix": "query: ", "document_prefix": "[X] "},
    ],
)
def test_pylate_checkpoint_is_encoded_as_its_config_says(
    values: dict[str, Any], tmp_path: Path
) -> None:
    check(make_colbert(tmp_path / "colbert", **values))


@pytest.mark.parametrize("strategy", ["fixed", "min"])
def test_checkpoint_of_sentence_transformers_is_encoded_as_its_modules_say(
    strategy: str, tmp_path: Path
) -> None:
    model = MultiVectorEncoder(str(make_colbert(tmp_path / "colbert")), device="cpu")
    transformer: Any = model[0]
    expansion = {"strategy": strategy, "attend": True, "length": 9, "token": "[SEP]"}
    transformer.query_expansion = expansion
    model.similarity_fn_name = "meanmaxsim"
    model.save(str(tmp_path / "saved"))
    shutil.rmtree(tmp_path / "colbert")
    assert check(tmp_path / "saved").averages


@pytest.mark.parametrize("metadata", [None, {"doc_maxlen": 15, "query_maxlen": 9}])
def test_colbert_ir_checkpoint_is_encoded_as_its_metadata_say(
    metadata: dict[str, Any] | None, tmp_path: Path
) -> None:
    path = make_colbert(tmp_path)
    for name in ("modules.json", "config_sentence_transformers.json"):
        (path / name).unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    if metadata is not None:
        metadata = {**metadata, "query_token_id": "[MASK]", "doc_token_id": "[PAD]"}
        (path / "artifact.metadata").write_text(json.dumps(metadata))
    (path / "1_Dense/model.safetensors").rename(path / "linear.safetensors")
    late = LateInteraction(path, Vocabulary(path))
    length = 32 if metadata is None else 9
    assert late.query.most == length
    if metadata is None:
        assert (late.query.prefix, late.query.marker) == ("[unused0] ", None)
        return
    ids = [ids for ids, _ in encoded(path, late.document)]
    vocabulary = Vocabulary(path).ids
    assert [len(each) for each in ids] == [8, 6, 15, 4]
    assert {each[1] for each in ids} == {vocabulary["[PAD]"]}
    assert late.document.keeps([vocabulary["?"], vocabulary["lock"]]) == [False, True]


def test_other_checkpoints_have_plain_roles(tmp_path: Path) -> None:
    path = make_embedder(tmp_path)
    late = LateInteraction(path, Vocabulary(path))
    assert late.query.expansion is None
    assert (late.document.most, late.document.marker) == (None, None)


def test_decoder_is_refused_if_no_token_may_attend_to_the_expansion(tmp_path: Path) -> None:
    """Otherwise, it would start, and refuse each short query."""
    limits = ModelLimits("m", "", CONTEXT, 99, (), (), 0, 0, 8, 0, False, token_width=16)
    path = make_colbert(tmp_path / "hidden")
    late = LateInteraction(path, Vocabulary(path))
    late.check(replace(limits, hides_ends=True))
    late.check(replace(limits, vector_width=16))
    with pytest.raises(StartupError, match="to which no token attends"):
        late.check(limits)
    path = make_colbert(tmp_path / "attended", attend_to_expansion_tokens=True)
    LateInteraction(path, Vocabulary(path)).check(limits)


FIXED = {"strategy": "fixed", "length": 8}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"query_length": 0}, "query_length must be an integer of at least 1"),
        ({"document_length": 2}, "the length 2 of a document leaves no room"),
        ({"skiplist_words": "?"}, "skiplist_words must be a list"),
        ({"skiplist_words": [7]}, "skiplist_words must be a list of strings"),
        ({"query_prefix": 7}, "query_prefix must be a string"),
        ({"prompts": {"query": 7}}, "prompts.query must be a string"),
        ({"do_query_expansion": "false"}, "do_query_expansion must be true or false"),
        ({"attend_to_expansion_tokens": "no"}, "attend_to_expansion_tokens must be true or false"),
        ({"query_expansion": 3}, "query_expansion must be an object"),
        ({"query_expansion": {"strategy": "fixed"}}, "query_expansion.length is missing"),
        ({"query_expansion": {"length": 8}}, "query_expansion.strategy must be one of fixed, min"),
        ({"query_expansion": {**FIXED, "attend": 1}}, "query_expansion.attend must be true"),
        ({"query_expansion": {**FIXED, "token": "[Z]"}}, "the tokenizer has no token for it"),
    ],
)
def test_wrong_value_is_named_at_the_start(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = make_colbert(tmp_path, **values)
    with pytest.raises(StartupError, match=message.replace("[", r"\[")):
        LateInteraction(path, Vocabulary(path))


def test_error_names_the_file_and_the_key_that_it_is_about(tmp_path: Path) -> None:
    path = make_colbert(tmp_path)
    (path / "sentence_bert_config.json").write_text('{"query_expansion": 3}')
    with pytest.raises(StartupError, match=r"sentence_bert_config\.json: query_expansion"):
        LateInteraction(path, Vocabulary(path))
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (path / name).unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    (path / "artifact.metadata").write_text('{"query_maxlen": 0}')
    with pytest.raises(StartupError, match=r"artifact\.metadata: query_maxlen must be"):
        LateInteraction(path, Vocabulary(path))


def test_weights_of_a_vocabulary_are_multiplied(tmp_path: Path) -> None:
    """As sentence-transformers' SparseEncoder does, unless its file says otherwise."""
    path = make_embedder(tmp_path)
    assert not LateInteraction(path, Vocabulary(path)).multiplies
    (path / "modules.json").write_text('[{"type": "a.SpladePooling", "path": "1_Pooling"}]')
    assert LateInteraction(path, Vocabulary(path)).multiplies
    config = {"similarity_fn_name": "cosine"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(config))
    assert not LateInteraction(path, Vocabulary(path)).multiplies
