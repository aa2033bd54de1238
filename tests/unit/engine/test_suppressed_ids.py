"""Ids that a checkpoint suppresses: marks of images among them would end up in answers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from services.engine.engine import Engine
from services.engine.messages import Mask, SetMasks
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.generation import load_suppressed_ids
from services.engine.model_description import SuppressedIds
from services.engine.settings import EngineSettings
from tests.unit.engine.tiny import (
    VOCABULARY,
    load_tiny,
    make_checkpoint,
    make_loop,
    make_request,
    mask_of,
    run,
    tokens_of,
)

PROMPT, LENGTH = [5, 7, 11, 13], 24
SETTINGS = EngineSettings(dtype="float32", device="cpu", kv_memory="1MiB")


def reference_tokens(model: Path) -> list[int]:
    """Return the greedy answer of transformers, which reads generation_config.json."""
    loaded = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = loaded.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)),
        min_new_tokens=LENGTH,
        max_new_tokens=LENGTH,
        pad_token_id=0,
    )
    tokens: list[int] = made[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.parametrize("speculate", ["off", "ngram", "draft"])
def test_greedy_answer_equals_that_of_transformers(speculate: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path)
    draft = str(make_checkpoint(tmp_path / "draft")) if speculate == "draft" else ""
    settings = replace(SETTINGS, draft=draft, speculate="auto" if draft else speculate)
    suppressed: list[int] = []
    for _ in range(3):
        plain = reference_tokens(model)
        suppressed += [plain[2], plain[5]]
        values = {"suppress_tokens": suppressed, "begin_suppress_tokens": [plain[0]]}
        (model / "generation_config.json").write_text(json.dumps(values))
        expected = reference_tokens(model)
        assert expected != plain
        with Engine(model, settings) as engine:
            for logprobs in (None, 0):
                answer = engine.generate(
                    PROMPT, max_tokens=LENGTH, temperature=0, ignore_eos=True, logprobs=logprobs
                )
                assert answer.token_ids == expected


def test_sampled_answers_lack_suppressed_ids(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path)
    allowed = {3, 4, 9}
    suppressed = [token for token in range(VOCABULARY) if token not in allowed]
    values = {"suppress_tokens": suppressed, "begin_suppress_tokens": [4, 9]}
    (model / "generation_config.json").write_text(json.dumps(values))
    with Engine(model, SETTINGS) as engine:
        answers = [
            engine.generate(PROMPT, max_tokens=40, temperature=1.5, seed=seed, ignore_eos=True)
            for seed in range(4)
        ]
    for answer in answers:
        assert answer.token_ids[0] == 3
        assert {*answer.token_ids} <= allowed
    assert {4, 9} <= {token for answer in answers for token in answer.token_ids}


def test_grammar_that_allows_only_suppressed_ids_gets_one(tmp_path: Path) -> None:
    request = make_request(1, [PROMPT], max_tokens=1, constrained=True)
    sampling = replace(request.checked.sampling, suppressed=(8, 9))
    request = replace(request, checked=replace(request.checked, sampling=sampling))
    masks = SetMasks([Mask(1, 0, 0, (), mask_of({8}), terminated=False)])
    loop = make_loop(load_tiny(tmp_path))
    assert tokens_of(run(loop, [request, masks])) == {(1, 0): [8]}


def test_ids_are_read_from_either_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"suppress_tokens": [7, -1, 99, 3], "pad": 1}')
    assert load_suppressed_ids(tmp_path, 99) == SuppressedIds((3, 7), ())
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"suppress_tokens": [2], "begin_suppress_tokens": [1]}')
    assert load_suppressed_ids(tmp_path, 99) == SuppressedIds((2,), (1,))
    generation.write_text('{"suppress_tokens": "no"}')
    with pytest.raises(CheckpointError, match="suppress_tokens"):
        load_suppressed_ids(tmp_path, 99)
