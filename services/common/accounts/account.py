"""Rate limits of an API key, as pure functions of the time.

As in OpenAI's API, requests and tokens are token buckets: full at first, refilled evenly. A request
reserves tokens before it starts, for its estimated prompt and its longest output, and is charged
the used tokens when it ends.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

import grpc

from services.common.accounts.budget import Budget
from services.common.accounts.key_file import Tier
from services.common.accounts.ledger import UsageLedger
from services.common.contract import DEFAULT_MAX_TOKENS
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2

if TYPE_CHECKING:
    from services.common.accounts.shared_limits import SharedLimits

__all__ = [
    "Account",
    "Bucket",
    "TextRequest",
    "cap_output",
    "estimated_tokens",
    "sequence_count",
]

_VectorRequest: TypeAlias = (
    completion_pb2.EmbedRequest | completion_pb2.ScoreRequest | completion_pb2.ClassifyRequest
)
TextRequest: TypeAlias = completion_pb2.GenerateRequest | _VectorRequest
_USUAL_ANSWER = 1_024  # tokens that a chat's choice without max_tokens is expected to have
_BYTES_PER_TOKEN = 4
_USUAL_IMAGE = 1_024  # tokens that an image is expected to have
_MINUTE = 60.0
_ROUNDING = 1e-6


class Bucket:
    """Token bucket of capacity and rate `per_minute`. Times are seconds of a monotonic clock."""

    __slots__ = ("_level", "_time", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._time = now

    def left(self, now: float) -> float:
        """Return the amount in the bucket, negative after a debt."""
        refilled = self._level + (now - self._time) * self.per_minute / _MINUTE
        self._level, self._time = min(refilled, float(self.per_minute)), now
        return self._level

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket holds the amount, or is full; 0.0 = now."""
        missing = min(amount, self.per_minute) - self.left(now)
        return missing * _MINUTE / self.per_minute if missing > _ROUNDING else 0.0

    def take(self, amount: float, now: float) -> None:
        """Take an amount, even if this leaves a debt; a negative amount is put back."""
        self._level = self.left(now) - amount

    def mirror(self, level: float, now: float) -> None:
        """Set the level to that of the same bucket in Redis."""
        self._level, self._time = min(level, float(self.per_minute)), now

    def resize(self, per_minute: int, now: float) -> None:
        """Change the limit, and keep the amount that is used."""
        used_amount = self.per_minute - self.left(now)
        self.per_minute, self._level = per_minute, per_minute - used_amount


class Account:
    """Recent usage of an API key."""

    def __init__(
        self,
        identity: str,
        name: str,
        tier: Tier,
        now: float,
        shared: "SharedLimits | None" = None,
        ledger: UsageLedger | None = None,
    ) -> None:
        """shared: limits that several processes count in Redis; None = this one counts alone.

        ledger: counts the usage of all keys; None = one for this account alone.
        """
        self.id = identity
        self.name = name
        self.shared = shared
        self.ledger = ledger or UsageLedger()
        self.budget = Budget(identity, self.ledger)
        self.streams = 0
        self.is_admin = False
        """True if the key's holder may operate the server"""
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.set_tier(tier, now)

    @property
    def is_limited(self) -> bool:
        """True if the tier or the key limits the requests, in kind or in amount."""
        return self.tier.is_limited or self.budget.limit is not None

    def set_tier(self, tier: Tier, now: float) -> None:
        """Change the limits, and keep the usage."""
        self.tier = tier
        self._requests = _resized(self._requests, tier.requests_per_minute, now)
        self._tokens = _resized(self._tokens, tier.tokens_per_minute, now)

    def count_request(self, now: float) -> None:
        """Count a request. Raises RESOURCE_EXHAUSTED."""
        if self._requests is not None:
            if self._requests.wait(1, now):
                raise self.requests_exhausted(now)
            self._requests.take(1, now)

    def charge_requests(self, more: int, now: float) -> None:
        """Count further requests, even if this leaves a debt."""
        if self._requests is not None:
            self._requests.take(more, now)

    def require_model(self, model: str) -> None:
        """Raise PERMISSION_DENIED for a canonical model id that the tier excludes."""
        if self.tier.models is not None and model not in self.tier.models:
            raise ServiceError(
                grpc.StatusCode.PERMISSION_DENIED,
                "MODEL_NOT_ALLOWED",
                f"This API key may not use the model {model}.",
                field="model",
            )

    def begin(self, tokens: int, now: float, choices: int = 1) -> int:
        """Start a request with `choices` choices, and return the number of tokens reserved.

        A reservation is at most a minute's tokens. Raises RESOURCE_EXHAUSTED.
        """
        limit = self.tier.concurrent_streams
        if limit is not None and self.streams + choices > limit:
            raise self.streams_exhausted(self.streams, choices)
        reserved = 0
        if self._tokens is not None:
            reserved = min(tokens, self._tokens.per_minute)
            if self._tokens.wait(reserved, now):
                raise self.tokens_exhausted(reserved, now)
            self._tokens.take(reserved, now)
        self.streams += choices
        return reserved

    def end(self, reserved: int, used_tokens: int, now: float, choices: int = 1) -> None:
        """End a request and charge the used tokens in place of those that `begin` reserved."""
        self.streams -= choices
        if self._tokens is not None:
            self._tokens.take(used_tokens - reserved, now)

    def mirror(
        self, now: float, *, requests: float | None = None, tokens: float | None = None
    ) -> None:
        """Set the levels to those that Redis counts for several processes."""
        if self._requests is not None and requests is not None:
            self._requests.mirror(requests, now)
        if self._tokens is not None and tokens is not None:
            self._tokens.mirror(tokens, now)

    def requests_exhausted(self, now: float) -> ServiceError:
        """Return the error of a request that exceeds the limit of requests."""
        assert self._requests is not None
        return _used_up(self._requests, 1, "requests", now)

    def tokens_exhausted(self, amount: int, now: float) -> ServiceError:
        """Return the error of a request whose tokens exceed the limit of tokens."""
        assert self._tokens is not None
        return _used_up(self._tokens, amount, "tokens", now)

    def streams_exhausted(self, running: int, choices: int) -> ServiceError:
        """Return the error of a request that would have too many choices run at once."""
        return _exhausted(
            f"This key may have {self.tier.concurrent_streams} choices in progress; {running} are, "
            f"and this request adds {choices}.",
            1.0,
        )

    def headers(self, now: float) -> dict[str, str]:
        """Return OpenAI's rate-limit headers."""
        headers: dict[str, str] = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                left = max(0, math.floor(bucket.left(now)))
                full_in = bucket.wait(bucket.per_minute, now)
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(left)
                headers[f"x-ratelimit-reset-{name}"] = _duration(full_in)
        return headers | self.budget.headers()


