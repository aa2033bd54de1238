"""Requests of many kinds, and the comparison of their answers with undisturbed ones.

An engine that takes a request over computes its context anew, in steps of other sizes, so its
scores differ in the last digits. Where a draw lies that close to the boundary between two tokens,
the answer may go on with the other one: a tie. A tie also flips, without a fault, where the
temperature changes in the fifth or sixth digit.
"""

import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

__all__ = ["KINDS", "OTHER_KINDS", "Answer", "Asked", "ask", "difference", "is_tie", "requests"]

_PROMPTS = ("import json\n\n", "def load(path):\n", "class Reader:\n", "for line in lines:\n")
_GRAMMAR = {"type": "regex", "value": "([a-z ]{4}[0-9]{2},){400}"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 40}},
            "required": ["a", "b"],
        },
    },
}
_CHAT = {"messages": [{"role": "user", "content": "Say hello, and go on."}]}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.9},
    "n=3": {"temperature": 0.8, "n": 3},
    "grammar": {"temperature": 0.8, "grammar": _GRAMMAR, "ignore_eos": False},
    "penalties": {"temperature": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "mirostat": {"temperature": 0.8, "mirostat_target": 16.0},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "stop": {"temperature": 0.8, "stop": ["\n\n\n", "return None"], "ignore_eos": False},
    "chat": {"temperature": 0.8, **_CHAT},
    "tool": {
        "temperature": 0.8,
        **_CHAT,
        "tools": [_TOOL],
        "tool_choice": "required",
        "ignore_eos": False,
    },
}
OTHER_KINDS: Mapping[str, Mapping[str, Any]] = {
    "beams": {"temperature": 0, "n": 3, "use_beam_search": True, "stream": False},
    "echo": {"temperature": 1, "echo": True, "logprobs": 1},
    "regex": {"temperature": 1, "grammar": _GRAMMAR, "ignore_eos": False},
}
"""Kinds of requests that another engine can't continue, or that are much like one of KINDS"""
_CHATS = ("chat", "tool")
_READ_SECONDS = 120.0
_TIE_CHANGES = tuple(sign * size for size in (1e-6, 3e-6, 1e-5, 3e-5) for sign in (1, -1))
"""Relative changes of the temperature, which move the boundaries between tokens"""
_TOKEN_CHARACTERS = 6
_SAME_LOGPROB = 1e-3
"""Two engines add the same numbers in another order"""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be repeated, with the same answer."""

    kind: str
    path: str
    body: Mapping[str, Any]


@dataclass(slots=True)
class Answer:
    """All that a client got for a request, by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    failure: str = ""
    """Why the answer is not complete"""
    longest_pause: float = 0.0
    """Seconds between two chunks, or between the request and the first one"""


def requests(
    count: int, tokens: int, seed: int, kinds: Mapping[str, Mapping[str, Any]] = KINDS
) -> list[Asked]:
    """Return requests of these kinds in turn."""
    chance = random.Random(seed)
    names = list(kinds)
    return [
        _request(names[i % len(names)], kinds[names[i % len(names)]], chance, tokens)
        for i in range(count)
    ]


def _request(kind: str, fields: Mapping[str, Any], chance: random.Random, tokens: int) -> Asked:
    body = {"model": "default", "stream": True, "max_tokens": tokens, "ignore_eos": True}
    body |= {"seed": chance.randrange(2**31), **fields}
    if kind in _CHATS:
        return Asked(kind, "/v1/chat/completions", body)
    return Asked(kind, "/v1/completions", body | {"prompt": chance.choice(_PROMPTS)})


