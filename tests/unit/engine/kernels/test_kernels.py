"""The kernels agree with torch on every instruction set."""

import ctypes
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import services.engine.kernels.build as builder
from services.common.settings import StartupError
from services.engine.kernels.build import build
from services.engine.kernels.freshness import require_current
from services.engine.kernels.library import InstructionSet, Native, instruction_set
from services.engine.kernels.memory import Arena, allocate, populate_behind, touch
from services.engine.model.architecture.activation import (
    SWIGLU,
    Activation,
    GateFunction,
    Nonlinearity,
)
from services.engine.model.operators.activations import gate_factors
from services.engine.model.operators.interface import HeadNorms, Projection
from services.engine.model.operators.native_operators import NativeOperators
from services.engine.model.operators.rotation import Rotation
from services.engine.model.operators.tiled_operators import TiledOperators
from services.engine.model.operators.torch_operators import TorchOperators
from tests.unit.engine.machines import TILED, restrict_kernels
from tests.unit.engine.tiles import to_rows, to_tiles

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(params=InstructionSet, ids=lambda each: each.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[Native]:
    """The kernels on each instruction set."""
    with restrict_kernels(request.param) as native:
        yield native


@pytest.fixture(params=TILED, ids=lambda each: each.name)
def tiled(request: pytest.FixtureRequest) -> Iterator[TiledOperators]:
    """The tiled operators on each instruction set that has them."""
    with restrict_kernels(request.param) as native:
        yield TiledOperators(native)
        native.use_pool(0)


def assert_close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(ours.float(), theirs.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rows_with_gaps_are_arranged_and_gate_as_by_torch(
    kernels: Native, dtype: torch.dtype
) -> None:
    ours, theirs = NativeOperators(kernels, dtype), TorchOperators(dtype, CPU)
    gates = torch.randn(41, 100, dtype=dtype)[:, 10:73]
    results = [torch.empty(41, 63, dtype=dtype) for _ in range(2)]
    for operators, out in zip((ours, theirs), results, strict=True):
        operators.arrange(gates, out)
        assert torch.equal(out, gates)
        operators.multiply(gates, out)
        for function in GateFunction:
            operators.multiply_by_gates(gates, function, out)
            operators.multiply_by_gates(gates[:, :9], function, out)  # each of 7 columns
    assert_close(results[0], results[1], dtype)


@pytest.mark.parametrize("rows", [1, 32, 41])
def test_rows_with_gaps_are_arranged_and_gate_in_tiles(tiled: TiledOperators, rows: int) -> None:
    gates = torch.randn(rows, 128, dtype=torch.bfloat16)[:, 32:]
    tiles = tiled.empty(rows, 96)
    tiled.arrange(gates, tiles)
    assert torch.equal(tiled.plain(tiles), gates)
    for function in GateFunction:
        for columns in (1, 32, 96):
            tiled.arrange(gates, tiles)
            own = gates[:, : 96 // columns]
            tiled.multiply_by_gates(own, function, tiles)
            factors = gate_factors(function, own).repeat_interleave(columns, dim=1)
            assert_close(tiled.plain(tiles), gates * factors, torch.bfloat16)
    tiled.arrange(gates, tiles)
    tiled.multiply(gates, tiles)
    assert torch.equal(tiled.plain(tiles), gates * gates)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 41])
def test_small_operators_equal_those_of_torch(
    kernels: Native, dtype: torch.dtype, rows: int
) -> None:
    torch.manual_seed(rows)
    ours, theirs = NativeOperators(kernels, dtype), TorchOperators(dtype, CPU)
    x, weight = torch.randn(rows, 100, dtype=dtype), torch.randn(100, dtype=dtype)
    results = [torch.empty_like(x) for _ in range(2)]
    for operators, out in zip((ours, theirs), results, strict=True):
        operators.rms_norm(x, weight, 1e-5, out)
    assert_close(results[0], results[1], dtype)
    totals = [torch.ones_like(x) for _ in range(2)]
    for operators, out in zip((ours, theirs), totals, strict=True):
        operators.add_rms_norm(x.clone(), weight, 1e-5, out)
        operators.scale(out, 0.3)
    assert_close(totals[0], totals[1], dtype)
    ours.clear(totals[0].fill_(torch.nan))
    assert not totals[0].any()

    rotation = Rotation(torch.randn(rows, 9), torch.randn(rows, 9))
    wide = torch.randn(rows, 7, 18, dtype=dtype)
    norms = torch.randn(2, 18, dtype=dtype)
    whole_norms = torch.randn(3 * 18, dtype=dtype), torch.randn(2 * 18, dtype=dtype)
    for query_norm, key_norm in ((None, None), (norms[0], norms[1]), whole_norms):
        both = [wide.clone(), wide.clone()]
        for operators, whole in zip((ours, theirs), both, strict=True):
            operators.rotate(whole[:, :5], 3, rotation, query_norm, key_norm, 1e-5)
        assert_close(both[0], both[1], dtype)  # the last two heads are values: untouched
        if query_norm is None or key_norm is None:
            continue
        apart = HeadNorms(query_norm, key_norm, centers=False)
        for operators, whole in zip((ours, theirs), both, strict=True):
            operators.norm_heads(whole[:, :5], 3, apart, 1e-5)
        assert_close(both[0], both[1], dtype)

    gate, up = torch.randn(2, 50, 100, dtype=dtype) / 10
    gated = [torch.empty(rows, 50, dtype=dtype) for _ in range(2)]
    for activation in (SWIGLU, Activation(Nonlinearity.GELU_TANH)):
        for operators, out in zip((ours, theirs), gated, strict=True):
            operators.gate(gate, up, None, None, activation).into(x, out)
        assert_close(gated[0], gated[1], dtype)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(100, 64), (32, 96), (1000, 1024), (17, 32)], ids=str)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 70, 600])
