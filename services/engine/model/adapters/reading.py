"""Reading of adapters while steps go on."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from services.common.settings import StartupError
from services.engine.model.adapters.adapters import ConvertedAdapter
from services.engine.model.checkpoint.config import CheckpointError

__all__ = ["AdapterReading"]

_LOG = logging.getLogger("engine")


class AdapterReading:
    """Reads and converts adapters in a thread, one after the other, while steps go on."""

    def __init__(self, read: Callable[[Path], ConvertedAdapter]) -> None:
        """read: reads and converts an adapter; it runs in the thread."""
        self._read = read
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._reads: dict[int, Future[ConvertedAdapter]] = {}
        """Reads by number of the adapter; they run, and end, in this order"""

    def __bool__(self) -> bool:
        """Return whether an adapter is being read, or waits to be taken."""
        return bool(self._reads)

    def start(self, number: int, directory: Path) -> None:
        """Begin to read an adapter."""
        self._reads[number] = self._thread.submit(self._read, directory)

    def ready(self) -> list[int]:
        """Return the numbers of the adapters whose read has succeeded or failed."""
        return [number for number, read in self._reads.items() if read.done()]

    def take(self, number: int) -> tuple[ConvertedAdapter | None, str]:
        """Return an adapter, or None and the reason; wait for it if it is not ready."""
        try:
            return self._reads.pop(number).result(), ""
        except (CheckpointError, StartupError) as error:
            return None, str(error)
        except Exception as error:
            _LOG.error("an adapter could not be read", exc_info=error)
            return None, "The adapter can't be read; see the engine's log."
