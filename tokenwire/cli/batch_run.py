"""A run of a batch: lines of requests in, lines of answers out, some in progress at once."""

import asyncio
import json
import os
import random
import ssl
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import httpcore

__all__ = ["BatchRun", "BatchSummary", "InputError"]

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_AGAIN = frozenset({429, 502, 503, 504})
"""Statuses of a server that is full, away, or behind a proxy that misses it"""
_OK = 200
_CONNECT_SECONDS = 10.0
_KEEP_SECONDS = 30.0
_MOST_WAIT = 30.0
_PROGRESS_SECONDS = 0.5
_LONGEST_LINE = 64 << 20
_BEGIN = '{"custom_id": '
"""Beginning of every line that a run writes"""


class InputError(Exception):
    """An input or output file that can't be used. The message is a sentence."""


@dataclass(slots=True)
class BatchSummary:
    """Counts of a batch."""

    total: int
    skipped: int = 0
    """Requests that the output had answers to"""
    answered: int = 0
    failed: int = 0
    tokens: int = 0
    """Generated ones"""
    began: float = field(default_factory=time.monotonic)

    @property
    def text(self) -> str:
        """A sentence."""
        seconds = time.monotonic() - self.began
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
    """The body as JSON"""
    problem: str = ""
    """Why the line can't be sent; empty if it can"""


