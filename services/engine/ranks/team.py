"""The ranks of a tensor-parallel engine, joined by torch.distributed.

Tensors travel over NCCL between GPUs and over gloo between CPUs; what the host needs to know
travels over gloo. The tests run gloo; NCCL has not been run.
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

__all__ = ["ALONE", "Team"]

_LOG = logging.getLogger("team")
_STEP_TIMEOUT = timedelta(minutes=2)
"""What ranks may differ in joining, and in coming to one sum of a step"""
_IDLE_TIMEOUT = timedelta(days=3650)
"""Between two steps nothing may be said at all. A rank that ends is noticed whatever this is."""
_LEAVE_SECONDS = 5.0
_BLAME_SECONDS = 0.5
"""In which one connection of a rank that ended is found closed after another was"""
T = TypeVar("T")


class Team:
    """This process's rank, and what it says to the others. Alone, it says nothing."""

    def __init__(self, rank: Rank, hosts: "dist.ProcessGroup | None" = None) -> None:
        self.rank = rank
        self._hosts = hosts
        self._disbanded = False
        self._watchers: list[threading.Thread] = []

    @property
    def leads_others(self) -> bool:
        return self.rank.leads and not self.rank.is_alone

    @staticmethod
    def join(rank: Rank, device: torch.device) -> "Team":
        """Returns once all ranks have come. Raises StartupError if they don't."""
        if rank.is_alone:
            return ALONE
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
            raise StartupError(f"The {rank.count} ranks did not come together: {error}") from None
        return Team(rank, hosts)

    def agree(self, facts: Mapping[str, str]) -> None:
        """Raises StartupError unless all ranks state the same facts, or if one has ended."""
        for number, theirs in enumerate(self._gather(dict(facts))):
            for name, fact in theirs.items():
                if fact != facts[name]:
                    raise StartupError(
                        f"Rank {number} has {name} {fact}, but rank {self.rank.number} "
                        f"{facts[name]}; give all the same flags, files and hardware."
                    )

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""
        return min(self._gather(number))

    def total(self, number: int) -> int:
        """The sum of the ranks' numbers."""
        return sum(self._gather(number))

    def tell(self, order: Sequence[int]) -> None:
        """Rank 0 sends numbers to all others' `hear`."""
        self._send(torch.tensor([len(order)]))
        if order:
            self._send(torch.tensor(order))

    def hear(self) -> list[int]:
        """What rank 0 tells, as soon as it does; nothing once it has disbanded."""
        size = torch.empty(1, dtype=torch.int64)
        self._send(size)
        order = torch.empty(int(size), dtype=torch.int64)
        if len(order):
            self._send(order)
        self._disbanded = not len(order)
        numbers: list[int] = order.tolist()
        return numbers

    def share(self, tensor: Tensor) -> Tensor:
        """Fills it with rank 0's, on the device; the same shape and dtype everywhere."""
        dist.broadcast(tensor, 0)
        return tensor

    def watch(self) -> None:
        """From now on this process ends, saying why, when one that it can't do without has ended.

        A collective that waits for the dead may wait for long, and between steps there is none.
        """
        if self.rank.is_alone:
            return
        others = range(1, self.rank.count) if self.rank.leads else [0]
        self._watchers = [
            threading.Thread(target=self._watch, args=(other,), daemon=True) for other in others
        ]
        for watcher in self._watchers:
            watcher.start()

    def look_around(self) -> None:
        """Ends this process, as `watch` does, if that is why a step has failed."""
        for watcher in self._watchers:
            watcher.join(_BLAME_SECONDS)

    def disband(self) -> None:
        """Rank 0 sends the others home, and waits for them to go."""
        self._disbanded = True
        if not self.rank.is_alone:
            self.tell([])
        for watcher in self._watchers:
            watcher.join(_LEAVE_SECONDS)

    def _watch(self, other: int) -> None:
        try:
            # Nobody ever sends this: it fails when the other's end of the connection closes.
            dist.recv(torch.empty(1), other, group=self._hosts)
        except RuntimeError:
            if not self._disbanded:
                _LOG.error(
                    "rank %d has ended, and %d ranks can't go on without it",
                    other,
                    self.rank.count,
                )
                os._exit(1)

    def _send(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0, group=self._hosts)

    def _gather(self, mine: T) -> list[T]:
        """Everybody's, by rank."""
        if self.rank.is_alone:
            return [mine]
        gathered: list[T] = [mine] * self.rank.count
        try:
            dist.all_gather_object(gathered, mine, group=self._hosts)
        except RuntimeError:
            raise StartupError(
                "Another rank ended while the engine started; its own message says why."
            ) from None
        return gathered


ALONE = Team(Rank())
