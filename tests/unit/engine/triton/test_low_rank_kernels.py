"""Low-rank additions by the Triton kernels equal torch's, for any mixture of adapters."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks.adapters import random_adapter
from services.engine.batch.step_batch import StepBatch
from services.engine.execution.model_runner import ModelRunner, StepCapacity
from services.engine.execution.step_graphs import StepGraphs
from services.engine.loop.step_loop import StepLoop
from services.engine.model import loader
from services.engine.model.adapters.peft_files import PeftAdapter
from services.engine.model.loader import load_model
from services.engine.model.model import Model
from services.engine.model.operators.low_rank import (
    GRAPH_RANK,
    LowRank,
    RowGroup,
    RowGroups,
    SortedRows,
    TorchLowRankProduct,
)
from services.engine.model.operators.low_rank_kernels import add_low_rank
from services.engine.model.operators.triton_low_rank import TritonLowRankProduct
from services.engine.model.operators.triton_operators import TritonOperators
from tests.unit.engine import tiny
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits
from tests.unit.engine.model.adapters.adapter_folders import make_adapter

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

CPU = torch.device("cpu")
INPUTS, WIDTHS = 300, (150, 40)
"""Inputs, and outputs of both parts: no multiples of a tile"""
MANY_INPUTS = 4200
"""Inputs that several programs share"""
RANKS = {1: (8, 20), 2: (0, 33), 3: (4, 4), 7: (16, 0)}
"""Ranks of the parts of some adapters, by number"""


def random_parts(
    ranks: Sequence[int], dtype: torch.dtype, *, biased: bool, inputs: int = INPUTS
) -> list[LowRank]:
    parts, first = [], 10
    for rank, outputs in zip(ranks, WIDTHS, strict=True):
        if rank:
            down, up = torch.randn(rank, inputs) / inputs**0.5, torch.randn(rank, outputs)
            bias = torch.randn(rank).to(dtype) if biased else None
            parts.append(LowRank(down.to(dtype), bias, up.to(dtype), first))
        first += outputs
    return parts


def rows_of(owners: Tensor, *, staged: bool = False) -> RowGroups:
    """Return rows as the device finds them, and as torch does."""
    groups = tuple(
        RowGroup(number, torch.where(owners == number)[0])
        for number in sorted({*owners.tolist()} - {0})
    )
    return RowGroups(groups, owners, SortedRows.of(owners), is_staged=staged)


def products(
    dtype: torch.dtype, inputs: int = INPUTS
) -> tuple[TritonLowRankProduct, TorchLowRankProduct]:
    made = (
        TritonLowRankProduct(2, max(WIDTHS), CPU),
        TorchLowRankProduct(lambda rows, index: rows[index]),
    )
    for number, ranks in RANKS.items():
        parts = random_parts(ranks, dtype, biased=number % 2 == 1, inputs=inputs)
        for product in made:
            product.change(number, parts)
    return made


@pytest.mark.parametrize(
    ("count", "inputs", "staged", "dtype", "out_dtype"),
    [
        (1, INPUTS, False, torch.float32, torch.float32),
        (1, INPUTS, True, torch.bfloat16, torch.bfloat16),
        (21, INPUTS, True, torch.float32, torch.float32),
        (21, INPUTS, False, torch.bfloat16, torch.float32),
        (21, MANY_INPUTS, False, torch.bfloat16, torch.bfloat16),
        (21, MANY_INPUTS, True, torch.float32, torch.float32),
        (270, MANY_INPUTS, False, torch.float32, torch.float32),
        (270, MANY_INPUTS, True, torch.bfloat16, torch.float32),
    ],
)
def test_rows_of_several_adapters_equal_torchs(
    count: int, inputs: int, staged: bool, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    torch.manual_seed(count)
    ours, theirs = products(dtype, inputs)
    rows = torch.randn(count, inputs).to(dtype)
    out = torch.randn(count, 10 + sum(WIDTHS) + 5).to(out_dtype)
    owners = torch.tensor([0, *RANKS])[torch.randint(1 + len(RANKS), (count,))].int()
    owners[-1] = 1
    before, expected = out.clone(), out.clone()
    ours.add_to(rows, out, rows_of(owners, staged=staged))
    theirs.add_to(rows, expected, rows_of(owners))
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    assert (out[-1] - before[-1]).abs().max() > 0.1


def test_rows_without_an_adapter_keep_their_bits() -> None:
    """Neither another zero nor a number that is none may come of a neighbour's adapter."""
    ours, _ = products(torch.bfloat16)
    rows = torch.randn(20, INPUTS).to(torch.bfloat16)
    rows[3] = torch.nan
    out = torch.randn(20, 10 + sum(WIDTHS)).to(torch.bfloat16)
    out[0], out[1], out[2] = -0.0, torch.inf, torch.nan
    owners = torch.zeros(20, dtype=torch.int32)
    owners[5:8] = torch.tensor([1, 2, 7])
    before = out.clone()
    ours.add_to(rows, out, rows_of(owners))
    alone = owners == 0
    assert torch.equal(out[alone].view(torch.int16), before[alone].view(torch.int16))
    assert not torch.equal(out[5], before[5])
    beside = slice(10 + WIDTHS[0], None)
    assert torch.equal(out[7, beside], before[7, beside]), "the adapter has no part there"