def test_packed_products_equal_those_of_torch(
    tiled: TiledOperators, rows: int, shape: tuple[int, int], stored: torch.dtype
) -> None:
    torch.manual_seed(rows)
    outputs, inputs = shape
    weight = (torch.randn(shape) / inputs**0.5).to(stored)
    bias = torch.randn(outputs).to(stored)
    x = torch.randn(rows, inputs, dtype=torch.bfloat16)
    expected = x.float() @ weight.to(torch.bfloat16).float().T + bias.float()
    projection = tiled.projection(weight, bias)
    x = to_tiles(x)[:rows]

    exact = torch.empty(rows, outputs)
    projection.into(x, exact)
    torch.testing.assert_close(exact, expected, atol=1e-4, rtol=1e-4)

    guarded = torch.full((rows + 1, outputs), 7.0, dtype=torch.bfloat16)
    projection.into(x, guarded[:rows])
    assert_close(guarded[:rows], expected, torch.bfloat16)
    projection.add_to(x, guarded[:rows])
    assert_close(guarded[:rows], 2 * expected, torch.bfloat16)
    assert (guarded[rows] == 7).all()  # nothing is written past the end


@pytest.mark.parametrize("outputs", [17, 100, 1000])
@pytest.mark.parametrize("rows", [1, 17, 33, 70, 600])
def test_argmax_equals_that_of_the_products(tiled: TiledOperators, rows: int, outputs: int) -> None:
    """Greedy output depends on it."""
    assert_finds_argmax(tiled, rows, outputs)


def test_argmax_of_a_row_of_nan_is_negative(tiled: TiledOperators) -> None:
    """Otherwise a broken checkpoint would answer with an arbitrary token."""
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    x[1, 100] = torch.nan
    found = torch.zeros(3, dtype=torch.int64)
    tiled.projection(torch.randn(100, 256), None).argmax(to_tiles(x)[:3], found)
    assert [int(column) < 0 for column in found] == [False, True, False]