class BatchRun:
    """One run. Its output grows by a whole line at a time, so that a later run can go on."""

    def __init__(
        self,
        source: Path,
        target: Path,
        *,
        url: str,
        tls: ssl.SSLContext | None,
        key: str,
        concurrency: int,
        priority: int,
        patience: float,
    ) -> None:
        """url: of the server, without a path; tls: for https, None = the system's authorities.

        patience: seconds for which a request is repeated while the server is full or away.
        """
        self._source, self._target = source, target
        self._url, self._key = url, key
        self._tls = tls
        self._concurrency = concurrency
        self._priority, self._patience = priority, patience
        self._summary = BatchSummary(0)
        self._seen: set[str] = set()

    async def run(self) -> BatchSummary:
        """Run all requests. Raises InputError."""
        done = self._keep_answers()
        with _opened(self._source, "r") as lines, _opened(self._target, "a") as output:
            try:
                self._summary = BatchSummary(sum(1 for line in lines if line.strip()))
            except UnicodeDecodeError:
                raise InputError(f"{self._source} is not UTF-8.") from None
            lines.seek(0)
            await self._run(self._requests(lines, done), output)
        return self._summary

    def _keep_answers(self) -> set[str]:
        """Drop all lines of the output but answers; return the ids of these."""
        done: set[str] = set()
        if not self._target.is_file():
            return done
        part = self._target.with_name(f"{self._target.name}.part")
        with _opened(self._target, "r") as lines, _opened(part, "w") as kept:
            try:
                for line in lines:
                    if _is_answered(line, done):
                        kept.write(line)
            except ValueError:  # not UTF-8, or no line of a batch
                part.unlink()
                raise InputError(f"{self._target} has lines that no batch wrote.") from None
        os.replace(part, self._target)
        return done

    async def _run(self, requests: Iterator[_Request], output: TextIO) -> None:
        shows = asyncio.create_task(self._show_progress())
        workers = [
            asyncio.create_task(self._work(requests, output)) for _ in range(self._concurrency)
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in (shows, *workers):
                task.cancel()
            if sys.stderr.isatty():
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    async def _work(self, requests: Iterator[_Request], output: TextIO) -> None:
        """Run requests, which all workers share, one after the other."""
        # a connection of its own: the time of a pool grows with the square of its connections
        own = httpcore.AsyncConnectionPool(
            self._tls, max_connections=1, keepalive_expiry=_KEEP_SECONDS
        )
        async with own as pool:
            for request in requests:
                answer = await self._answer(pool, request)
                output.write(json.dumps(answer) + "\n")
                output.flush()

    def _requests(self, lines: TextIO, done: set[str]) -> Iterator[_Request]:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            request = _parse(line, number, self._priority)
            if request.custom_id is not None:
                if request.custom_id in done:
                    self._summary.skipped += 1
                    continue
                if request.custom_id in self._seen:
                    problem = f"Line {number}: this custom_id stands in an earlier line."
                    yield _Request(request.custom_id, problem=problem)
                    continue
                self._seen.add(request.custom_id)
            yield request

    async def _answer(
        self, pool: httpcore.AsyncConnectionPool, request: _Request
    ) -> dict[str, Any]:
        """Return the line that answers a request."""
        line: dict[str, Any] = {"custom_id": request.custom_id, "response": None, "error": None}
        problem, code = request.problem, "invalid_line"
        if not problem:
            response = await self._send(pool, request)
            if isinstance(response, str):
                problem, code = response, "not_reached"
            else:
                line["response"] = response
        if problem:
            line["error"] = {"code": code, "message": problem}
        if line["response"] is None or line["response"]["status_code"] != _OK:
            self._summary.failed += 1
        else:
            self._summary.answered += 1
            self._summary.tokens += _generated(line["response"]["body"])
        return line

    async def _send(
        self, pool: httpcore.AsyncConnectionPool, request: _Request
    ) -> dict[str, Any] | str:
        """Return the response, or why there is none; repeat while the server is full or away."""
        headers = [("content-type", "application/json"), ("accept", "application/json")]
        if self._key:
            headers.append(("authorization", f"Bearer {self._key}"))
        timeouts = {"timeout": {"connect": _CONNECT_SECONDS}}
        end, pause = time.monotonic() + self._patience, 0.5
        while True:
            result: dict[str, Any] | str
            wait = 0.0
            try:
                response = await pool.request(
                    "POST",
                    self._url + request.url,
                    headers=headers,
                    content=request.content,
                    extensions=timeouts,
                )
            except (
                httpcore.NetworkError,
                httpcore.RemoteProtocolError,
                httpcore.TimeoutException,
            ) as error:
                result = f"{self._url} does not answer: {error or type(error).__name__}."
            else:
                result = _result(response)
                if response.status not in _AGAIN:
                    return result
                wait = _retry_after(response)
            wait = max(wait, random.uniform(pause / 2, pause))
            if time.monotonic() + wait > end:
                return result
            await asyncio.sleep(wait)
            pause = min(2 * pause, _MOST_WAIT)

    async def _show_progress(self) -> None:
        """Show the state in a line of the terminal, if there is one."""
        if not sys.stderr.isatty():
            return
        while True:
            summary = self._summary
            ended = summary.answered + summary.failed + summary.skipped
            share = ended / summary.total if summary.total else 1.0
            bar = ("#" * int(20 * share)).ljust(20, "-")
            print(f"\r\x1b[K[{bar}] {summary.text}", end="", file=sys.stderr, flush=True)
            await asyncio.sleep(_PROGRESS_SECONDS)


def _parse(line: str, number: int, priority: int) -> _Request:
    """Read a line of the input. priority: that of a body without one; 0 = none."""

    def invalid(why: str, custom_id: str | None = None) -> _Request:
        return _Request(custom_id, problem=f"Line {number}: {why}.")

    if len(line) > _LONGEST_LINE:
        return invalid(f"it has more than {_LONGEST_LINE:,} characters")
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        return invalid(f"it is not JSON: {error}")
    if not isinstance(given, dict):
        return invalid("it is no object")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return invalid("custom_id must be a text")
    if given.get("method", "POST") != "POST":
        return invalid("method must be POST", custom_id)
    url, body = given.get("url"), given.get("body")
    if url not in _PATHS:
        return invalid(f"url must be one of {', '.join(_PATHS)}", custom_id)
    if not isinstance(body, dict):
        return invalid("body must be an object", custom_id)
    if body.get("stream"):
        return invalid("body.stream must be false", custom_id)
    if priority:
        body.setdefault("priority", priority)
    try:
        return _Request(custom_id, url, json.dumps(body).encode())
    except RecursionError:
        return invalid("body is nested too deeply", custom_id)


def _result(response: httpcore.Response) -> dict[str, Any]:
    """Return a response in the form of OpenAI's lines."""
    identity = next((value for name, value in response.headers if name == b"x-request-id"), b"")
    try:
        body = json.loads(response.content)
    except ValueError:
        body = {"error": {"message": response.content[:1000].decode(errors="replace")}}
    return {
        "status_code": response.status,
        "request_id": identity.decode("latin-1"),
        "body": body,
    }


def _retry_after(response: httpcore.Response) -> float:
    text = next((value for name, value in response.headers if name.lower() == b"retry-after"), b"")
    return min(float(text), 60.0) if text.isdigit() else 0.0


def _generated(body: Any) -> int:
    """Return the number of generated tokens that an answer states."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return 0
    number = usage.get("completion_tokens", usage.get("output_tokens"))
    return number if isinstance(number, int) else 0


def _is_answered(line: str, done: set[str]) -> bool:
    """Return whether a line of the output is a good answer, and add its custom_id to `done`.

    Raises ValueError for what no run writes. A killed run may leave half of its last line.
    """
    if not line.endswith("\n") and line.startswith(_BEGIN[: len(line)]):
        return False
    answer = json.loads(line)
    if not isinstance(answer, dict) or answer.keys() != {"custom_id", "response", "error"}:
        raise ValueError("no answer")
    response = answer["response"]
    if not isinstance(response, dict) or response.get("status_code") != _OK:
        return False
    done.add(str(answer["custom_id"]))
    return True


def _opened(path: Path, mode: str) -> TextIO:
    try:
        file: TextIO = path.open(mode, encoding="utf-8")  # type: ignore[assignment]
    except OSError as error:
        raise InputError(f"{path}: {os.strerror(error.errno or 0)}.") from None
    return file
