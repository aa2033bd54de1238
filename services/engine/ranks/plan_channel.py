"""Channel of step plans from rank 0 to the hosts of all other ranks. Free of torch."""

from abc import ABC, abstractmethod

__all__ = ["PlanChannel", "RankLostError"]


class RankLostError(RuntimeError):
    """Another rank has ended."""


class PlanChannel(ABC):
    """An ordered stream of plans, from rank 0 to all other ranks."""

    @abstractmethod
    def send(self, plan: bytes) -> None:
        """Send a plan from rank 0. Raises RankLostError if a rank is known to have ended."""

    @abstractmethod
    def receive(self) -> bytearray:
        """Wait for the next plan. Raises RankLostError if rank 0 ends meanwhile."""