def assert_finds_argmax(operators: TiledOperators, rows: int, outputs: int) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(outputs, 256), torch.randn(rows, 256, dtype=torch.bfloat16)
    weight[outputs // 2 :] = weight[: outputs - outputs // 2].clone()  # the first of equals wins
    x[-1] = 0  # all products are equal
    tiles = to_tiles(x)[:rows]
    for offset in (0.0, -1000.0):
        projection = operators.projection(weight, torch.full((outputs,), offset))
        exact, found = torch.empty(rows, outputs), torch.full((rows + 1,), -7)
        projection.into(tiles, exact)
        projection.argmax(tiles, found[:rows])
        assert found.tolist() == [*exact.numpy().argmax(axis=1).tolist(), -7]


def test_product_that_bypasses_the_caches_equals_its_parts(tiled: TiledOperators) -> None:
    """4.3 MB bypass the caches; parts of 0.8 MB don't."""
    rows, outputs, part = 1040, 2080, 208
    projection = tiled.projection(torch.randn(outputs, 32), torch.randn(outputs))
    x = torch.randn(rows, 32, dtype=torch.bfloat16)
    whole = torch.full((rows + 1, outputs), 7.0, dtype=torch.bfloat16)
    projection.into(to_tiles(x)[:rows], whole[:rows])
    alone = torch.empty(part, outputs, dtype=torch.bfloat16)
    for start in range(0, rows, part):
        projection.into(to_tiles(x[start : start + part])[:part], alone)
        assert torch.equal(alone, whole[start : start + part])
    assert (whole[rows] == 7).all()  # nothing is written past the end


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 20, 90])
def test_packed_gate_equals_that_of_torch(tiled: TiledOperators, rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    gate, up = torch.randn(2, 96, 64) / 8
    one, other = torch.randn(2, 96) if biased else (None, None)
    x = torch.randn(rows, 64, dtype=torch.bfloat16)
    theirs = torch.empty(rows, 96)
    ours = to_tiles(torch.full((rows, 96), 7.0, dtype=torch.bfloat16))
    tiled.gate(gate, up, one, other).into(to_tiles(x)[:rows], ours[:rows])
    TorchOperators(torch.float32, CPU).gate(gate, up, one, other).into(x.float(), theirs)
    assert_close(to_rows(ours)[:rows], theirs, torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 8, 41])
def test_norms_in_tiles_equal_those_of_torch(tiled: TiledOperators, rows: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 96).bfloat16() * 5, torch.randn(96).bfloat16()
    theirs, ours = torch.empty_like(x), to_tiles(torch.zeros_like(x))
    tiled.rms_norm(x, weight, 1e-5, ours[:rows])
    TorchOperators(torch.bfloat16, CPU).rms_norm(x, weight, 1e-5, theirs)
    assert_close(to_rows(ours)[:rows], theirs, torch.bfloat16)


def test_norms_that_bypass_the_caches_equal_their_parts(tiled: TiledOperators) -> None:
    """4.4 MB bypass the caches; parts of 0.4 MB don't."""
    rows, width, part = 2080, 1056, 208
    x, weight = torch.randn(rows, width).bfloat16(), torch.randn(width).bfloat16()
    whole, alone = to_tiles(torch.zeros_like(x)), to_tiles(torch.zeros_like(x[:part]))
    tiled.rms_norm(x, weight, 1e-5, whole[:rows])
    for start in range(0, rows, part):
        tiled.rms_norm(x[start : start + part], weight, 1e-5, alone[:part])
        assert torch.equal(to_rows(alone)[:part], to_rows(whole)[start : start + part])


def test_product_of_a_row_is_independent_of_other_rows(tiled: TiledOperators) -> None:
    projection = tiled.projection(torch.randn(64, 256), None)
    x = torch.randn(50, 256, dtype=torch.bfloat16)
    together, alone = torch.empty(50, 64), torch.empty(1, 64)
    projection.into(to_tiles(x)[:50], together)
    for row in (0, 20, 49):
        projection.into(to_tiles(x[row : row + 1])[:1], alone)
        assert torch.equal(alone[0], together[row])


