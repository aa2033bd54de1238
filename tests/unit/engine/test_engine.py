"""The engine in the process of a script."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.engine.engine import Engine, GenerateOptions
from services.engine.messages import FinishCause, RequestDone, Score, Token
from services.engine.settings import EngineSettings
from tests.unit.engine.tiny import CONTEXT, VOCABULARY, make_checkpoint
from tokenwire.errors import ServiceError

PROMPT = [5, 7, 11, 13]
SETTINGS = EngineSettings(dtype="float32", device="cpu", kv_memory="1MiB")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(checkpoint, SETTINGS) as engine:
        yield engine


def test_greedy_tokens_and_their_scores_are_those_of_the_model(engine: Engine) -> None:
    answer = engine.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)
    known = engine.log_probabilities([*PROMPT, *answer.token_ids])
    assert known.shape == (len(PROMPT) + 6, VOCABULARY)
    rows = known[len(PROMPT) - 1 : -1]
    assert answer.token_ids == rows.argmax(-1).tolist()
    assert answer.finish is FinishCause.LENGTH
    found = [score.logprob for score in answer.scores]
    assert found == pytest.approx(rows.max(-1).values.tolist(), abs=1e-4)


def test_prompt_is_scored_without_generating(engine: Engine) -> None:
    answer = engine.generate(PROMPT, max_tokens=0, prompt_logprobs=2)
    known = engine.log_probabilities(PROMPT)
    assert answer.token_ids == []
    found = [score.logprob for score in answer.prompt_scores]
    expected = [known[i, token].item() for i, token in enumerate(PROMPT[1:])]
    assert found == pytest.approx(expected, abs=1e-4)
    assert all(len(score.top_ids) == 2 for score in answer.prompt_scores)


def test_same_seed_gives_the_same_tokens(engine: Engine) -> None:
    first, second = (engine.generate(PROMPT, seed=3, ignore_eos=True) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert len(first.token_ids) == 16


def test_requests_side_by_side_generate_what_each_generates_alone(engine: Engine) -> None:
    prompts = [[3, 1, 4], [1, 5, 9, 2], [6]]
    alone = [engine.generate(p, temperature=0, ignore_eos=True).token_ids for p in prompts]
    handles = [engine.submit(prompt, temperature=0, ignore_eos=True) for prompt in prompts]
    together: dict[int, list[int]] = {handle: [] for handle in handles}
    unfinished = set(handles)
    while unfinished:
        for output in engine.step():
            if isinstance(output, Token):
                together[output.handle].append(output.id)
            elif isinstance(output, RequestDone):
                unfinished.remove(output.handle)
    assert list(together.values()) == alone


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="oneDNN has no such kernels for this CPU",
)
def test_scores_in_float32_are_to_the_bit_those_without_other_requests(engine: Engine) -> None:
    """A draw between two tokens would turn out differently beside other requests."""
    prompts = [[3, 1, 4], [1, 5, 9, 2], [6], [8, 2, 7, 5], [3, 3]]
    options = GenerateOptions(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    alone = [engine.generate(p, **options).scores for p in prompts]
    handles = [engine.submit(prompt, **options) for prompt in prompts]
    scores: dict[int, list[Score]] = {handle: [] for handle in handles}
    running = set(handles)
    while running:
        for output in engine.step():
            if isinstance(output, Token) and output.score is not None:
                scores[output.handle].append(output.score)
            elif isinstance(output, RequestDone):
                running.discard(output.handle)
    for handle, expected in zip(handles, alone, strict=True):
        assert [score.logprob for score in scores[handle]] == [s.logprob for s in expected]


def test_stop_token_ends_a_sequence(engine: Engine) -> None:
    free = engine.generate(PROMPT, temperature=0, ignore_eos=True).token_ids
    stopped = engine.generate(PROMPT, temperature=0, ignore_eos=True, stop_token_ids=[free[2]])
    assert stopped.finish is FinishCause.STOP_TOKEN
    assert stopped.token_ids == free[: free.index(free[2]) + 1]


@pytest.mark.parametrize("prompt", [[], [VOCABULARY], [-1], [1] * (CONTEXT + 1)])
def test_prompt_that_the_model_cannot_take_is_refused(engine: Engine, prompt: list[int]) -> None:
    with pytest.raises(ServiceError):
        engine.generate(prompt)
    with pytest.raises(ServiceError):
        engine.log_probabilities(prompt)


def test_small_kv_cache_shortens_the_context(tmp_path: Path) -> None:
    small = EngineSettings(dtype="float32", device="cpu", kv_memory="32KiB")
    with Engine(make_checkpoint(tmp_path), small) as engine:
        assert engine.model.context_length == 64
        assert (
            engine.generate(PROMPT, max_tokens=CONTEXT, ignore_eos=True).finish
            is FinishCause.LENGTH
        )
        with pytest.raises(ServiceError) as raised:
            engine.generate([1] * 65)
    assert raised.value.reason == "CONTEXT_LENGTH_EXCEEDED"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_request_loads_no_module(tmp_path: Path, dtype: str) -> None:
    """torch's compiler has 900 modules: seconds in which streams stand still, or a start lasts."""
    program = (
        "import sys\n"
        "from services.engine.engine import Engine, EngineSettings\n"
        f"settings = EngineSettings(dtype={dtype!r}, device='cpu', kv_memory='1MiB')\n"
        f"with Engine({str(make_checkpoint(tmp_path))!r}, settings) as engine:\n"
        "    ready = set(sys.modules)\n"
        "    engine.generate([1, 2, 3], max_tokens=4, temperature=0)\n"
        "    engine.generate([1, 2, 3], max_tokens=4, top_p=0.9, top_k=5, logprobs=2)\n"
        "    print(sorted(set(sys.modules) - ready), 'torch._dynamo' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert result.stdout == "[] False\n"


def test_closed_engine_says_so(tmp_path: Path) -> None:
    engine = Engine(make_checkpoint(tmp_path), SETTINGS)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(PROMPT)


def test_refused_request_takes_no_outputs_from_others(checkpoint: Path) -> None:
    """A script that catches the error still gets every token of its other requests."""
    settings = replace(SETTINGS, max_running=1, max_waiting=1)
    with Engine(checkpoint, settings) as crowded:
        for _ in range(3):
            crowded.submit(PROMPT, temperature=0, ignore_eos=True)
        count, errors, is_done = 0, [], False
        while not is_done:
            try:
                outputs = crowded.step()
            except ServiceError as error:
                errors.append(error.reason)
                continue
            count += sum(isinstance(output, Token) for output in outputs)
            is_done = any(isinstance(output, RequestDone) for output in outputs)
    assert errors == ["QUEUE_FULL"] * 2
    assert count == 16
