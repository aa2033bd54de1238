"""Products with weights in the blocks of a mapped file."""

import ctypes
import mmap
import multiprocessing
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from services.common.gguf.ggml_types import GgmlType
from services.common.settings import StartupError
from services.engine.kernels.build import LIBRARY
from services.engine.kernels.library import InstructionSet, Native, native
from services.engine.model.checkpoint import mxfp4
from services.engine.model.checkpoint.gguf_groups import read_groups
from services.engine.model.checkpoint.mxfp4 import Mxfp4Weight
from services.engine.model.checkpoint.quantized import QuantizedWeight, in_groups
from services.engine.model.operators.grouped_operators import GroupedOperators
from services.engine.model.operators.interface import Operators
from services.engine.model.operators.native_operators import NativeOperators
from services.engine.model.operators.stored_groups import StoredGroups, mapped_call
from services.engine.model.operators.tiled_operators import TiledOperators
from services.engine.model.parts.shard import Shard
from tests.unit.engine.gguf_checkpoints import random_blocks
from tests.unit.engine.kernels.mapped_experts import EXPERTS, KEPT, WIDTH, mix_without_others
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
    packed, mapped = (
        read_groups(blocks, GgmlType(kind)),
        read_groups(blocks, GgmlType(kind), mapped=True),
    )
    assert packed is not None
    assert mapped is not None
    return packed, mapped


@pytest.mark.parametrize("instructions", SETS, ids=lambda each: each.name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda each: each.name)
def test_products_equal_those_of_packed_weights(kind: K, instructions: InstructionSet) -> None:
    order = torch.randperm(64).repeat_interleave(2)[::2]  # not contiguous
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
    packed, mapped = (
        read_groups(blocks, GgmlType(kind)),
        read_groups(blocks, GgmlType(kind), mapped=True),
    )
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


def test_rank_does_not_decode_a_weight_whose_blocks_it_would_cut() -> None:
    """A model larger than memory would be decoded into it."""
    packed, mapped = both(64, K.Q4_K)
    weight = mapped.columns(0, 2)
    assert weight is not None
    with pytest.raises(StartupError, match=r"of 256 inputs into 2 parts: .* --weights full"):
        Shard(1, 2).columns(weight)
    assert Shard(0, 1).columns(weight).shape == (64, 256)
    alone = packed.columns(0, 2)
    assert alone is not None
    assert Shard(1, 2).columns(alone).shape == (64, 128)


def test_weights_and_scales_that_lie_apart_are_prefetched_whole(tmp_path: Path) -> None:
    """Else each page of an expert waits for the disk alone."""
    if native is None:
        pytest.skip("the kernels were not built")
    outputs, groups = 2048, 1024
    count = outputs * groups
    (tmp_path / "codes").write_bytes(bytes(count * mxfp4.GROUP_SIZE // 2))
    (tmp_path / "scales").write_bytes(bytes(count))
    codes, scales, other = (_from_disk(tmp_path / name) for name in ("codes", "scales", "scales"))
    weight = Mxfp4Weight(codes.view(outputs, groups, -1), scales.view(outputs, groups))
    call, _ = mapped_call([StoredGroups.of(in_groups(weight, mapped=True))], outputs)
    if _disk_reads(other[: count // 2]) < 2:
        pytest.skip("the system keeps the pages of these files in memory")
    ctypes.CDLL(str(LIBRARY)).tw_prefetch_mapped(ctypes.byref(call))
    assert _disk_reads(codes) == 0
    assert _disk_reads(scales[count // 2 :]) == 0


def _from_disk(file: Path) -> Tensor:
    """Map a file none of whose pages are in memory, and of which each is read alone."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        memory = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE)
    memory.madvise(mmap.MADV_RANDOM)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _disk_reads(memory: Tensor) -> int:
    """Touch each page, and return how many nobody had asked the disk for."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    memory[:: mmap.PAGESIZE].sum()
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before


PATIENCE = 120
"""Seconds that a process may take"""


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
    process.join(timeout=PATIENCE)
    # reading a page that may not be read ends a process
    assert process.exitcode == (0 if chosen == KEPT else -signal.SIGSEGV)