def test_removed_adapter_adds_nothing_and_its_number_is_used_again() -> None:
    ours, theirs = products(torch.float32)
    parts = random_parts((5, 6), torch.float32, biased=False)
    for product in (ours, theirs):
        product.change(1, ())
        product.change(2, parts)
    rows, out = torch.randn(4, INPUTS), torch.zeros(4, 10 + sum(WIDTHS))
    owners = torch.tensor([1, 2, 0, 2], dtype=torch.int32)
    expected = out.clone()
    ours.add_to(rows, out, rows_of(owners, staged=True))
    theirs.add_to(rows, expected, rows_of(owners))
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)
    assert not out[0].any()


def triton_model(folder: Path) -> Model:
    """Load a model with the operators of a GPU."""
    with (
        patch.object(loader, "choose_operators", lambda *_: TritonOperators(torch.float32, CPU)),
        patch("services.engine.model.attention.native", None),
    ):
        return load_model(folder, torch.float32)


@pytest.mark.parametrize("name", ["llama", "qwen3 moe", "cohere, norms"])
def test_adapters_of_different_ranks_equal_the_merged_models(name: str, tmp_path: Path) -> None:
    """In one step: whole prompts, chunks and decodes; the last layer sees some rows alone."""
    model = make_checkpoint(tmp_path / "model", CONFIGS[name])
    models = [model]
    models += [
        make_adapter(model, tmp_path / str(number), seed=number, rank=rank)
        for number, rank in ((1, 4), (2, 20))
    ]
    decoder = triton_model(tmp_path / "model")
    assert decoder.adapters is not None
    for number in (2, 1):
        decoder.adapters.load(number, PeftAdapter.read(tmp_path / str(number)))
    sequences = [random_tokens(24, seed) for seed in range(3)]
    adapters = [1, 0, 2]
    driver = Driver(decoder, sequences, adapters=adapters)
    driver.step([(0, 20), (1, 10)])
    driver.step([(0, 1), (1, 5), (2, 22)])
    driver.step([(0, 1), (1, 1), (2, 1)])
    for tokens, adapter, ours in zip(sequences, adapters, driver.logits, strict=True):
        theirs = reference_logits(models[adapter], tokens)[: len(ours)]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def adapted_runner(decoder: Model, cache: Any, capacity: StepCapacity | None) -> ModelRunner:
    return ModelRunner(decoder, cache, capacity and replace(capacity, adapters=4))


