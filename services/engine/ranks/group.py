"""Process group of a tensor-parallel engine's ranks, over torch.distributed.

Tensors travel over NCCL between GPUs and over gloo between CPUs; numbers for the hosts travel over
gloo. The tests run gloo; NCCL has not been run.
"""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.settings import StartupError
from services.engine.ranks.rank import Rank

__all__ = ["SINGLE_RANK", "RankGroup"]

_LOG = logging.getLogger("ranks")
_STEP_TIMEOUT = timedelta(minutes=2)
"""Time that a rank waits for the others when it joins, and in each collective of a step"""
_IDLE_TIMEOUT = timedelta(days=3650)
"""Time between two steps, practically unlimited: `watch` notices a rank that ends"""
_DISSOLVE_SECONDS = 5.0
"""Time that rank 0 waits for each other rank to end"""
_LOSS_SECONDS = 0.5
"""Time within which all connections of an ended rank are found closed"""
T = TypeVar("T")


class RankGroup:
    """This process's rank and its connections to the others; a single rank has none."""

    def __init__(self, rank: Rank, hosts: "dist.ProcessGroup | None" = None) -> None:
        self.rank = rank
        self._hosts = hosts
        self._is_dissolved = False
        self._watchers: list[threading.Thread] = []

    @property
    def leads_others(self) -> bool:
        """True for rank 0 of several."""
        return self.rank.leads and not self.rank.is_alone

    @staticmethod
    def join(rank: Rank, device: torch.device) -> "RankGroup":
        """Connect to all ranks. Raises StartupError if they don't join in time."""
        if rank.is_alone:
            return SINGLE_RANK
        on_cuda = device.type == "cuda"
        try:
            dist.init_process_group(
                "nccl" if on_cuda else "gloo",
                timeout=_STEP_TIMEOUT,
                rank=rank.number,
                world_size=rank.count,
                device_id=device if on_cuda else None,
            )
            hosts = dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
        except (RuntimeError, ValueError) as error:  # dist.DistError is a RuntimeError
            raise StartupError(
                f"The {rank.count} ranks did not connect to each other: {error}"
            ) from None
        return RankGroup(rank, hosts)

    def require_agreement(self, facts: Mapping[str, str]) -> None:
        """Raise StartupError unless all ranks state the same facts, or if a rank has ended."""
        for number, theirs in enumerate(self._gather(dict(facts))):
            for name, fact in theirs.items():
                if fact != facts[name]:
                    raise StartupError(
                        f"Rank {number} has {name} {fact}, but rank {self.rank.number} has "
                        f"{facts[name]}; give all ranks the same flags, files and hardware."
                    )

    def minimum(self, number: int) -> int:
        """Return the smallest of the ranks' numbers."""
        return min(self._gather(number))

    def total(self, number: int) -> int:
        """Return the sum of the ranks' numbers."""
        return sum(self._gather(number))

    def send_numbers(self, numbers: Sequence[int]) -> None:
        """Send numbers from rank 0 to the hosts of all other ranks."""
        self._broadcast_host(torch.tensor([len(numbers)]))
        if numbers:
            self._broadcast_host(torch.tensor(numbers))

    def receive_numbers(self) -> list[int]:
        """Wait for rank 0's numbers; an empty list means that rank 0 has dissolved the group."""
        size = torch.empty(1, dtype=torch.int64)
        self._broadcast_host(size)
        received = torch.empty(int(size), dtype=torch.int64)
        if len(received):
            self._broadcast_host(received)
        self._is_dissolved = not len(received)
        numbers: list[int] = received.tolist()
        return numbers

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Copy rank 0's values into the tensor on the device; shape and dtype must be the same."""
        dist.broadcast(tensor, 0)
        return tensor

    def watch(self) -> None:
        """End this process with a log line when a rank that it depends on has ended.

        A collective would notice only after its timeout, and between steps there is none.
        """
        if self.rank.is_alone:
            return
        others = range(1, self.rank.count) if self.rank.leads else [0]
        self._watchers = [
            threading.Thread(target=self._watch, args=(other,), daemon=True) for other in others
        ]
        for watcher in self._watchers:
            watcher.start()

    def exit_if_rank_lost(self) -> None:
        """End this process like `watch` if a lost rank is the reason of a failed step."""
        for watcher in self._watchers:
            watcher.join(_LOSS_SECONDS)

    def dissolve(self) -> None:
        """End all other ranks, from rank 0, and wait for them."""
        self._is_dissolved = True
        if not self.rank.is_alone:
            self.send_numbers([])
        for watcher in self._watchers:
            watcher.join(_DISSOLVE_SECONDS)

    def _watch(self, other: int) -> None:
        try:
            # no rank ever sends this message: the call fails when the connection closes
            dist.recv(torch.empty(1), other, group=self._hosts)
        except RuntimeError:
            if not self._is_dissolved:
                _LOG.error(
                    "rank %d has ended; the %d ranks can't go on without it",
                    other,
                    self.rank.count,
                )
                os._exit(1)

    def _broadcast_host(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0, group=self._hosts)

    def _gather(self, mine: T) -> list[T]:
        """Return the value of every rank, in order of rank."""
        if self.rank.is_alone:
            return [mine]
        gathered: list[T] = [mine] * self.rank.count
        try:
            dist.all_gather_object(gathered, mine, group=self._hosts)
        except RuntimeError:
            raise StartupError(
                "Another rank ended while the engine started; see its message."
            ) from None
        return gathered


SINGLE_RANK = RankGroup(Rank())