async def ask(http: httpx.AsyncClient, urls: Sequence[str], asked: Asked) -> Answer:
    """Send a request to the first server that takes it, and read its stream to the end.

    As a load balancer does, it leaves a server that restarts: one that says so, refuses the
    connection, or ends it before it answers.
    """
    last = time.monotonic()
    for url in urls:
        answer = Answer()
        try:
            async with http.stream("POST", url + asked.path, json=asked.body) as response:
                if response.status_code != 200:
                    content = (await response.aread()).decode()
                    if '"stopping"' in content:
                        continue
                    answer.failure = f"{response.status_code} {content[:300]}"
                    return answer
                if ignored := response.headers.get("x-tokenwire-ignored"):
                    answer.failure = f"ignored fields: {ignored}"
                    return answer
                if not asked.body["stream"]:
                    _take(answer, f"data: {(await response.aread()).decode()}", last)
                    return answer
                answer.failure = "the stream ended without [DONE]"
                async for line in response.aiter_lines():
                    last = _take(answer, line, last)
                return answer
        except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError) as error:
            if answer.texts or answer.calls:
                answer.failure = f"the stream broke: {error!r}"
                return answer
        except httpx.TimeoutException as error:
            answer.failure = f"no progress: {error!r}"
            return answer
    return Answer(failure="no server takes connections")


def _take(answer: Answer, line: str, last: float) -> float:
    """Read a line. Return the time of the last chunk; comments do not count."""
    if not line.startswith("data: "):
        return last
    if line == "data: [DONE]":
        answer.failure = answer.failure.removeprefix("the stream ended without [DONE]")
        return last
    now = time.monotonic()
    answer.longest_pause = max(answer.longest_pause, now - last)
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        answer.failure = str(event["error"])[:300]
        return now
    for choice in event["choices"]:
        index = choice["index"]
        delta = choice.get("delta", {})
        text = choice.get("text") or delta.get("content") or ""
        answer.texts[index] = answer.texts.get(index, "") + text
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            part = (function.get("name") or "") + (function.get("arguments") or "")
            answer.calls[index] = answer.calls.get(index, "") + part
        scores = (choice.get("logprobs") or {}).get("token_logprobs", ())
        scores = [score for score in scores if score is not None]  # the first of a prompt has none
        answer.logprobs.setdefault(index, []).extend(scores)
        if choice["finish_reason"]:
            answer.reasons[index] = choice["finish_reason"]
    return now


async def is_tie(
    http: httpx.AsyncClient, urls: Sequence[str], asked: Asked, answer: Answer, calm: Answer
) -> bool:
    """Return whether undisturbed requests part from `calm` too where `answer` does."""
    left = _partings(answer, calm)
    temperature = asked.body["temperature"]
    if answer.failure or not left or not temperature:
        return False
    for change in _TIE_CHANGES:
        body = {**asked.body, "temperature": temperature * (1 + change)}
        near = _partings(await ask(http, urls, Asked(asked.kind, asked.path, body)), calm)
        left = {
            text: place
            for text, place in left.items()
            if text not in near or abs(near[text] - place) > _TOKEN_CHARACTERS
        }
        if not left:
            return True
    return False


def _partings(answer: Answer, calm: Answer) -> dict[tuple[str, int], int]:
    """Return the place where each text of an answer parts from another answer's."""
    partings = {}
    for name in ("texts", "calls"):
        for index, text in getattr(calm, name).items():
            other = getattr(answer, name).get(index, "")
            if other != text:
                pairs = zip(text, other, strict=False)
                alike = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
                partings[name, index] = sum(1 for _ in alike)
    return partings


def difference(answer: Answer, calm: Answer) -> str:
    """Return how an answer differs from the undisturbed one; empty if it does not."""
    if answer.failure:
        return answer.failure
    for name in ("texts", "calls", "reasons"):
        mine, theirs = getattr(answer, name), getattr(calm, name)
        if mine != theirs:
            return f"{name}: {mine} instead of {theirs}"
    for index, scores in calm.logprobs.items():
        mine = answer.logprobs.get(index, [])
        apart = [abs(a - b) for a, b in zip(mine, scores, strict=False)]
        if len(mine) != len(scores) or max(apart, default=0) > _SAME_LOGPROB:
            return f"logprobs of choice {index}: {len(mine)} instead of {len(scores)}"
    return ""
