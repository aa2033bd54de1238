"""Which rank of a tensor-parallel engine this process is. Free of torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from services.common.settings import StartupError

__all__ = ["Rank"]

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the processes that hold a model together; by itself, the only one."""

    number: int = 0
    count: int = 1
    local_number: int = 0
    """Among those on this machine: the number of its GPU"""
    local_count: int = 1

    @staticmethod
    def from_environment() -> "Rank":
        """What torchrun tells its processes. Raises StartupError when that is not whole."""
        if "WORLD_SIZE" not in os.environ:
            return Rank()
        try:
            number, count, local_number, local_count = (int(os.environ[v]) for v in _VARIABLES)
        except (KeyError, ValueError):
            raise StartupError(
                f"WORLD_SIZE is set, so {', '.join(_VARIABLES)} must all be numbers, as torchrun "
                "sets them; start with torchrun, or unset WORLD_SIZE."
            ) from None
        return Rank(number, count, local_number, local_count)

    @property
    def leads(self) -> bool:
        """Whether it is the one that has the server, schedules and draws."""
        return self.number == 0

    @property
    def is_alone(self) -> bool:
        return self.count == 1

    def threads(self, wanted: int) -> int:
        """Threads that compute, of `wanted` or else its share of the cores; 0: torch's choice.

        torch can't be asked where ranks share a machine: torchrun sets OMP_NUM_THREADS to 1.
        """
        if wanted or self.local_count == 1:
            return wanted
        return max(1, _count_cores() // self.local_count)


def _count_cores() -> int:
    """Cores this process may use, each of which may be several processors."""
    return len({Path(_SIBLINGS.format(cpu)).read_text() for cpu in os.sched_getaffinity(0)})
