"""A run of a batch: several workers send the requests of a file and write the answers."""

import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from tokenwire.errors import ServiceError

__all__ = [
    "BATCH_PATHS",
    "INVALID_LINE",
    "BatchRun",
    "BatchSummary",
    "Connect",
    "FailureReason",
    "InputError",
    "NotReachedError",
    "Reply",
    "Send",
]

BATCH_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/v1/pooling",
)
"""Paths that a line may name"""
INVALID_LINE = "invalid_line"
"""Code of the error of a line that is no request"""
_RETRY_STATUSES = frozenset({429, 502, 503})
"""Statuses after which a request is repeated: the server is full, or a proxy can't reach it"""
_OK = 200
_MOST_WAIT = 30.0
_LONGEST_LINE = 64 << 20
_LARGE_ANSWER = 1 << 16
"""Bytes above which an answer is handled in a thread"""
_MOST_REASONS = 100
_LINE_BEGIN = '{"custom_id": '
"""Beginning of every line that a run writes"""


class InputError(Exception):
    """An input or output file that can't be used. The message is its path and the problem."""

    def __init__(self, path: Path, problem: str, line: int | None = None) -> None:
        """problem: a sentence without capital and period. line: number of the line at fault."""
        super().__init__(f"{path}: {problem}.")
        self.problem = problem
        self.line = line


class NotReachedError(Exception):
    """The server does not answer. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of the server to a request."""

    status: int
    headers: Mapping[str, str]
    """Headers of the reply; their names are in lower case"""
    content: bytes


Send: TypeAlias = Callable[[str, bytes], Awaitable[Reply]]
"""Function that posts a JSON body to a path; it may raise NotReachedError"""
Connect: TypeAlias = Callable[[], AbstractAsyncContextManager[Send]]
"""Function that opens the connection of a worker"""


@dataclass(slots=True)
class FailureReason:
    """Lines that failed for the same reason."""

    line: int
    """Number of the first of them"""
    count: int = 1


@dataclass(slots=True)
class BatchSummary:
    """Counts of a batch."""

    total: int
    skipped: int = 0
    """Number of requests that an earlier run has answered"""
    answered: int = 0
    failed: int = 0
    tokens: int = 0
    """Number of generated tokens of all answers"""
    reasons: dict[str, FailureReason] = field(default_factory=dict)
    """First reasons of failures by their sentence, in the order of their appearance"""
    started: float = field(default_factory=time.monotonic)

    def add_reason(self, sentence: str, line: int) -> None:
        """Count a failed line under its reason."""
        if (known := self.reasons.get(sentence)) is not None:
            known.count += 1
        elif len(self.reasons) < _MOST_REASONS:
            self.reasons[sentence] = FailureReason(line)

    @property
    def text(self) -> str:
        """The counts as one sentence."""
        seconds = time.monotonic() - self.started
        parts = [f"{self.answered:,} of {self.total:,} requests answered"]
        if self.skipped:
            parts.append(f"{self.skipped:,} answered before")
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        rate = self.tokens / seconds if seconds else 0.0
        return f"{', '.join(parts)}; {self.tokens:,} tokens in {seconds:.1f} s, {rate:,.0f}/s."


@dataclass(frozen=True, slots=True)
class _Request:
    custom_id: str | None
    url: str = ""
    content: bytes = b""
    """Body of the request as JSON"""
    problem: str = ""
    """Reason why the line can't be sent, a sentence; empty if it can be sent"""
    line: int = 0
    """Number of the line in the input"""


