"""Rank of this process in a tensor-parallel engine, from the environment. Free of torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from services.common.settings import StartupError

__all__ = ["Rank"]

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the processes that share a model; by default, the only one."""

    number: int = 0
    count: int = 1
    local_number: int = 0
    """Rank on this machine, which is also the index of its GPU"""
    local_count: int = 1

    @staticmethod
    def from_environment() -> "Rank":
        """Read the variables that torchrun sets. Raises StartupError if some are missing."""
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
        """True for rank 0, which has the server, schedules and draws tokens."""
        return self.number == 0

    @property
    def is_alone(self) -> bool:
        """True without tensor parallelism."""
        return self.count == 1

    def threads(self, wanted: int) -> int:
        """Return the number of compute threads: `wanted` or a share of the cores; 0 = torch's.

        torch's default is wrong with several ranks on a machine: torchrun sets OMP_NUM_THREADS=1.
        """
        if wanted or self.local_count == 1:
            return wanted
        return max(1, _count_cores() // self.local_count)


def _count_cores() -> int:
    """Return the number of physical cores that this process may use."""
    return len({Path(_SIBLINGS.format(cpu)).read_text() for cpu in os.sched_getaffinity(0)})
