"""Padded steps on the CUDA backend compute what steps of their own size compute."""

import os
from pathlib import Path

import pytest
import torch

from services.engine.batch.step_batch import StepBatch
from services.engine.execution.step_graphs import StepGraphs
from services.engine.model import loader
from services.engine.model.attention import paged_tiles
from services.engine.model.loader import load_model
from services.engine.model.model import Model
from tests.unit.engine import tiny
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits

paged = pytest.importorskip("services.engine.model.attention.paged_backend")

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

TOKENS = 75
PAGE = 64


@pytest.fixture(autouse=True)
def on_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models attend by the kernel over pages, in float32, with few programs of padding."""
    monkeypatch.setattr(paged_tiles, "_MOST_PROGRAMS", 256)
    monkeypatch.setattr(paged, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(loader, "native", None)
    monkeypatch.setattr(loader, "choose_backend", lambda *model, **_: paged.PagedAttention(*model))


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "llama4", "gpt-oss", "bloom", "gemma4, experts", "mimo v2 flash"]
)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts, chunks behind a prefix, and some of them beside decodes."""
    model = make_checkpoint(tmp_path, CONFIGS[name])
    decoder = load_model(tmp_path, torch.float32)
    sequences = [random_tokens(TOKENS, seed) for seed in range(3)]
    driver = Driver(decoder, sequences, block_size=PAGE, padded=True)
    driver.step([(0, 70)])
    driver.step([(0, 1), (1, 40), (2, 2)])
    driver.step([(0, 1), (2, 1), (1, 7)])
    driver.step([(0, 1), (1, 1), (2, TOKENS - 3)])
    for tokens, ours in zip(sequences, driver.logits, strict=True):
        theirs = reference_logits(model, tokens)[: len(ours)]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def generate(decoder: Model, *, padded: bool, speculate: bool) -> dict[tuple[int, int], list[int]]:
    """Return the tokens of requests of which some come while others decode."""
    loop = tiny.make_loop(
        decoder, blocks=16, running=4, padded=padded, speculate=speculate, block=PAGE
    )
    repetitive = [3, 4, 5, 6] * 3
    requests = [
        tiny.make_request(number, [prompt], max_tokens=4)
        for number, prompt in enumerate([repetitive, [7, 8, 9], list(range(1, 41))])
    ]
    outputs = list(loop.step(lambda: requests[:1]).outputs)
    outputs += loop.step(tuple).outputs
    return tiny.tokens_of(outputs + tiny.run(loop, requests[1:]))


@pytest.mark.parametrize("speculate", [False, True])
def test_loop_draws_the_same_tokens(
    tmp_path: Path, speculate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny.load_tiny(tmp_path)
    expected = generate(decoder, padded=False, speculate=speculate)
    places: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    run = StepGraphs.run

    def spy(graphs: StepGraphs, batch: StepBatch) -> torch.Tensor:
        assert batch.padded is not None or batch.is_decode
        shape = (len(batch.token_ids), *batch.block_tables.shape, batch.padded is None)
        read = (batch.token_ids, batch.block_tables, batch.query_starts, batch.context_lengths)
        addresses = tuple(tensor.data_ptr() for tensor in (*read, batch.slots, batch.positions))
        places.setdefault(shape, set()).add(addresses)
        return run(graphs, batch)

    monkeypatch.setattr(StepGraphs, "run", spy)
    assert generate(decoder, padded=True, speculate=speculate) == expected
    assert {shape[-1] for shape in places} == {True, False}, "steps with chunks and without"
    assert all(len(addresses) == 1 for addresses in places.values()), "graphs read fixed memory"
