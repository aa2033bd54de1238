"""Spare processes: one of each service of a model, prepared for the next model on demand."""

import json
from collections.abc import Sequence

from services.common.standby import STANDBY
from tokenwire.serving.launched_process import LaunchedProcess, launch
from tokenwire.serving.serve_options import ServeError

__all__ = ["SpareProcesses"]

_NAMES = ("engine", "tokenizer", "grammar")


class SpareProcesses:
    """At most one prepared process of each service."""

    def __init__(self, *, is_seen: bool) -> None:
        """is_seen: whether the processes write to a terminal."""
        self._is_seen = is_seen
        self._spares: dict[str, LaunchedProcess] = {}

    async def prepare(self) -> None:
        """Start the processes that are missing. Where that fails, models start without them."""
        for name in _NAMES:
            spare = self._spares.get(name)
            if spare is None or spare.process.returncode is not None:
                try:
                    self._spares[name] = await launch(
                        name, (STANDBY,), is_seen=self._is_seen, has_input=True
                    )
                except ServeError:
                    return

    def take(self, name: str, arguments: Sequence[str]) -> LaunchedProcess | None:
        """Give a prepared process its arguments, and return it; None if there is none."""
        spare = self._spares.pop(name, None)
        if spare is None or spare.process.returncode is not None:
            return None
        assert spare.process.stdin is not None
        spare.process.stdin.write(json.dumps([*arguments]).encode() + b"\n")
        spare.process.stdin.close()
        return spare

    async def stop(self) -> None:
        """End the processes."""
        spares = [each.process for each in self._spares.values()]
        self._spares.clear()
        for process in spares:
            if process.returncode is None:
                process.kill()
        for process in spares:
            await process.wait()
