"""Choice of the all-reduce: symmetric memory only where it works."""

import pytest
import torch

from services.engine.ranks.all_reduce import AllReduce, SymmetricAllReduce, choose_all_reduce
from services.engine.ranks.rank import Rank

MIB = 1 << 20
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    "rank", [Rank(0, 2, 0, 2), Rank(0, 3, 0, 3), Rank(0, 4, 0, 2)], ids=["near", "odd", "far"]
)
@needs_no_gpu
def test_ranks_without_symmetric_memory_take_nccl(rank: Rank) -> None:
    answers = []

    def agree(answer: bool) -> bool:
        answers.append(answer)
        return answer

    chosen = choose_all_reduce(rank, torch.device("cuda", 0), agree)
    assert type(chosen) is AllReduce
    assert answers == [False]  # asked once: all ranks must ask equally often


@pytest.mark.parametrize(
    ("shape", "dtype", "fits"),
    [
        ((4, 64), torch.bfloat16, True),
        ((4, 64), torch.float32, True),
        ((4, 64), torch.float16, False),
        ((MIB // 2, 1), torch.bfloat16, True),
        ((MIB // 2 + 8, 1), torch.bfloat16, False),
        ((2, 1), torch.float32, False),
        ((0, 64), torch.float32, False),
    ],
)
def test_symmetric_memory_takes_what_its_kernels_add(
    shape: tuple[int, int], dtype: torch.dtype, fits: bool
) -> None:
    symmetric = SymmetricAllReduce(torch.empty(MIB, dtype=torch.uint8), "", False)
    out = torch.empty(shape, dtype=dtype)
    operand = symmetric.operand(out)
    assert (operand is not out) == fits
    assert (operand.shape, operand.dtype) == (out.shape, out.dtype)
    assert operand.is_contiguous()


@pytest.mark.parametrize(
    ("kernel", "operands"),
    [
        ("multimem_all_reduce_", 3),
        ("one_shot_all_reduce_out", 4),
        ("two_shot_all_reduce_out", 4),
        ("multimem_one_shot_all_reduce_out", 4),
    ],
)
def test_torch_has_the_kernels_that_are_called(kernel: str, operands: int) -> None:
    schema = getattr(torch.ops.symm_mem, kernel).default._schema
    assert [str(argument.type) for argument in schema.arguments] == (
        ["Tensor", "str", "str", "Tensor"][:operands]
    )
