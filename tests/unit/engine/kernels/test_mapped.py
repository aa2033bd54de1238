"""Products with weights in the blocks of a mapped file."""

import ctypes
import mmap
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from services.engine.kernels.library import InstructionSet, Native, native
from services.engine.model.architecture.activation import SWIGLU
from services.engine.model.checkpoint.gguf_groups import read_groups
from services.engine.model.checkpoint.quantized import QuantizedWeight
from services.engine.model.operators.grouped_operators import GroupedOperators
from services.engine.model.operators.interface import ExpertWeights, Operators
from services.engine.model.operators.native_operators import NativeOperators
from services.engine.model.operators.tiled_operators import TiledOperators
from tests.unit.engine.gguf_checkpoints import random_blocks
from tests.unit.engine.machines import TILED, restrict_kernels

K = GGMLQuantizationType
KINDS = [
    *(K.Q8_0, K.Q4_0, K.Q4_1, K.Q5_0, K.Q5_1, K.Q2_K, K.Q3_K, K.Q4_K, K.Q5_K, K.Q6_K),
    *(K.IQ4_NL, K.IQ4_XS, K.MXFP4, K.TQ2_0),
]
SETS = (InstructionSet.BASELINE, InstructionSet.AVX2, InstructionSet.AVX512, *TILED)
INPUTS = 512
ROWS = (1, 3, 9, 40)


def operators_for(kernels: Native, instructions: InstructionSet) -> NativeOperators:
    if instructions in TILED:
        return TiledOperators(kernels)
    return GroupedOperators(kernels, torch.float32)


def rows_for(operators: Operators, count: int, width: int) -> Tensor:
    rows = operators.empty(count, width)
    operators.arrange(torch.randn(count, width).to(rows.dtype), rows)
    return rows


def both(outputs: int, kind: K) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Return a weight that is packed in memory, and the same from the file."""
    blocks = random_blocks((outputs, INPUTS), kind)
    packed, mapped = read_groups(blocks, kind), read_groups(blocks, kind, mapped=True)
    assert packed is not None
    assert mapped is not None
    return packed, mapped


@pytest.mark.parametrize("instructions", SETS, ids=lambda each: each.name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda each: each.name)
def test_products_equal_those_of_packed_weights(kind: K, instructions: InstructionSet) -> None:
    order = torch.randperm(64)
    first, second = both(64, kind), both(40, kind)
    with restrict_kernels(instructions) as kernels:
        operators = operators_for(kernels, instructions)
        products, gates = [], []
        for one, other in zip(first, second, strict=True):
            parts = [one.rows(order), other.times(0.3)]
            products += [operators.grouped_projection([part], None) for part in parts]
            products.append(operators.grouped_projection([one, other], torch.arange(104.0)))
            gates.append(operators.grouped_gate(one, one.rows(order), None, None))
        widths = (64, 40, 104)
        for count in ROWS:
            rows = rows_for(operators, count, INPUTS)
            for width, packed, mapped in zip(widths, products[:3], products[3:], strict=True):
                outs = [torch.zeros(count, width, dtype=rows.dtype) for _ in range(2)]
                packed.into(rows, outs[0])
                mapped.into(rows, outs[1])
                assert torch.equal(*outs)
            outs = [operators.empty(count, 64) for _ in range(2)]
            for gate, out in zip(gates, outs, strict=True):
                gate.into(rows, out)
            assert torch.equal(*map(operators.plain, outs))
            columns = [weight.columns(1, 2) for weight in (first[0], first[1])]  # of a rank
            outs = [torch.zeros(count, 64, dtype=rows.dtype) for _ in columns]
            rows = rows_for(operators, count, INPUTS // 2)
            for column, out in zip(columns, outs, strict=True):
                assert column is not None
                operators.grouped_projection([column], None).into(rows, out)
            assert torch.equal(*outs)


@pytest.mark.parametrize("kind", KINDS, ids=lambda each: each.name)
def test_parts_of_a_mapped_weight_have_its_numbers(kind: K) -> None:
    """Ranks and rotated heads take some of a weight's rows or columns, unread."""
    block, _ = GGML_QUANT_SIZES[kind]
    blocks = random_blocks((40, 4 * block), kind)
    packed, mapped = read_groups(blocks, kind), read_groups(blocks, kind, mapped=True)
    assert packed is not None
    assert mapped is not None
    order = torch.randperm(40)
    for index in (order, slice(8, 24)):
        again = torch.tensor([7, 3])
        assert torch.equal(
            packed.rows(index).rows(again).decode(), mapped.rows(index).rows(again).decode()
        )
    theirs, ours = packed.columns(1, 2), mapped.columns(1, 2)
    assert theirs is not None
    assert ours is not None
    assert torch.equal(theirs.decode(), ours.decode())
    assert mapped.columns(0, 8) is None  # would cut a block


EXPERTS, WIDTH = 6, 256
KEPT = (1, 4)
"""Experts whose pages may be read"""


@pytest.mark.parametrize("chosen", [(1, 4), (1, 3)], ids=["kept", "another"])
def test_step_reads_only_the_experts_that_are_chosen(
    tmp_path: Path, chosen: tuple[int, int]
) -> None:
    """Else a model larger than memory reads all of it for each token."""
    if native is None or native.instruction_set() < InstructionSet.AVX2:
        pytest.skip("the kernels were not built")
    for name in ("gate", "up", "down"):
        (tmp_path / name).write_bytes(random_blocks((EXPERTS * WIDTH, WIDTH), K.Q8_0).tobytes())
    process = multiprocessing.get_context("spawn").Process(
        target=mix_without_others, args=(tmp_path, chosen)
    )
    process.start()
    process.join()
    # reading a page that may not be read ends a process
    assert (process.exitcode == 0) == (chosen == KEPT)


def mix_without_others(folder: Path, chosen: tuple[int, int]) -> None:
    """Multiply by the chosen experts while the pages of all but KEPT can't be read."""
    assert native is not None
    files = [_without_others(folder / name) for name in ("gate", "up", "down")]
    operators = GroupedOperators(native, torch.float32)
    experts = (
        ExpertWeights(gate, up, down, None, None, None)
        for gate, up, down in zip(*files, strict=True)
    )
    mixture = operators.mixture(experts, EXPERTS, len(chosen), SWIGLU)
    rows, out = torch.randn(1, WIDTH), torch.zeros(1, WIDTH)
    mixture.add_to(rows, torch.tensor([chosen]), torch.ones(1, len(chosen)), out)
    assert out.abs().sum() > 0


def _without_others(file: Path) -> list[QuantizedWeight]:
    with file.open("rb") as opened:
        memory = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE)
    data = torch.frombuffer(memory, dtype=torch.uint8).numpy()
    experts = [part.reshape(WIDTH, -1) for part in np.split(data, EXPERTS)]
    weights = [read_groups(expert, K.Q8_0, mapped=True) for expert in experts]
    assert experts[0].nbytes % mmap.PAGESIZE == 0
    for number, expert in enumerate(experts):
        if number not in KEPT:
            size = ctypes.c_size_t(expert.nbytes)
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(expert.ctypes.data), size, 0)
    return [weight for weight in weights if weight is not None]
