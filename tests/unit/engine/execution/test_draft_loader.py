"""Start of an engine with a draft model: what it loads, and what it refuses in one sentence."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from services.common.settings import StartupError
from services.engine import start_check
from services.engine.engine import Engine
from services.engine.execution.draft_vocabulary import find_difference
from services.engine.settings import EngineSettings
from services.engine.start_check import check_start, needed_bytes
from tests.text_models import make_embedder
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint as make_family
from tests.unit.engine.eagle import make_eagle, make_repeater
from tests.unit.engine.tiny import VOCABULARY, make_checkpoint

SETTINGS = EngineSettings(dtype="float32", device="cpu", kv_memory="1MiB", max_running=4)


def write_tokenizer(
    directory: Path, texts: Mapping[str, int], added: Mapping[str, int] | None = None
) -> Path:
    """Write a tokenizer.json of these texts. added: texts and ids of its added tokens."""
    directory.mkdir(exist_ok=True)
    tokens = [{"id": token, "content": text} for text, token in (added or {}).items()]
    tokenizer = {"model": {"vocab": dict(texts)}, "added_tokens": tokens}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def test_engine_with_its_own_weights_as_draft_answers_in_fewer_steps(tmp_path: Path) -> None:
    model, draft = make_checkpoint(tmp_path / "model"), make_checkpoint(tmp_path / "draft")
    answers, counts = [], []
    for path in ("", str(draft)):
        with Engine(model, replace(SETTINGS, draft=path)) as engine:
            requests = [
                engine.generate([5, 7, 11, token], max_tokens=80, temperature=0, ignore_eos=True)
                for token in range(1, 9)
            ]
            answers.append([each.token_ids for each in requests])
            counts.append(engine.loaded.steps.take_output().load.drafts)
    assert answers[0] == answers[1]
    assert counts[0] == ()
    assert counts[1][0].source == "draft_model"
    assert counts[1][0].accepted == counts[1][0].drafted > 0


def drafted_token(head: Path) -> int:
    """Return an id that a head drafts."""
    return int(load_file(head / "model.safetensors")["t2d"].nonzero()[-1])


def test_engine_with_an_eagle_head_answers_in_fewer_steps(tmp_path: Path) -> None:
    model = make_repeater(tmp_path / "model", make_checkpoint(tmp_path / "random"))
    head = make_eagle(tmp_path / "head", model, repeats=True)
    settings = replace(SETTINGS, model=model, draft=str(head))
    check_start(settings)
    assert needed_bytes(settings) > needed_bytes(replace(settings, draft=""))
    with Engine(model, settings) as engine, Engine(model, SETTINGS) as plain:
        token = drafted_token(head)
        for prompt in ([5, token], [5, 7, 11, token]):
            answers = [
                each.generate(prompt, max_tokens=80, temperature=0, ignore_eos=True).token_ids
                for each in (engine, plain)
            ]
            assert answers[0] == answers[1] == 80 * [token]
        [count] = engine.loaded.steps.take_output().load.drafts
        assert count.source == "eagle"
        assert count.accepted == count.drafted > 0
        assert engine.model.pool_bytes[0] == 1.5 * plain.model.pool_bytes[0]


def test_heads_of_other_models_are_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    head = make_eagle(tmp_path / "head", model, more={"eagle_config": {}})
    with pytest.raises(StartupError, match=r"--draft .*the model has 2 layers") as error:
        Engine(model, replace(SETTINGS, draft=str(head)))
    assert "\n" not in str(error.value)
    make_eagle(head, model, without=("norm.weight",))
    with pytest.raises(StartupError, match=r"--draft .*no file holds the tensor norm.weight"):
        Engine(model, replace(SETTINGS, draft=str(head)))


def test_model_whose_residual_is_no_sum_takes_no_head(tmp_path: Path) -> None:
    head = make_eagle(tmp_path / "head", make_checkpoint(tmp_path / "model"))
    make_family(tmp_path / "gpt2", CONFIGS["gpt2"])
    with pytest.raises(StartupError, match="no plain sums of its layers"):
        Engine(tmp_path / "gpt2", replace(SETTINGS, draft=str(head)))


def test_pages_of_the_draft_model_count_in_the_memory_of_the_cache(tmp_path: Path) -> None:
    """Else an engine would take more memory than --kv-memory states."""
    model, draft = make_checkpoint(tmp_path / "model"), make_checkpoint(tmp_path / "draft")
    settings = replace(SETTINGS, kv_memory="128KiB")
    with Engine(model, settings) as one, Engine(model, replace(settings, draft=str(draft))) as two:
        assert 0 < two.model.total_blocks <= one.model.total_blocks // 2
        assert two.model.kv_bytes <= 128 << 10
        assert two.model.pool_bytes[0] == 2 * one.model.pool_bytes[0]


def test_weights_of_the_draft_model_count_in_the_memory_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft = make_checkpoint(tmp_path / "model"), make_checkpoint(tmp_path / "draft")
    settings = replace(SETTINGS, model=model, kv_memory="1KiB")
    both = replace(settings, draft=str(draft))
    weights = needed_bytes(both) - needed_bytes(settings)
    assert weights == needed_bytes(settings) - 1024
    monkeypatch.setattr(start_check, "free_host_memory", lambda: 2 * weights + 1024)
    check_start(both)
    monkeypatch.setattr(start_check, "free_host_memory", lambda: 2 * weights - 1)
    check_start(settings)
    with pytest.raises(StartupError, match=r"weights of --draft .*; 1 bytes of memory"):
        check_start(both)


@pytest.mark.parametrize(
    ("model", "draft", "reason"),
    [
        ("llama", "mamba2", "has recurrent layers"),
        ("mistral, window", "llama", "all layers of this one have windows"),
    ],
)
def test_models_that_cannot_draft_are_refused(
    model: str, draft: str, reason: str, tmp_path: Path
) -> None:
    for name in (model, draft):
        make_family(tmp_path / name, CONFIGS[name])
    settings = replace(SETTINGS, draft=str(tmp_path / draft))
    with pytest.raises(StartupError, match=reason) as error:
        Engine(tmp_path / model, settings)
    assert "\n" not in str(error.value)


def test_encoders_neither_draft_nor_take_drafts(tmp_path: Path) -> None:
    encoder, model = make_embedder(tmp_path / "encoder"), make_checkpoint(tmp_path / "model")
    with pytest.raises(StartupError, match="generates no tokens"):
        Engine(model, replace(SETTINGS, draft=str(encoder)))
    with pytest.raises(StartupError, match="--draft is for models that generate"):
        Engine(encoder, replace(SETTINGS, draft=str(model)))


def test_path_without_a_model_is_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    with pytest.raises(StartupError, match=r"--draft .*missing"):
        check_start(replace(SETTINGS, model=model, draft=str(tmp_path / "missing")))


def test_draft_model_without_speculation_is_refused() -> None:
    with pytest.raises(StartupError, match="--speculate off"):
        EngineSettings(speculate="off", draft="small")


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    sizes = make_checkpoint(tmp_path / "sizes", vocabulary=VOCABULARY + 1)
    with pytest.raises(StartupError, match="another vocabulary: it has 49 ids, and not 48"):
        Engine(model, replace(SETTINGS, draft=str(sizes)))
    write_tokenizer(model, {"a": 1, "b": 2, "c": 3})
    write_tokenizer(sizes, {"a": 1, "d": 2, "c": 3})
    with pytest.raises(StartupError, match="another vocabulary: id 2 is 'd', and not 'b'"):
        Engine(model, replace(SETTINGS, draft=str(sizes)))
    write_tokenizer(sizes, {"a": 1, "b": 2, "c": 3, "d": 4})
    Engine(model, replace(SETTINGS, draft=str(sizes))).close()


def test_vocabularies_are_equal_up_to_added_tokens_and_padding(tmp_path: Path) -> None:
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    write_tokenizer(first, {"a": 0, "b": 1, "<x>": 2}, {"<x>": 2, "<y>": 3})
    write_tokenizer(second, {"a": 0, "b": 1, "<z>": 2}, {"<z>": 2})
    assert find_difference(first, second, (4, 64)) is None
    write_tokenizer(third, {"a": 1, "b": 0})
    assert find_difference(first, third, (4, 4)) == "id 0 is 'a', and not 'b'"
    write_tokenizer(third, {"a": 0} | {f"t{i}": 9 + i for i in range(9)})
    assert find_difference(first, third, (4, 64)) == "it has 2 tokens, and not 10"
    unigram = {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}
    (third / "tokenizer.json").write_text(json.dumps(unigram))
    assert find_difference(first, third, (4, 4)) is None
