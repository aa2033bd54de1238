"""Process group of a tensor-parallel engine's ranks, over torch.distributed.

Tensors travel over NCCL between GPUs and over gloo between CPUs. Plans for the hosts travel through
shared memory on one machine, and over gloo between machines. The tests run gloo; NCCL has not been
run yet.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.process import end_process
from services.common.settings import StartupError
from services.engine.ranks.all_reduce import AllReduce, choose_all_reduce
from services.engine.ranks.gloo_plans import GlooPlans
from services.engine.ranks.plan_channel import PlanChannel
from services.engine.ranks.rank import Rank
from services.engine.ranks.shared_plans import SharedPlans

__all__ = ["SINGLE_RANK", "RankGroup"]

_LOG = logging.getLogger("ranks")
_STEP_TIMEOUT = timedelta(minutes=2)
"""Longest wait of a rank for the others when it joins, and in each collective of a step"""
_IDLE_TIMEOUT = timedelta(days=3650)
"""Longest time between two steps, practically unlimited: `watch` notices a rank that ends"""
_DISSOLVE_SECONDS = 5.0
"""Seconds that rank 0 waits for the end of each other rank"""
_LOSS_SECONDS = 0.5
"""Seconds within which all connections of an ended rank are found closed"""
T = TypeVar("T")


class RankGroup:
    """This process's rank and its connections to the other ranks; a single rank has none."""

    def __init__(
        self,
        rank: Rank,
        hosts: "dist.ProcessGroup | None" = None,
        plans: PlanChannel | None = None,
        all_reduce: AllReduce | None = None,
    ) -> None:
        self.rank = rank
        self.all_reduce = all_reduce or AllReduce()
        """The sums of tensors over all ranks"""
        self._hosts = hosts
        self._plans = plans
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

        def agree(answer: bool) -> bool:
            return all(_gather(answer, rank, hosts))

        plans = _open_plans(rank, hosts, agree)
        return RankGroup(rank, hosts, plans, choose_all_reduce(rank, device, agree))

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

    def first_of(self, text: str) -> str:
        """Return the first of the ranks' texts that is not empty, or "" if all are empty."""
        return next(filter(None, self._gather(text)), "")

    def send(self, plan: bytes) -> None:
        """Send a plan from rank 0 to the hosts of all other ranks. Raises RankLostError."""
        if self._plans is not None:
            self._plans.send(plan)

    def receive(self) -> bytearray:
        """Wait for rank 0's next plan; an empty one means that it has dissolved the group.

        Raises RankLostError.
        """
        assert self._plans is not None, "a single rank receives nothing"
        plan = self._plans.receive()
        self._is_dissolved = not plan
        return plan

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
        """End this process, as `watch` does, if a lost rank is the reason of a failed step."""
        for watcher in self._watchers:
            watcher.join(_LOSS_SECONDS)

    def dissolve(self) -> None:
        """End all other ranks, from rank 0, and wait for them."""
        self._is_dissolved = True
        self.send(b"")
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
                end_process(1)

    def _gather(self, mine: T) -> list[T]:
        """Return the value of every rank, in order of rank."""
        return _gather(mine, self.rank, self._hosts)


def _gather(mine: T, rank: Rank, hosts: "dist.ProcessGroup | None") -> list[T]:
    """Return the value of every rank, in order of rank. Raises StartupError if one has ended."""
    if rank.is_alone:
        return [mine]
    gathered: list[T] = [mine] * rank.count
    try:
        dist.all_gather_object(gathered, mine, group=hosts)
    except RuntimeError:
        raise StartupError(
            "Another rank ended while the engine started; see its message."
        ) from None
    return gathered


def _open_plans(
    rank: Rank, hosts: "dist.ProcessGroup", agree: Callable[[bool], bool]
) -> PlanChannel:
    """Return the fastest channel that works between these ranks."""
    if rank.local_count != rank.count:
        return GlooPlans(hosts)
    shared: SharedPlans | None = None
    try:
        shared = SharedPlans.open(rank.number, rank.count, lambda mine: _gather(mine, rank, hosts))
    except OSError as error:
        _LOG.warning("the ranks can't share memory: %s; plans travel over gloo", error)
    if not agree(shared is not None) or shared is None:
        return GlooPlans(hosts)
    return shared


SINGLE_RANK = RankGroup(Rank())
