"""The compile process: `python -m services.grammar.compiling.compile_process`.

A hostile grammar can make llguidance overflow its stack, loop or exhaust memory, and no call
cancels it. So each grammar is first compiled in a fork of this process, under limits of CPU time
and memory that the kernel enforces. The service compiles only the survivors again. This process
does not import grpc and has one thread: forks are safe and cheap, and share the tokenizer.

Jobs arrive on stdin: a header (job, CPU seconds, length in bytes) and a GrammarSpec. Verdicts go to
stdout, one JSON line each, shorter than PIPE_BUF, so that lines of different forks don't mix.
"""

import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

from llguidance import LLMatcher, LLTokenizer

from services.grammar import GrammarError, specification
from services.grammar.matching.prototype import compile_prototype, reason_of
from services.grammar.matching.vocabulary import load
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec, JsonObject

__all__ = ["HEADER", "READY", "TIMED_OUT", "Verdict"]

HEADER = struct.Struct("<QdI")
TIMED_OUT = signal.SIGPROF
"""The signal that ends a job at its limit of CPU time"""
READY = 0
"""Number of the job in the first verdict, which reports that the process takes jobs"""
_STDIN, _STDOUT = 0, 1
_MEMORY = 1 << 30  # bytes that a compilation may allocate
_STACK = 4 << 20  # bytes; half of the serving threads' stack, so a survivor never overflows that
_MAX_MASK_SECONDS = 0.25  # CPU seconds; an engine's step waits for its slowest mask
_WALK = 8  # tokens that a trial follows
_MAX_REASON = 600  # characters; JSON takes at most 6 bytes for each, less than PIPE_BUF in all
_PAGE = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a job."""

    job: int
    error: str = ""
    """Reason of a refusal; empty = the grammar compiles"""
    size: int = 0
    """Approximate memory of the compiled grammar, in bytes"""
    killed: int = 0
    """Number of the signal that ended the fork; 0 = none"""
    seconds: float = 0.0
    """CPU seconds that the job took"""


def serve(directory: Path) -> None:
    """Run jobs until stdin ends."""
    tokenizer = load(directory).tokenizer
    with contextlib.suppress(GrammarError):  # raised if the vocabulary can't spell an object
        # run the library's one-time set-up here, so that no fork counts it as its grammar's memory
        compile_prototype(tokenizer, specification.translate(GrammarSpec(json_object=JsonObject())))
    os.nice(5)  # give way to an engine on the same machine
    jobs: dict[int, int] = {}  # process id -> job
    ended = _child_signals()
    selector = selectors.DefaultSelector()
    selector.register(ended, selectors.EVENT_READ)
    selector.register(_STDIN, selectors.EVENT_READ)
    _report(Verdict(READY))
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if ended in ready:
            ended.recv(4096)
            _reap(jobs)
        if _STDIN in ready:
            header = _read(HEADER.size)
            if not header:
                return
            job, timeout, length = HEADER.unpack(header)
            content = _read(length)
            child = os.fork()
            if child == 0:
                _try(job, content, tokenizer, timeout)
            jobs[child] = job


def _child_signals() -> socket.socket:
    """Return a socket that becomes readable when a child has ended."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return reader


def _reap(jobs: dict[int, int]) -> None:
    while jobs:
        child, status, usage = os.wait4(-1, os.WNOHANG)
        if child == 0:
            return
        job, seconds = jobs.pop(child), usage.ru_utime + usage.ru_stime
        if os.WIFSIGNALED(status):
            _report(Verdict(job, killed=os.WTERMSIG(status), seconds=seconds))
        elif os.WEXITSTATUS(status) != 0:
            _report(Verdict(job, killed=signal.SIGABRT, seconds=seconds))


def _try(job: int, content: bytes, tokenizer: LLTokenizer, timeout: float) -> NoReturn:
    """Run one job in a fork, and exit.

    `timeout` is in CPU seconds, so that a busy machine does not change the verdict.
    """
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(TIMED_OUT, signal.SIG_DFL)  # ends the process even inside the library
        signal.setitimer(signal.ITIMER_PROF, timeout)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        before = _memory()
        resource.setrlimit(resource.RLIMIT_AS, (before[0] + _MEMORY, before[0] + _MEMORY))
        threading.stack_size(_STACK)
        verdicts: list[Verdict] = []
        worker = threading.Thread(
            target=lambda: verdicts.append(_judge(job, content, tokenizer, before[1]))
        )
        worker.start()
        worker.join()
        _report(replace(verdicts[0], seconds=time.process_time()))
        os._exit(0)
    finally:
        os._exit(1)


def _judge(job: int, content: bytes, tokenizer: LLTokenizer, before: int) -> Verdict:
    """Return the verdict on a job; `before` is the process's memory before it, in bytes."""
    try:
        spec = GrammarSpec.FromString(content)
        specification.check(spec)
        matcher = _compile(tokenizer, spec)
        _walk(matcher.deep_copy())
        return Verdict(job, size=max(_memory()[1] - before, len(content)))
    except GrammarError as error:
        return Verdict(job, _shortened(str(error)))


def _compile(tokenizer: LLTokenizer, spec: GrammarSpec) -> LLMatcher:
    grammar = specification.translate(spec)
    try:
        return compile_prototype(tokenizer, grammar)
    except GrammarError as error:
        raise GrammarError(specification.locate(spec, str(error))) from None


def _walk(matcher: LLMatcher) -> None:
    """Follow one text for a few tokens; raise GrammarError if a step fails or takes too long."""
    for _ in range(_WALK):
        started = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        matcher.compute_ff_tokens()
        if time.thread_time() - started > _MAX_MASK_SECONDS:
            raise GrammarError("The grammar is too expensive to match; make it shorter.")
        if matcher.is_stopped() and not matcher.is_error():
            return
        lowest = (mask & -mask).bit_length() - 1
        if matcher.is_error() or not matcher.consume_token(lowest):
            raise GrammarError(f"The grammar can't be followed: {reason_of(matcher)}")


def _memory() -> tuple[int, int]:
    """Return the virtual and the resident anonymous memory of this process, in bytes."""
    virtual, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(virtual) * _PAGE, (int(resident) - int(shared)) * _PAGE


def _report(verdict: Verdict) -> None:
    os.write(_STDOUT, json.dumps(asdict(verdict)).encode() + b"\n")


def _shortened(reason: str) -> str:
    """Leave out the middle of a long reason: its start names the place, its end the fault."""
    half = _MAX_REASON // 2
    return reason if len(reason) <= _MAX_REASON else f"{reason[:half]} … {reason[-half:]}"


def _read(length: int) -> bytes:
    """Read `length` bytes from stdin; fewer only at its end."""
    content = b""
    while len(content) < length and (piece := os.read(_STDIN, length - len(content))):
        content += piece
    return content


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