def generate(
    loop: StepLoop, adapters: Sequence[int] = (1, 0, 2)
) -> dict[tuple[int, int], list[int]]:
    """Return the tokens of requests of which some come while others decode."""
    prompts = [[1, 3, 4, 5, 6], [1, 7, 8], list(range(1, 21))]
    first, *rest = (
        replace(tiny.make_request(number, [prompt], max_tokens=4), adapter=adapter)
        for number, (adapter, prompt) in enumerate(zip(adapters, prompts, strict=True))
    )
    outputs = list(loop.step(lambda: [first]).outputs)
    outputs += loop.step(tuple).outputs
    return tiny.tokens_of(outputs + tiny.run(loop, rest))


@pytest.fixture
def adapted(tmp_path: Path) -> Model:
    """Return a model with two adapters of different ranks, which change its answers."""
    decoder = triton_model(tiny.make_checkpoint(tmp_path))
    for number, rank in ((1, 3), (2, 17)):
        load_strong_adapter(decoder, number, rank)
    return decoder


def load_strong_adapter(decoder: Model, number: int, rank: int) -> None:
    assert decoder.adapters is not None
    pairs = random_adapter(decoder, rank, number).pairs.items()
    strong = {name: replace(pair, scale=50.0) for name, pair in pairs}
    decoder.adapters.load(number, PeftAdapter(strong))


def test_graphs_add_what_steps_without_graphs_add(
    adapted: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(tiny.make_loop(adapted, running=4))
    plain = generate(tiny.make_loop(adapted, running=4), adapters=(0, 0, 0))
    changed = [number for number in range(3) if plain[number, 0] != expected[number, 0]]
    assert changed == [0, 2], "each adapter changes its own answer alone"
    places: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    run = StepGraphs.run

    def spy(graphs: StepGraphs, batch: StepBatch) -> Tensor:
        numbers = batch.adapters
        assert not batch.adapters_host
        shape = (len(batch.token_ids), *batch.block_tables.shape, batch.padded is None)
        address = 0 if numbers is None else numbers.data_ptr()
        places.setdefault((*shape, numbers is None), set()).add((address,))
        return run(graphs, batch)

    monkeypatch.setattr(StepGraphs, "run", spy)
    loop = tiny.make_loop(adapted, running=4, padded=True, runner=adapted_runner)
    assert generate(loop) == expected
    kinds = {shape[-2:] for shape in places}
    assert {(True, False), (False, False)} <= kinds, "adapters in steps with chunks and without"
    assert all(len(addresses) == 1 for addresses in places.values()), "graphs read fixed memory"
    assert loop.take_output().load.ungraphed_steps == 0


def test_adapter_that_graphs_can_not_hold_runs_without_them(adapted: Model) -> None:
    expected = generate(tiny.make_loop(adapted, running=4))
    number = 3
    load_strong_adapter(adapted, number, GRAPH_RANK + 1)
    loop = tiny.make_loop(adapted, running=4, padded=True, runner=adapted_runner)
    assert generate(loop) == expected
    before = loop.take_output().load.ungraphed_steps
    wide = replace(tiny.make_request(9, [[3, 4, 5]], max_tokens=3), adapter=number)
    tiny.run(loop, [wide])
    assert loop.take_output().load.ungraphed_steps > before == 0


def test_launches_of_a_step_do_not_depend_on_its_adapters(
    adapted: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took the host 900 launches for each adapter of a step."""
    launched: list[tuple[int, ...]] = []

    def spy(rows: Tensor, *operands: Any) -> None:
        launched.append(tuple(rows.shape))
        add_low_rank(rows, *operands)

    module = "services.engine.model.operators.triton_low_rank"
    monkeypatch.setattr(f"{module}.add_low_rank", spy)
    sequences = [random_tokens(8, seed) % tiny.VOCABULARY for seed in range(3)]
    counts = []
    for adapters in ([0, 0, 1], [1, 2, 1], [0, 1, 2]):
        driver = Driver(adapted, sequences, adapters=adapters)
        launched.clear()
        driver.step([(0, 4), (1, 4), (2, 4)])
        counts.append(len(launched))
    layers, products_of_a_layer = 2, 4
    assert counts == [layers * products_of_a_layer] * 3
