"""What a key may use in a minute, and what is left of it. Pure: the time is handed in.

Requests and tokens are kept as OpenAI keeps them: in buckets that are full at first and refill
evenly. Tokens are reserved before a completion starts (its prompt, estimated, and all the output
that it asks for) and corrected when it ends.
"""

import math
from collections.abc import Iterable
from typing import TypeAlias

import grpc

from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.serving.key_file import Tier

__all__ = [
    "Account",
    "Bucket",
    "GenerationRequest",
    "cap_output",
    "estimated_tokens",
    "sequence_count",
]

GenerationRequest: TypeAlias = completion_pb2.CompleteRequest | completion_pb2.ChatRequest
_DEFAULT_OUTPUT = 16  # tokens of a completion's choice, where max_tokens is absent
_USUAL_ANSWER = 1_024  # tokens of a chat's choice, likewise
_BYTES_PER_TOKEN = 4
_MINUTE = 60.0
_ROUNDING = 1e-6


class Bucket:
    """Holds `per_minute` at most and refills at that rate. Times are seconds of one clock."""

    __slots__ = ("_level", "_time", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._time = now

    def left(self, now: float) -> float:
        """What is in it; negative where more was used than reserved."""
        refilled = self._level + (now - self._time) * self.per_minute / _MINUTE
        self._level, self._time = min(refilled, float(self.per_minute)), now
        return self._level

    def wait(self, amount: float, now: float) -> float:
        """Seconds until it holds the amount, or is full; 0.0 = it does."""
        missing = min(amount, self.per_minute) - self.left(now)
        return missing * _MINUTE / self.per_minute if missing > _ROUNDING else 0.0

    def take(self, amount: float, now: float) -> None:
        """Take the amount out (or, negative, put it back), into debt if need be."""
        self._level = self.left(now) - amount

    def full_in(self, now: float) -> float:
        """Seconds until it is full."""
        return self.wait(self.per_minute, now)

    def resize(self, per_minute: int, now: float) -> None:
        """Another limit from now on; what was used stays used."""
        used = self.per_minute - self.left(now)
        self.per_minute, self._level = per_minute, per_minute - used


class Account:
    """What a key used lately."""

    def __init__(self, identity: str, name: str, tier: Tier, now: float) -> None:
        self.id = identity
        self.name = name
        self.streams = 0
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.set_tier(tier, now)

    def set_tier(self, tier: Tier, now: float) -> None:
        """Other limits from now on."""
        self.tier = tier
        self._requests = _resized(self._requests, tier.requests_per_minute, now)
        self._tokens = _resized(self._tokens, tier.tokens_per_minute, now)

    def count_request(self, now: float) -> None:
        """A request came. Raises RESOURCE_EXHAUSTED."""
        if self._requests is not None:
            _take(self._requests, 1, "requests", now)

    def require_model(self, model: str) -> None:
        """PERMISSION_DENIED for a model, by its canonical id, that is not for this tier."""
        if self.tier.models is not None and model not in self.tier.models:
            raise ServiceError(
                grpc.StatusCode.PERMISSION_DENIED,
                "MODEL_NOT_ALLOWED",
                f"This API key may not use the model {model}.",
                field="model",
            )

    def begin(self, tokens: int, now: float, choices: int = 1) -> int:
        """Completions start that draw so many choices and may use so many tokens. Return how many
        tokens are reserved: at most a minute's. Raises RESOURCE_EXHAUSTED."""
        limit = self.tier.concurrent_streams
        if limit is not None and self.streams + choices > limit:
            raise _exhausted(
                f"This key may have {limit} choices under way; {self.streams} are, and this "
                f"request has {choices}.",
                1.0,
            )
        reserved = 0
        if self._tokens is not None:
            reserved = min(tokens, self._tokens.per_minute)
            _take(self._tokens, reserved, "tokens", now)
        self.streams += choices
        return reserved

    def end(self, reserved: int, used: int, now: float, choices: int = 1) -> None:
        """They have ended, and used so many tokens, fewer than `begin` reserved or more."""
        self.streams -= choices
        if self._tokens is not None:
            self._tokens.take(used - reserved, now)

    def headers(self, now: float) -> dict[str, str]:
        """What is left, as OpenAI's headers say it."""
        headers: dict[str, str] = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                left = max(0, math.floor(bucket.left(now)))
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(left)
                headers[f"x-ratelimit-reset-{name}"] = _duration(bucket.full_in(now))
        return headers


def estimated_tokens(request: GenerationRequest) -> int:
    """The most that a request will use: exact for ids, a token per 4 bytes of text. A chat that
    leaves its output open is taken for one with usual answers."""
    choices = request.n if request.HasField("n") else 1
    output = _output(request)
    if isinstance(request, completion_pb2.ChatRequest):
        size = sum(part.ByteSize() for part in (*request.messages, *request.tools))
        return math.ceil(size / _BYTES_PER_TOKEN) + choices * (
            _USUAL_ANSWER if output is None else output
        )
    assert output is not None
    texts = len(request.suffix.encode()) * len(request.prompts)
    ids = 0
    for prompt in request.prompts:
        if prompt.HasField("token_ids"):
            ids += len(prompt.token_ids.ids)
        else:
            texts += len(prompt.text.encode())
    return ids + math.ceil(texts / _BYTES_PER_TOKEN) + output * sequence_count(request)


def sequence_count(request: GenerationRequest) -> int:
    """How many choices the engine draws for a request: each takes a place of its own there."""
    choices = request.n if request.HasField("n") else 1
    if isinstance(request, completion_pb2.ChatRequest):
        return choices
    return max(choices, request.best_of) * len(request.prompts)


def cap_output(request: GenerationRequest, limits: Iterable[int | None]) -> None:
    """Lowers max_tokens, its default too, to the least of the limits; None is none."""
    limit = min((limit for limit in limits if limit is not None), default=None)
    asked, stopping = _output(request), request.stopping
    if limit is not None and (asked is None or limit < asked):
        stopping.max_tokens = limit
        if asked is None or stopping.min_tokens <= asked:  # what was wrong before must stay so
            stopping.min_tokens = min(stopping.min_tokens, limit)


def _output(request: GenerationRequest) -> int | None:
    """Tokens that each choice may have; None is all the room that there is."""
    if request.stopping.HasField("max_tokens"):
        return request.stopping.max_tokens
    return None if isinstance(request, completion_pb2.ChatRequest) else _DEFAULT_OUTPUT


def _resized(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket


def _take(bucket: Bucket, amount: int, what: str, now: float) -> None:
    wait = bucket.wait(amount, now)
    if wait:
        limit = f"{bucket.per_minute} {what} per minute"
        raise _exhausted(
            f"This key's limit of {limit} is used up; try again in {_duration(wait)}.", wait
        )
    bucket.take(amount, now)


def _exhausted(message: str, retry_seconds: float) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "RATE_LIMIT_EXCEEDED",
        message,
        retry_seconds=retry_seconds,
    )


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 6m0s."""
    milliseconds = math.ceil(round(seconds * 1e3, 3))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1e3:g}s" if minutes else f"{rest / 1e3:g}s"
