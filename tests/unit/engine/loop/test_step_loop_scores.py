"""Scores of the step loop: independence from batching, and requests that fail for NaN."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from services.engine.checked_request import MirostatSettings, SamplingSettings
from services.engine.messages import (
    FinishCause,
    Finished,
    Mask,
    Output,
    Refused,
    RequestDone,
    ScoredPrompt,
    SetMasks,
    Token,
)
from services.engine.model.loader import load_model
from services.engine.model.model import Model
from services.engine.scheduling.cache_limits import CacheLimits, GroupLimits
from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import Request, TokenSequence
from services.engine.scheduling.step_plan import SchedulerLimits
from services.engine.scheduling.token_ids import Prompt
from tests.unit.engine.checkpoints import files
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.loop.outputs import scores_of
from tests.unit.engine.tiny import BLOCK, make_checkpoint, make_loop, make_request, run, tokens_of


@given(prompt=st.lists(st.integers(1, 40), min_size=2, max_size=60), step=st.integers(3, 64))
@settings(max_examples=25)
def test_chunks_and_cache_do_not_change_prompt_scores(
    decoder: Model, prompt: list[int], step: int
) -> None:
    loop = make_loop(decoder, step_tokens=step)
    run(loop, [make_request(1, [prompt])])  # fills the prefix cache
    outputs = run(loop, [make_request(2, [prompt], n=2, max_tokens=0, prompt_logprobs=3)])
    scored = [o for o in outputs if isinstance(o, ScoredPrompt)]
    positions = [o.position + i for o in scored for i in range(len(o.ids))]
    assert positions == list(range(1, len(prompt)))
    got = [score.logprob for o in scored for score in o.scores]
    whole = run(make_loop(decoder), [make_request(3, [prompt], max_tokens=0, prompt_logprobs=0)])
    expected = [s.logprob for o in whole if isinstance(o, ScoredPrompt) for s in o.scores]
    assert got == pytest.approx(expected, abs=1e-4)
    assert not [o for o in outputs if isinstance(o, Token)]
    causes = [o.cause for o in outputs if isinstance(o, Finished)]
    assert causes == [FinishCause.LENGTH, FinishCause.LENGTH]


def test_generated_and_scored_logprobs_agree(decoder: Model) -> None:
    prompt = [3, 1, 4, 1, 5]
    outputs = run(make_loop(decoder), [make_request(1, [prompt], max_tokens=20, logprobs=0)])
    tokens = [o for o in outputs if isinstance(o, Token)]
    again = [*prompt, *(t.id for t in tokens)]
    scored = run(make_loop(decoder), [make_request(2, [again], max_tokens=0, prompt_logprobs=0)])
    expected = [s.logprob for o in scored if isinstance(o, ScoredPrompt) for s in o.scores]
    got = [t.score.logprob for t in tokens if t.score]
    assert got == pytest.approx(expected[len(prompt) - 1 :], abs=1e-4)


def test_prompt_scores_need_no_credit(decoder: Model) -> None:
    prompt = [1 + i % 3 for i in range(40)]
    request = make_request(1, [prompt], max_tokens=0, prompt_logprobs=2, credit=0)
    outputs = run(make_loop(decoder, step_tokens=16), [request])
    assert [token for o in outputs if isinstance(o, ScoredPrompt) for token in o.ids] == prompt[1:]
    assert isinstance(outputs[-1], RequestDone)


def test_scored_forced_tokens_respect_the_limit_of_logit_rows() -> None:
    """A step scores the forced tokens that it computes, each in a row of its own."""
    limits = SchedulerLimits(8, 256, 2.0, 32, max_logit_rows=16)
    scheduler = Scheduler(limits, CachePools(CacheLimits(BLOCK, (GroupLimits(256),))))
    command = make_request(1, [[5]], n=8, max_tokens=40, logprobs=0, constrained=True)
    request = Request(command)
    for index in range(8):
        scheduler.add(TokenSequence(request, index, Prompt([5], b"", BLOCK), None, 40))
    for sequence in scheduler.waiting:
        sequence.mask = Mask(1, sequence.index, 0, [7] * 12, None, False)
    scheduler.plan(0.0)
    for sequence in scheduler.running:
        sequence.append(7)
    plan = scheduler.plan(0.0)
    assert plan.decode_tokens == 16


def test_bfloat16_neighbours_change_logprobs_by_rounding_only(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = load_model(make_checkpoint(tmp_path_factory.mktemp("tiny")), torch.bfloat16)
    prompts = [[i, 2, 3, i + 1] * 4 for i in range(1, 17)]
    together = run(
        make_loop(model),
        [make_request(i, [p], max_tokens=0, prompt_logprobs=0) for i, p in enumerate(prompts)],
    )
    for i, prompt in enumerate(prompts):
        alone = run(make_loop(model), [make_request(i, [prompt], max_tokens=0, prompt_logprobs=0)])
        assert scores_of(together, i) == pytest.approx(scores_of(alone, i), abs=0.05)


@pytest.mark.parametrize("kind", ["speculate", "overlaps", None])
def test_logprobs_do_not_change_greedy_tokens(
    tmp_path_factory: pytest.TempPathFactory, kind: str | None
) -> None:
    """Without logprobs, tiled kernels search the best token without storing the logits."""
    path = tmp_path_factory.mktemp("wide")
    files.make_checkpoint(path, CONFIGS["llama, wide heads"])
    model = load_model(path, torch.bfloat16)
    prompts = [[i, 2, 3, i + 1] * i for i in range(1, 9)]

    def generated(logprobs: int | None) -> dict[tuple[int, int], list[int]]:
        requests = [
            make_request(i, [p], max_tokens=5 * i, logprobs=logprobs)
            for i, p in enumerate(prompts, start=1)
        ]
        loop = make_loop(
            model,
            blocks=16,
            step_tokens=24,
            block=32,
            speculate=kind == "speculate",
            overlaps=kind == "overlaps",
        )
        return tokens_of(run(loop, requests))

    tokens = generated(None)
    assert tokens == generated(0)
    assert [len(tokens[i, 0]) for i in range(1, 9)] == [5 * i for i in range(1, 9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSettings(0.0, 1.0, 0, 0.0, 1),
        SamplingSettings(1.0, 1.0, 0, 0.0, 1),
        SamplingSettings(1.0, 0.9, 0, 0.0, 1),
        SamplingSettings(1.0, 1.0, 0, 0.0, 1, mirostat=MirostatSettings(2.0, 0.1)),
    ],
    ids=["greedy", "drawn", "restricted", "mirostat"],
)
@pytest.mark.parametrize("overlaps", [False, True])
def test_nan_weights_fail_a_generating_request(
    tmp_path: Path,
    overlaps: bool,
    dtype: torch.dtype,
    logprobs: int | None,
    constrained: bool,
    sampling: SamplingSettings,
) -> None:
    """A token drawn from NaN would look like an answer."""
    loop = make_loop(load_broken(tmp_path, dtype), block=32, overlaps=overlaps)
    request = make_request(
        1, [[3, 4]], n=2, sampling=sampling, logprobs=logprobs, constrained=constrained
    )
    mask = Mask(1, 0, 0, (), b"\xfe" * 13, False)  # allows some tokens, but not the first
    masks = SetMasks([mask, replace(mask, sequence=1)] if constrained else [])
    outputs = run(loop, [request, masks])
    assert tokens_of(outputs) == {}
    assert_failed(outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_tokens", [0, 8])
@pytest.mark.parametrize("step_tokens", [8, 256])
@pytest.mark.parametrize("overlaps", [False, True])
def test_nan_weights_fail_a_scoring_request(
    tmp_path: Path, dtype: torch.dtype, max_tokens: int, step_tokens: int, overlaps: bool
) -> None:
    """An evaluation harness would take NaN for a score."""
    loop = make_loop(
        load_broken(tmp_path, dtype), block=32, step_tokens=step_tokens, overlaps=overlaps
    )
    prompts = [[3, 4, 5], list(range(20, 60)), [3, 4, 6]]
    outputs = run(loop, [make_request(1, prompts, max_tokens=max_tokens, prompt_logprobs=1)])
    assert scores_of(outputs, 1) == []
    assert_failed(outputs)


def load_broken(directory: Path, dtype: torch.dtype) -> Model:
    """Return a model with one weight of NaN."""
    files.make_checkpoint(directory, CONFIGS["llama, wide heads"])
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][5, 7] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return load_model(directory, dtype)


def assert_failed(outputs: list[Output]) -> None:
    """Assert that the request failed once, with its last output."""
    [refused] = [output for output in outputs if isinstance(output, Refused)]
    assert (refused.code, refused.reason) == ("INTERNAL", "NOT_FINITE")
    assert outputs[-1] is refused
