"""Steps above the reserved size: their answers are right, and graphs of other steps stay valid."""

from collections import defaultdict

import pytest
from prometheus_client import REGISTRY
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.execution.loaded_model import largest_step_tokens
from services.engine.execution.model_runner import ModelRunner, StepCapacity
from services.engine.execution.step_graphs import StepGraphs
from services.engine.frontend.request_accounting import LoadMetrics
from services.engine.messages import AddRequest
from services.engine.model.attention import KVCache
from services.engine.model.model import Model
from services.engine.settings import EngineSettings
from tests.unit.engine import tiny
from tests.unit.engine.tiny import load_tiny

ROWS = 2
BLOCKS = 8
CAPACITY = StepCapacity(tokens=80, sequences=ROWS, blocks=BLOCKS)


def small_runner(decoder: Model, cache: KVCache, capacity: StepCapacity | None) -> ModelRunner:
    """Return a runner that reserves less than the scheduler's steps need."""
    return ModelRunner(decoder, cache, CAPACITY)


def requests(handle: int) -> list[AddRequest]:
    """Return what comes at once: rows, prompt tokens and contexts above the reserved size."""
    lengths = (3, 2, 80, 30)
    prompts = [[handle, *(3 + (7 * i) % 20 for i in range(length))] for length in lengths]
    return [tiny.make_request(handle, prompts, max_tokens=6)]


def small(handle: int) -> list[AddRequest]:
    return [tiny.make_request(handle, [[handle, 5, 6]], max_tokens=6)]


@pytest.fixture
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """Return the places of the padded decode steps, in their order, by their shape."""
    found: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    run = StepGraphs.run

    def spied(graphs: StepGraphs, batch: StepBatch) -> Tensor:
        place = batch.token_ids.data_ptr(), batch.block_tables.data_ptr()
        found[tuple(batch.block_tables.shape)].append(place)
        return run(graphs, batch)

    monkeypatch.setattr(StepGraphs, "run", spied)
    return found


@pytest.mark.parametrize("overlaps", [False, True])
def test_answers_are_those_of_steps_without_a_reserved_size(decoder: Model, overlaps: bool) -> None:
    plain = tiny.make_loop(decoder, overlaps=overlaps)
    expected = tiny.tokens_of(tiny.run(plain, requests(1)))
    loop = tiny.make_loop(decoder, overlaps=overlaps, runner=small_runner)
    assert tiny.tokens_of(tiny.run(loop, requests(1))) == expected
    assert len(expected) == 4
    assert loop.take_output().load.oversized_steps > 0


def test_graphs_find_their_memory_after_a_larger_step(
    decoder: Model, addresses: dict[tuple[int, ...], list[tuple[int, int]]]
) -> None:
    """A graph reads the addresses of its capture; at others it would never be replayed again."""
    loop = tiny.make_loop(decoder, runner=small_runner)
    tiny.run(loop, small(1))
    buffers, before = decoder.buffers, {shape: set(at) for shape, at in addresses.items()}
    assert all(len(places) == 1 for places in before.values())
    tiny.run(loop, requests(2))
    addresses.clear()
    tiny.run(loop, small(3))
    assert {shape: set(at) for shape, at in addresses.items()} == before
    assert decoder.buffers is buffers


def test_larger_steps_are_counted_and_logged_once(
    decoder: Model, caplog: pytest.LogCaptureFixture
) -> None:
    loop = tiny.make_loop(decoder, runner=small_runner)
    metrics, name = LoadMetrics(), "tokenwire_engine_oversized_steps_total"
    before = REGISTRY.get_sample_value(name) or 0.0
    tiny.run(loop, small(1))
    metrics.observe(loop.take_output().load)
    assert REGISTRY.get_sample_value(name) == before
    tiny.run(loop, requests(2))
    tiny.run(loop, requests(3))
    load = loop.take_output().load
    assert 1 < load.oversized_steps < load.steps
    assert 0 < load.ungraphed_steps < load.steps
    metrics.observe(load)
    assert REGISTRY.get_sample_value(name) == before + load.oversized_steps
    assert [record.getMessage()[:9] for record in caplog.records] == ["a step of"]


@pytest.mark.parametrize(("overlaps", "speculate"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("running", [1, 4, 7])
@pytest.mark.parametrize("step_tokens", [16, 40])
def test_engine_reserves_memory_for_the_largest_step_of_the_scheduler(
    decoder: Model, running: int, step_tokens: int, overlaps: bool, speculate: bool
) -> None:
    """Contexts become full, and prompts join decodes that have drafts."""
    settings = EngineSettings(max_running=running, max_step_tokens=step_tokens)
    tokens = largest_step_tokens(settings, decoder)
    capacity = StepCapacity(tokens, running, tiny.CONTEXT // tiny.BLOCK)
    loop = tiny.make_loop(
        decoder,
        step_tokens=step_tokens,
        running=running,
        overlaps=overlaps,
        speculate=speculate,
        runner=lambda decoder, cache, _: ModelRunner(decoder, cache, capacity),
    )
    prompts = [[number, *(3 + i % 3 for i in range(89))] for number in range(3, 9)]
    repeated = [5, 6, 7] * 8
    tiny.run(
        loop,
        [
            tiny.make_request(1, prompts, max_tokens=6),
            tiny.make_request(2, [repeated], max_tokens=72, n=3),
            tiny.make_request(3, [repeated], max_tokens=30, prompt_logprobs=1),
        ],
    )
    assert loop.take_output().load.oversized_steps == 0
