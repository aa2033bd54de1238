"""Watch of the models' states: the names that have changed since they were last taken."""

import asyncio

__all__ = ["ModelWatch"]


class ModelWatch:
    """Changes that one watcher has not taken yet. A name is held once, however often it changes."""

    def __init__(self) -> None:
        self._changed: dict[str, None] = {}
        self._event = asyncio.Event()

    def add(self, name: str) -> None:
        """Note a change."""
        self._changed[name] = None
        self._event.set()

    async def take(self) -> list[str]:
        """Wait for changes, and return their names."""
        await self._event.wait()
        names = list(self._changed)
        self._changed.clear()
        self._event.clear()
        return names