def test_products_in_several_threads_are_independent(tiled: TiledOperators) -> None:
    """A thread pool that mixed up two loops would skip or repeat items."""
    tiled.native.use_pool(3)
    weight = torch.randn(640, 256)
    x = to_tiles(torch.randn(8, 256, dtype=torch.bfloat16))[:8]
    expected = torch.empty(8, 640)
    tiled.projection(weight, None).into(x, expected)
    projections = [tiled.projection(weight, None) for _ in range(3)]
    right: list[bool] = []

    def compute(projection: Projection) -> None:
        for _ in range(300):
            out = torch.full((8, 640), torch.nan)
            projection.into(x, out)
            right.append(torch.equal(out, expected))

    threads = [threading.Thread(target=compute, args=(each,)) for each in projections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 900


def test_installed_library_is_that_of_the_sources() -> None:
    """`pip install` builds the kernels if there is a compiler. Tests of old ones prove nothing."""
    compiler = builder._compiler()[0]
    if shutil.which(compiler) is None:
        pytest.skip("there is no C++ compiler")
    assert builder.is_current(builder.LIBRARY)
    assert instruction_set() is not None


def test_stale_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Structures of other sources have other fields: wrong results, or a crash, without a word."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "kernels.h").write_text("int tw_answer();\n")
    (sources / "kernels.cpp").write_text("int tw_answer() { return 1; }\n")
    monkeypatch.setattr(builder, "_SOURCES", sources)
    monkeypatch.setattr(builder, "_ANYWHERE", (builder._Unit("kernels.cpp"),))
    monkeypatch.setattr(builder, "_X86_64", ())
    library = tmp_path / "kernels.so"
    require_current(library)  # there is none
    try:
        build(library)
    except OSError:
        pytest.skip("there is no C++ compiler")
    require_current(library)
    (sources / "kernels.cpp").write_text("int tw_answer() { return 2; }\n")
    with pytest.raises(StartupError, match=r"kernels\.so were compiled from other sources"):
        require_current(library)
    build(library)
    require_current(library)
    monkeypatch.setattr(builder, "_SOURCES", tmp_path / "a wheel has none")
    require_current(library)


def test_library_without_tiled_kernels_has_the_portable_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an engine on a processor without units of its own would not start."""
    monkeypatch.setattr(builder, "_target_of", lambda compiler: "riscv64")
    unoptimised = tuple("-O0" if flag == "-O3" else flag for flag in builder._FLAGS)
    monkeypatch.setattr(builder, "_FLAGS", unoptimised)  # which compile in half the time
    try:
        built = build(tmp_path / "kernels.so")
    except OSError:
        pytest.skip("there is no C++ compiler")
    kernels = Native(ctypes.CDLL(str(built)))
    assert kernels.instruction_set() == InstructionSet.BASELINE
    x, weight = torch.randn(3, 100), torch.randn(100)
    ours, theirs = torch.empty(3, 100), torch.empty(3, 100)
    NativeOperators(kernels, torch.float32).rms_norm(x, weight, 1e-5, ours)
    TorchOperators(torch.float32, CPU).rms_norm(x, weight, 1e-5, theirs)
    assert_close(ours, theirs, torch.float32)


def test_touched_memory_causes_no_page_faults() -> None:
    """Otherwise the first long prompt would wait for its pages, or run out of memory."""
    tensors = [allocate((64 << 20,), torch.uint8) for _ in range(3)]
    touch(tensors)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for tensor in tensors:
        tensor.numpy()[:] = 1
    # Untouched memory causes at least 96 faults, one per huge page.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 20


def test_memory_populated_behind_keeps_what_steps_write_meanwhile() -> None:
    """Otherwise the first requests would lose their keys and values."""
    tensors = [allocate((64 << 20,), torch.uint8)[:-100] for _ in range(3)]
    populating = populate_behind(tensors)
    for tensor in tensors:
        tensor.numpy()[::4096] = 7
    populating.join()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for tensor in tensors:
        assert (tensor.numpy()[::4096] == 7).all()
        tensor.numpy()[:] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 20


def test_arena_tensors_are_zeroed_aligned_and_disjoint() -> None:
    arena = Arena()
    taken = [arena.take(count, torch.bfloat16) for count in (3, 1000, 5)]
    for index, tensor in enumerate(taken):
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()
        tensor.fill_(index + 1)
    assert [tensor[-1].item() for tensor in taken] == [1, 2, 3]
    assert allocate((0, 4), torch.float32).shape == (0, 4)