class BatchRun:
    """One run. It writes whole lines, so that a later run can continue its output."""

    def __init__(
        self,
        source: Path,
        target: Path,
        *,
        connect: Connect,
        concurrency: int,
        priority: int,
        patience: float,
        paths: Collection[str] = BATCH_PATHS,
        longest: int = _LONGEST_LINE,
        most_lines: int | None = None,
        repeats_failed: bool = True,
        reserve: Callable[[int], Awaitable[None]] | None = None,
        check_line: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """priority: priority of requests that state none; 0 = send none.

        patience: seconds for which a request is repeated while the server is full or away. paths:
        paths that lines may name. longest: most characters of a line. most_lines: most lines of the
        input; None = any number. repeats_failed: whether a later run repeats requests that the
        server refused. reserve: called with the size in bytes of each line that the output has, or
        is about to get; an exception of it ends the run. check_line: raises ServiceError for a line
        that must not be parsed.
        """
        self._source, self._target = source, target
        self._connect = connect
        self._concurrency = concurrency
        self._priority, self._patience = priority, patience
        self._paths = paths
        self._longest = longest
        self._most_lines = most_lines
        self._repeats_failed = repeats_failed
        self._reserve = reserve
        self._check_line = check_line
        self.summary = BatchSummary(0)
        """Counts so far"""
        self._seen: set[str] = set()

    async def run(self) -> BatchSummary:
        """Run all requests. Raises InputError."""
        # in a thread, because a server has streams to serve meanwhile
        done, sizes = await asyncio.to_thread(self._keep_answers)
        for size in sizes:
            await self._take_room(size)
        self.summary = BatchSummary(await asyncio.to_thread(self._count))
        with _opened(self._source, "r") as lines, _opened(self._target, "a") as output:
            await self._run(self._requests(lines, done), output)
        return self.summary

    def _keep_answers(self) -> tuple[Mapping[str, bool], Sequence[int]]:
        """Remove the lines of the output whose requests run again.

        Returns for each id of the other lines whether its status is 200, and their sizes in bytes.
        """
        done: dict[str, bool] = {}
        sizes: list[int] = []
        if not self._target.is_file():
            return done, sizes
        part = self._target.with_name(f"{self._target.name}.part")
        with _opened(self._target, "r") as lines, _opened(part, "w") as kept:
            try:
                for line in lines:
                    custom_id, status = _answered(line)
                    if status == _OK or (status and not self._repeats_failed):
                        done[custom_id] = status == _OK
                        sizes.append(len(line))
                        kept.write(line)
            except ValueError:  # the line is not UTF-8, or not a line of a batch
                part.unlink()
                raise InputError(self._target, "there are lines that no batch wrote") from None
        os.replace(part, self._target)
        return done, sizes

    async def _run(self, requests: Iterator[_Request], output: TextIO) -> None:
        workers = [
            asyncio.create_task(self._work(requests, output)) for _ in range(self._concurrency)
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in workers:
                task.cancel()

    async def _work(self, requests: Iterator[_Request], output: TextIO) -> None:
        """Send requests one after the other. All workers take them from the same iterator."""
        async with self._connect() as send:
            for request in requests:
                answer = await self._answer(send, request)
                await self._take_room(len(answer))  # the line is ASCII
                output.write(answer)
                output.flush()
                await asyncio.sleep(0)  # lines that can't be sent must not hold up other work

    async def _take_room(self, size: int) -> None:
        if self._reserve is not None:
            await self._reserve(size)

    def _requests(self, lines: TextIO, done: Mapping[str, bool]) -> Iterator[_Request]:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            request = self._parse(line, number)
            if request.custom_id is not None:
                if request.custom_id in self._seen:
                    problem = "This custom_id stands in an earlier line."
                    yield _Request(request.custom_id, problem=problem, line=number)
                    continue
                self._seen.add(request.custom_id)
                if (was_good := done.get(request.custom_id)) is not None:
                    self.summary.skipped += was_good
                    self.summary.failed += not was_good
                    continue
            yield request

    def _count(self) -> int:
        """Return the number of lines that are not empty. Raises InputError."""
        count = number = 0
        with _opened(self._source, "r") as lines:
            try:
                while line := lines.readline(self._longest + 1):
                    number += 1
                    if not count and (why := _other_format(line)):
                        raise InputError(self._source, why, number)
                    count += bool(line.strip())
                    if len(line) > self._longest:
                        why = f"line {number} has more than {self._longest:,} characters"
                        raise InputError(self._source, why, number)
                    if self._most_lines is not None and number > self._most_lines:
                        why = f"there are more than {self._most_lines:,} lines"
                        raise InputError(self._source, why, number)
            except UnicodeDecodeError as error:  # of the part that was read ahead
                number += 1 + error.object.count(b"\n", 0, error.start)
                raise InputError(self._source, f"line {number} is not UTF-8", number) from None
        return count

    async def _answer(self, send: Send, request: _Request) -> str:
        """Return the line that answers a request."""
        line: dict[str, Any] = {"custom_id": request.custom_id, "response": None, "error": None}
        problem, code = request.problem, INVALID_LINE
        if not problem:
            response = await self._send(send, request)
            if isinstance(response, str):
                problem, code = response, "not_reached"
            else:
                line["response"] = response
        if problem:
            line["error"] = {"code": code, "message": problem, "line": request.line}
        if line["response"] is None or line["response"]["status_code"] != _OK:
            self.summary.failed += 1
            self.summary.add_reason(problem or _reason(line["response"]), request.line)
        else:
            self.summary.answered += 1
            self.summary.tokens += _generated(line["response"]["body"])
        is_large = line["response"] is not None and line["response"].pop("size") > _LARGE_ANSWER
        if is_large:  # for example, many embeddings: other work goes on meanwhile
            return await asyncio.to_thread(_line, line)
        return _line(line)

    async def _send(self, send: Send, request: _Request) -> dict[str, Any] | str:
        """Return the response, or the reason for none; repeat while the server is full or away."""
        end, pause = time.monotonic() + self._patience, 0.5
        while True:
            result: dict[str, Any] | str
            wait = 0.0
            try:
                reply = await send(request.url, request.content)
            except NotReachedError as error:
                result = str(error)
            else:
                large = len(reply.content) > _LARGE_ANSWER
                result = await asyncio.to_thread(_result, reply) if large else _result(reply)
                is_final = reply.headers.get("x-should-retry") == "false"
                if is_final or reply.status not in _RETRY_STATUSES:
                    return result
                wait = _retry_after(reply)
            wait = max(wait, random.uniform(pause / 2, pause))
            if time.monotonic() + wait > end:
                return result
            await asyncio.sleep(wait)
            pause = min(2 * pause, _MOST_WAIT)

    def _parse(self, line: str, number: int) -> _Request:
        """Read a line of the input."""

        def invalid(why: str, custom_id: str | None = None) -> _Request:
            return _Request(custom_id, problem=f"{why}.", line=number)

        try:
            self._check_line(line.encode())
            given = json.loads(line)
        except json.JSONDecodeError as error:
            return invalid(f"The line is not JSON: {error.msg} at character {error.colno}")
        except (ValueError, RecursionError) as error:
            return invalid(f"The line is not JSON: {error}")
        except ServiceError as error:
            return invalid(error.message.rstrip("."))
        if not isinstance(given, dict):
            return invalid("The line is no JSON object")
        custom_id = given.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            return invalid("custom_id must be a string that is not empty")
        if given.get("method", "POST") != "POST":
            return invalid("method must be POST", custom_id)
        url, body = given.get("url"), given.get("body")
        if not isinstance(url, str) or url not in self._paths:
            return invalid(f"url must be one of {', '.join(self._paths)}", custom_id)
        if not isinstance(body, dict):
            return invalid("body must be an object", custom_id)
        for name in ("stream", "background"):
            if body.get(name):
                return invalid(f"body.{name} must be false", custom_id)
        if self._priority:
            body.setdefault("priority", self._priority)
        try:
            return _Request(custom_id, url, json.dumps(body).encode(), line=number)
        except RecursionError:
            return invalid("body is nested too deeply", custom_id)


def _other_format(line: str) -> str:
    """Return why a first line shows that the file is no batch; empty = it may be one."""
    lines = "a batch has one JSON object a line"
    if line.startswith("%PDF-"):
        return f"the file is a PDF: {lines}"
    if line.lstrip().startswith("["):
        return f"the file is a JSON array: {lines}, without brackets and commas around them"
    if line.strip() == "{":
        return f"a JSON object goes over several lines: {lines}"
    return ""


def _reason(response: Mapping[str, Any]) -> str:
    """Return the sentence of a refused request."""
    error = response["body"].get("error") if isinstance(response["body"], dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or f"The server answered {response['status_code']}.")


def _result(reply: Reply) -> dict[str, Any]:
    """Return a response in the form of OpenAI's lines."""
    try:
        body = json.loads(reply.content)
    except ValueError:
        body = {"error": {"message": reply.content[:1000].decode(errors="replace")}}
    return {
        "status_code": reply.status,
        "request_id": reply.headers.get("x-request-id", ""),
        "body": body,
        "size": len(reply.content),
    }


def _line(answer: dict[str, Any]) -> str:
    return json.dumps(answer) + "\n"


def _retry_after(reply: Reply) -> float:
    text = reply.headers.get("retry-after", "")
    return min(float(text), 60.0) if text.isascii() and text.isdigit() else 0.0


def _generated(body: Any) -> int:
    """Return the number of generated tokens in an answer's usage."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return 0
    number = usage.get("completion_tokens", usage.get("output_tokens"))
    return number if isinstance(number, int) else 0


def _answered(line: str) -> tuple[str, int]:
    """Return custom_id and status of a line of the output; 0 = the server did not answer.

    Raises ValueError for a line that no run writes. A killed run may leave half a line at the end.
    """
    if not line.endswith("\n") and line.startswith(_LINE_BEGIN[: len(line)]):
        return "", 0
    answer = json.loads(line)
    if not isinstance(answer, dict) or answer.keys() != {"custom_id", "response", "error"}:
        raise ValueError("no answer")
    response = answer["response"]
    status = response.get("status_code") if isinstance(response, dict) else None
    return str(answer["custom_id"]), status if isinstance(status, int) else 0


def _opened(path: Path, mode: str) -> TextIO:
    encoding = "utf-8-sig" if mode == "r" else "utf-8"  # some editors begin files with a BOM
    try:
        file: TextIO = path.open(mode, encoding=encoding)  # type: ignore[assignment]
    except OSError as error:
        raise InputError(path, os.strerror(error.errno or 0)) from None
    return file
