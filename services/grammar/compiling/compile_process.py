"""Where foreign grammars are tried first: `python -m services.grammar.compiling.compile_process`.

llguidance can overflow its stack, loop or eat memory over a hostile grammar, and nothing cancels
it. So each grammar is tried in a fork of this process, under limits of CPU time and memory that the
kernel enforces; only what survives is compiled again where it is served. This process imports no
grpc and has one thread, so that forking it is safe and cheap and shares the tokenizer.

Jobs come on stdin: a header (job, CPU seconds, bytes that follow) and a GrammarSpec. Verdicts leave
on stdout, a JSON line each, short enough that lines of several forks never mix.
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

from services.grammar import specification
from services.grammar.error import GrammarError
from services.grammar.matching.prototype import compile_prototype, reason_of, shortened
from services.grammar.matching.vocabulary import load
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec, JsonObject

__all__ = ["HEADER", "READY", "TIMED_OUT", "Verdict"]

HEADER = struct.Struct("<QdI")
TIMED_OUT = signal.SIGPROF  # ends a job that used up its CPU time
READY = 0  # the job of the line that says that the process is ready
_STDIN, _STDOUT = 0, 1
_MEMORY = 1 << 30  # bytes that compiling may add
_STACK = 4 << 20  # bytes; half of what the serving threads have: what fits here fits there
_SLOWEST_MASK = 0.25  # CPU seconds; an engine's step waits for its slowest mask
_WALK = 8  # tokens
_PAGE = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a job."""

    job: int
    error: str = ""  # empty: it compiles
    size: int = 0  # bytes that the compiled grammar takes, about
    killed: int = 0  # the signal that ended the attempt
    seconds: float = 0.0  # CPU time that it took


def serve(directory: Path) -> None:
    """Try jobs until stdin ends."""
    tokenizer = load(directory).tokenizer
    with contextlib.suppress(GrammarError):  # a vocabulary that can't spell an object
        # what the library sets up once is in place then, and no fork counts it as its grammar's
        compile_prototype(tokenizer, specification.translate(GrammarSpec(json_object=JsonObject())))
    os.nice(5)  # the engine beside it comes first
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
    """Readable when a child has ended."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return reader


def _reap(jobs: dict[int, int]) -> None:
    while jobs:
        child, status, used = os.wait4(-1, os.WNOHANG)
        if child == 0:
            return
        job, seconds = jobs.pop(child), used.ru_utime + used.ru_stime
        if os.WIFSIGNALED(status):
            _report(Verdict(job, killed=os.WTERMSIG(status), seconds=seconds))
        elif os.WEXITSTATUS(status) != 0:
            _report(Verdict(job, killed=signal.SIGABRT, seconds=seconds))


def _try(job: int, content: bytes, tokenizer: LLTokenizer, timeout: float) -> NoReturn:
    """The life of a fork. `timeout` is in seconds of CPU time: a busy machine must not change the
    verdict."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(TIMED_OUT, signal.SIG_DFL)  # ends the process, whatever it is doing
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
    """`before`: bytes of memory that the process took then."""
    try:
        spec = GrammarSpec.FromString(content)
        specification.check(spec)
        matcher = _compile(tokenizer, spec)
        _walk(matcher.deep_copy())
        return Verdict(job, size=max(_memory()[1] - before, len(content)))
    except GrammarError as error:
        return Verdict(job, shortened(str(error)))


def _compile(tokenizer: LLTokenizer, spec: GrammarSpec) -> LLMatcher:
    translated = specification.translate(spec)
    try:
        return compile_prototype(tokenizer, translated)
    except GrammarError as error:
        raise GrammarError(specification.locate(spec, str(error))) from None


def _walk(matcher: LLMatcher) -> None:
    """Take the first steps of some text; raises GrammarError where they cost too much, or fail."""
    for _ in range(_WALK):
        began = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        matcher.compute_ff_tokens()
        if time.thread_time() - began > _SLOWEST_MASK:
            raise GrammarError("The grammar is too expensive to match; make it shorter.")
        if matcher.is_stopped() and not matcher.is_error():
            return
        lowest = (mask & -mask).bit_length() - 1
        if matcher.is_error() or not matcher.consume_token(lowest):
            raise GrammarError(f"The grammar can't be followed: {reason_of(matcher)}")


def _memory() -> tuple[int, int]:
    """Virtual bytes of this process, and those in memory that no file backs."""
    virtual, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(virtual) * _PAGE, (int(resident) - int(shared)) * _PAGE


def _report(verdict: Verdict) -> None:
    os.write(_STDOUT, json.dumps(asdict(verdict)).encode() + b"\n")


def _read(length: int) -> bytes:
    """So many bytes of stdin; fewer only at its end."""
    content = b""
    while len(content) < length and (piece := os.read(_STDIN, length - len(content))):
        content += piece
    return content


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
