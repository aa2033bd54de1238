"""Sums over all ranks: by torch's symmetric memory between GPUs with NVLink, else by collectives.

The path through symmetric memory has not been run on GPUs yet.
"""

import logging
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from services.engine.ranks.rank import Rank

__all__ = ["AllReduce", "SymmetricAllReduce", "choose_all_reduce"]

_LOG = logging.getLogger("ranks")
_ONE_SHOT_BYTES = 256 << 10
"""Largest sum, in bytes, that each rank computes whole; of larger sums, each computes a part"""
_MOST_BYTES = 16 << 20
"""Largest sum in symmetric memory, in bytes; NCCL is as fast for larger sums"""
_COUNTS = (2, 4, 8)
"""Numbers of ranks for which all kernels of symmetric memory are compiled"""
_DTYPES = (torch.bfloat16, torch.float32)
"""Types that the kernels of symmetric memory add"""
_ALIGNMENT = 16
"""Bytes that a kernel moves at once; smaller pieces would be slower"""


class AllReduce:
    """Sums of tensors over all ranks, by NCCL between GPUs and by gloo between CPUs."""

    def operand(self, out: Tensor) -> Tensor:
        """Return a contiguous tensor of the shape and dtype of `out`, to be filled and summed.

        It is valid until the next sum, and may be `out` itself.
        """
        return out

    def sum(self, operand: Tensor, out: Tensor) -> None:
        """Write the sum of the ranks' operands to `out`, with equal bits on all ranks.

        operand: return value of `operand(out)`, whose content is lost.
        """
        dist.all_reduce(operand)


class SymmetricAllReduce(AllReduce):
    """Sums of up to 16 MiB by kernels that read the operands of the other ranks over NVLink.

    A sum of up to 256 KiB is one launch. NCCL takes larger sums and other dtypes.
    """

    def __init__(self, buffer: Tensor, group: str, has_multicast: bool) -> None:
        """buffer: uint8, symmetric memory. has_multicast: whether NVSwitch can add."""
        self._buffer = buffer
        self._group = group
        self._has_multicast = has_multicast

    def __str__(self) -> str:
        return "symmetric memory" + (" with multicast" if self._has_multicast else "")

    def operand(self, out: Tensor) -> Tensor:
        size = out.nbytes
        if out.dtype not in _DTYPES or not 0 < size <= len(self._buffer) or size % _ALIGNMENT:
            return out
        return self._buffer[:size].view(out.dtype).view(out.shape)

    def sum(self, operand: Tensor, out: Tensor) -> None:
        kernels = torch.ops.symm_mem
        if operand is out:
            super().sum(operand, out)
        elif out.nbytes > _ONE_SHOT_BYTES and self._has_multicast:
            kernels.multimem_all_reduce_(operand, "sum", self._group)
            out.copy_(operand)
        elif out.nbytes > _ONE_SHOT_BYTES:
            kernels.two_shot_all_reduce_out(operand, "sum", self._group, out)
        elif self._has_multicast:
            kernels.multimem_one_shot_all_reduce_out(operand, "sum", self._group, out)
        else:
            kernels.one_shot_all_reduce_out(operand, "sum", self._group, out)


def choose_all_reduce(rank: Rank, device: torch.device, agree: Callable[[bool], bool]) -> AllReduce:
    """Return the fastest all-reduce that works between these ranks.

    agree: returns whether all ranks call it with True. All ranks call this function together.
    """
    if device.type != "cuda":
        return AllReduce()
    reason = _obstacle(rank, device)
    if not agree(reason is None):
        _LOG.info("all-reduce: NCCL (%s)", reason or "another rank has no symmetric memory")
        return AllReduce()
    symmetric: SymmetricAllReduce | None = None
    try:
        symmetric = _allocate(device)
    except Exception as error:  # torch raises whatever the driver reports
        _LOG.warning("symmetric memory can't be allocated: %s", error)
    if agree(symmetric is not None) and symmetric is not None:
        is_right = False
        try:
            is_right = all(_sums_well(symmetric, rank, device))
        except Exception as error:
            _LOG.warning("symmetric memory does not work: %s", error)
        if agree(is_right):
            _LOG.info("all-reduce: %s up to %d MiB, then NCCL", symmetric, _MOST_BYTES >> 20)
            return symmetric
    _LOG.warning("all-reduce: NCCL, because symmetric memory failed a test")
    return AllReduce()


def _obstacle(rank: Rank, device: torch.device) -> str | None:
    """Return the reason why these ranks can't share symmetric memory; None if they may."""
    if rank.local_count != rank.count:
        return "the ranks are on several machines"
    if rank.count not in _COUNTS:
        return f"symmetric memory needs 2, 4 or 8 ranks, not {rank.count}"
    try:
        links = _nvlinks()
    except Exception as error:
        return f"torch can't tell where NVLink is: {error}"
    if not all(links[device.index][other] for other in range(rank.count) if other != device.index):
        return "no NVLink to all other GPUs"
    return None


def _nvlinks() -> list[list[int]]:
    """Return the number of NVLinks between each two GPUs."""
    from torch._C import _distributed_c10d
    from torch._C._autograd import DeviceType

    # torch's stubs lack the function
    detect = getattr(_distributed_c10d, "_detect_dma_connectivity")  # noqa: B009
    links: list[list[int]] = detect(DeviceType.CUDA, "nvlink").matrix
    return links


def _allocate(device: torch.device) -> SymmetricAllReduce:
    """Allocate symmetric memory together with all other ranks."""
    import torch.distributed._symmetric_memory as symmetric_memory

    group = dist.group.WORLD
    assert group is not None
    buffer = symmetric_memory.empty(_MOST_BYTES, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(buffer, group.group_name)
    return SymmetricAllReduce(buffer, group.group_name, handle.multicast_ptr != 0)


def _sums_well(symmetric: AllReduce, rank: Rank, device: torch.device) -> Iterator[bool]:
    """Yield whether a sum of each size and dtype is right."""
    numbers = torch.arange(rank.count, device=device)
    for size in (_ONE_SHOT_BYTES, _MOST_BYTES):
        for dtype in _DTYPES:
            out = torch.empty(size // dtype.itemsize, dtype=dtype, device=device)
            operand = symmetric.operand(out)
            # small whole numbers, which bfloat16 adds without rounding
            places = torch.arange(len(out), device=device) % 16
            operand.copy_(places + rank.number)
            symmetric.sum(operand, out)
            expected = places * rank.count + numbers.sum()
            yield operand is not out and torch.equal(out, expected.to(dtype))