def estimated_tokens(request: TextRequest) -> int:
    """Return the most tokens that a request uses: exact for ids, else a token per 4 bytes of text.

    An image counts as 1,024 tokens, and a chat without max_tokens as 1,024 of output for each
    choice.
    """
    if isinstance(request, completion_pb2.ScoreRequest):
        pairs = len(request.second) // max(1, len(request.first))
        texts = [*request.first, *request.second, *request.first[:1] * (pairs - 1)]
        return math.ceil(sum(len(text.encode()) for text in texts) / _BYTES_PER_TOKEN)
    if isinstance(request, completion_pb2.EmbedRequest | completion_pb2.ClassifyRequest):
        return _estimated_input(request.inputs)
    output = _output(request)
    output = sequence_count(request) * (_USUAL_ANSWER if output is None else output)
    if request.HasField("conversation"):
        messages = request.conversation.messages
        size = sum(part.ByteSize() for part in (*messages, *request.tools))
        parts = (part for message in messages for part in message.parts)
        sizes = [len(part.image) for part in parts if part.HasField("image")]
        text_tokens = math.ceil(max(0, size - sum(sizes)) / _BYTES_PER_TOKEN)
        return text_tokens + len(sizes) * _USUAL_IMAGE + output
    prompts = request.prompts
    suffix_bytes = len(prompts.suffix.encode()) * len(prompts.items)
    images = len(prompts.images) * _USUAL_IMAGE
    return _estimated_input(prompts.items, suffix_bytes) + images + output


def _estimated_input(prompts: Iterable[completion_pb2.Prompt], text_bytes: int = 0) -> int:
    """Return the tokens of prompts, and of `text_bytes` more bytes of text."""
    ids = 0
    for prompt in prompts:
        if prompt.HasField("token_ids"):
            ids += len(prompt.token_ids.ids)
        else:
            text_bytes += len(prompt.text.encode())
    return ids + math.ceil(text_bytes / _BYTES_PER_TOKEN)


def sequence_count(request: TextRequest) -> int:
    """Return the number of sequences that the engine runs for a request; vectors count as one."""
    if isinstance(request, _VectorRequest):
        return 1
    choices = request.n if request.HasField("n") else 1
    prompts = 1 if request.HasField("conversation") else len(request.prompts.items)
    return max(choices, request.best_of) * prompts


def cap_output(request: TextRequest, limits: Iterable[int | None]) -> None:
    """Lower max_tokens, or its default, to the least of the limits; None = no limit."""
    if isinstance(request, _VectorRequest):
        return
    limit = min((limit for limit in limits if limit is not None), default=None)
    asked, stopping = _output(request), request.stopping
    if limit is not None and (asked is None or limit < asked):
        stopping.max_tokens = limit
        if asked is None or stopping.min_tokens <= asked:  # else min_tokens must stay invalid
            stopping.min_tokens = min(stopping.min_tokens, limit)


def _output(request: completion_pb2.GenerateRequest) -> int | None:
    """Return the output limit of each choice in tokens; None = the rest of the context."""
    if request.stopping.HasField("max_tokens"):
        return request.stopping.max_tokens
    return None if request.HasField("conversation") else DEFAULT_MAX_TOKENS


def _resized(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket


def _used_up(bucket: Bucket, amount: int, what: str, now: float) -> ServiceError:
    wait = max(bucket.wait(amount, now), 1e-3)
    limit = f"{bucket.per_minute} {what} per minute"
    return _exhausted(
        f"This key's limit of {limit} is used up; try again in {_duration(wait)}.", wait
    )


def _exhausted(message: str, retry_seconds: float) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "RATE_LIMIT_EXCEEDED",
        message,
        retry_seconds=retry_seconds,
    )


def _duration(seconds: float) -> str:
    """Format a duration as OpenAI does: 20ms, 1.5s, 6m0s."""
    milliseconds = math.ceil(round(seconds * 1e3, 3))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1e3:g}s" if minutes else f"{rest / 1e3:g}s"
