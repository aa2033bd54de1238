"""What `async with` closes."""

from abc import ABC, abstractmethod
from typing import Self

__all__ = ["Closing"]


class Closing(ABC):
    """Leaving `async with` calls `aclose`."""

    @abstractmethod
    async def aclose(self) -> None:
        """End it; once more does no harm."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.aclose()
