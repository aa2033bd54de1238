"""The client of the compile process."""

import asyncio
import json
import logging
import sys
from pathlib import Path

import grpc

from services.common.exit_status import exit_status
from services.common.settings import StartupError
from services.grammar import GrammarError
from services.grammar.compiling.compile_process import HEADER, READY, TIMED_OUT, Verdict
from services.grammar.compiling.compile_slots import CompileSlots
from tokenwire.errors import ServiceError
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

__all__ = ["Compiler"]

_LOG = logging.getLogger("compiler")
_QUICK = 0.5  # CPU seconds; nearly all grammars compile within them


class Compiler:
    """Trial compiles in a child process, which is restarted when it ends.

    A slow compilation is stopped and restarted in separate slots, so that it delays only other slow
    ones.
    """

    def __init__(self, model: Path, timeout: float, concurrency: int) -> None:
        self._model = model
        self._timeout = timeout
        self._slots = CompileSlots(concurrency, timeout)
        self._slots_for_slow = CompileSlots(concurrency, timeout)
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}
        self._next_job = READY + 1
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._stopped = False

    async def start(self) -> None:
        """Start the process unless it runs, and wait until it takes jobs. Raises StartupError."""
        async with self._starting:  # a request may arrive during the service's own start
            if self._reader is None or self._reader.done():
                await self._launch()

    async def _launch(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.grammar.compiling.compile_process"),
            str(self._model),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the service alone, which then closes stdin
        )
        assert self._process.stdout is not None
        if not await self._process.stdout.readline():
            raise StartupError("The process that compiles grammars did not start; see the log.")
        self._reader = asyncio.ensure_future(self._read(self._process, self._process.stdout))

    async def stop(self) -> None:
        """Kill the process and its jobs. It does not start again."""
        self._stopped = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._reader is not None:
            await self._reader

    async def try_out(self, spec: GrammarSpec) -> int:
        """Compile a grammar once, and return its approximate memory in bytes.

        Raises GrammarError with the reason of a refusal. Raises ServiceError without a verdict:
        RESOURCE_EXHAUSTED when too many others compile, UNAVAILABLE when the process ended.
        """
        content = spec.SerializeToString()
        verdict = await self._run(content, self._slots, min(_QUICK, self._timeout))
        if verdict.killed == TIMED_OUT and self._timeout > _QUICK:
            verdict = await self._run(content, self._slots_for_slow, self._timeout)
        if verdict.killed:
            _LOG.warning("the compilation of a grammar ended with %s", exit_status(-verdict.killed))
            raise GrammarError(self._cause(verdict.killed))
        if verdict.error:
            raise GrammarError(verdict.error)
        return verdict.size

    async def _run(self, content: bytes, slots: CompileSlots, timeout: float) -> Verdict:
        await slots.take(len(content))
        seconds = 0.0
        try:
            verdict = await self._attempt(content, timeout)
            seconds = verdict.seconds
        finally:
            slots.give_back(seconds)
        return verdict

    async def _attempt(self, content: bytes, timeout: float) -> Verdict:
        if self._stopped:
            raise _lost()
        try:
            await self.start()
        except StartupError:
            raise _lost() from None
        if self._stopped:  # `stop` was called while the process started
            raise _lost()
        assert self._process is not None
        assert self._process.stdin is not None
        job, self._next_job = self._next_job, self._next_job + 1
        self._waiting[job] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(HEADER.pack(job, timeout, len(content)) + content)
            return await self._waiting[job]
        finally:
            del self._waiting[job]

    async def _read(self, process: asyncio.subprocess.Process, lines: asyncio.StreamReader) -> None:
        try:
            while line := await lines.readline():
                verdict = Verdict(**json.loads(line))
                waiting = self._waiting.get(verdict.job)
                if waiting is not None and not waiting.done():
                    waiting.set_result(verdict)
        except Exception:  # the line can't be read, and no later one can be trusted
            _LOG.exception("the process that compiles grammars wrote an unreadable line")
            if process.returncode is None:
                process.kill()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_lost())
        code = await process.wait()
        if not self._stopped:
            _LOG.error("the process that compiles grammars ended with %s", exit_status(code))

    def _cause(self, number: int) -> str:
        if number == TIMED_OUT:
            return f"The grammar needs more than {self._timeout:g} s of CPU time; simplify it."
        return "The grammar is too complex: its compilation ran out of stack or memory."


def _lost() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "COMPILER_LOST",
        "The process that compiles grammars was lost.",
        retry_seconds=1,
    )
