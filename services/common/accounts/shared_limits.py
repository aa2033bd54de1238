"""Limits of API keys that hold over several processes: their buckets and streams in Redis.

While Redis is away, each process counts alone, as it does without Redis. No operation waits for
Redis longer than a quarter of a second, and only operations that run when Redis is lost wait so
long.
"""

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from typing import Any

from prometheus_client import Gauge

from services.common.accounts.account import Account
from services.common.settings import StartupError
from tokenwire.extras import install_command

__all__ = ["Lease", "SharedLimits"]

_LOG = logging.getLogger("limits")
_SHARED = Gauge(
    "tokenwire_shared_limits", "1 while limits are counted in Redis, 0 while it is away."
)
_PATIENCE_SECONDS = 0.25
_PROBE_SECONDS = 0.5
_LEASE_MILLISECONDS = 15_000
"""Milliseconds after which the streams of a killed process are free again"""
_RENEW_SECONDS = 5.0
_CONNECTIONS = 32
_PREFIX = "tokenwire:limits"

# A bucket is a hash of its level, the time of the level and its capacity. A changed capacity keeps
# the used amount. A full bucket is the same as none, so the key expires when it is full.
_BUCKET = """
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6

local function level(key, per_minute)
  local found = redis.call('HMGET', key, 'level', 'time', 'per_minute')
  if not found[1] then return per_minute end
  local before = tonumber(found[3])
  local refilled = tonumber(found[1]) + math.max(0, now - tonumber(found[2])) * before / 60
  return per_minute - (before - math.min(refilled, before))
end

local function store(key, per_minute, left)
  redis.call('HSET', key, 'level', string.format('%.17g', left),
             'time', string.format('%.17g', now), 'per_minute', per_minute)
  redis.call('PEXPIRE', key, math.max(1, math.ceil((per_minute - left) / per_minute * 60000)))
end
"""
# KEYS: buckets of requests and of tokens. ARGV: their capacities; 0 tokens = no such bucket.
_COUNT = f"""{_BUCKET}
local per_minute, tokens_per_minute = tonumber(ARGV[1]), tonumber(ARGV[2])
local left, granted = level(KEYS[1], per_minute), 0
if left >= 1 - 1e-6 then
  granted, left = 1, left - 1
  store(KEYS[1], per_minute, left)
end
local tokens = tokens_per_minute > 0 and level(KEYS[2], tokens_per_minute) or 0
return {{granted, string.format('%.17g', left), string.format('%.17g', tokens)}}
"""
# KEYS: bucket of tokens, set of streams. ARGV: capacity of the bucket (0 = none), tokens, most
# choices (-1 = any), choices, name and milliseconds of the lease. Streams are a sorted set of
# leases by the time of their end; a name begins with its number of choices. The script returns
# whether tokens and choices are granted, the level of the bucket, and the running choices if they
# are too many, else -1.
_BEGIN = f"""{_BUCKET}
local per_minute, tokens = tonumber(ARGV[1]), tonumber(ARGV[2])
local most, choices = tonumber(ARGV[3]), tonumber(ARGV[4])
local running = 0
if most >= 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  for _, name in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    running = running + tonumber(string.match(name, '^%d+'))
  end
end
local left = per_minute > 0 and level(KEYS[1], per_minute) or 0
if most >= 0 and running + choices > most then
  return {{0, string.format('%.17g', left), running}}
end
if per_minute > 0 then
  if left < math.min(tokens, per_minute) - 1e-6 then
    return {{0, string.format('%.17g', left), -1}}
  end
  left = left - tokens
  store(KEYS[1], per_minute, left)
end
if most >= 0 then
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[6]) / 1000, ARGV[5])
  redis.call('PEXPIRE', KEYS[2], ARGV[6])
end
return {{1, string.format('%.17g', left), -1}}
"""
# KEYS: bucket of tokens, set of streams. ARGV: capacity (0 = none), tokens to take, lease's name.
_END = f"""{_BUCKET}
local per_minute, tokens = tonumber(ARGV[1]), tonumber(ARGV[2])
redis.call('ZREM', KEYS[2], ARGV[3])
if per_minute == 0 then return '0' end
local left = math.min(level(KEYS[1], per_minute) - tokens, per_minute)
store(KEYS[1], per_minute, left)
return string.format('%.17g', left)
"""
# KEYS: set of streams. ARGV: milliseconds of the leases, then their names.
_RENEW = f"""{_BUCKET}
for place = 2, #ARGV do
  redis.call('ZADD', KEYS[1], now + tonumber(ARGV[1]) / 1000, ARGV[place])
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""


class Lease:
    """A running request in Redis, which must be renewed until it ends."""

    __slots__ = ("is_shared", "name", "reserved")

    def __init__(self, choices: int) -> None:
        self.name = f"{choices}:{uuid.uuid4().hex}"
        self.reserved = 0
        """Tokens that the request has reserved"""
        self.is_shared = False
        """True if Redis has granted the lease; False if Redis was away"""


class SharedLimits:
    """Usage of API keys, counted in Redis. Its method `run` must run in a task."""

    def __init__(self, url: str) -> None:
        """Connect at the first use. Raises StartupError for an unusable URL, or without `redis`."""
        try:
            from redis.asyncio import BlockingConnectionPool, Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.exceptions import RedisError
        except ImportError:
            raise StartupError(
                f"--limits-url needs the package redis: {install_command('redis')}"
            ) from None
        self._failures: tuple[type[Exception], ...] = (RedisError, OSError, TimeoutError)
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=_CONNECTIONS,
                timeout=_PATIENCE_SECONDS,
                socket_timeout=_PATIENCE_SECONDS,
                socket_connect_timeout=_PATIENCE_SECONDS,
                # try once more, because a connection may have broken while it was idle
                retry=Retry(NoBackoff(), 1),
            )
        except (ValueError, TypeError) as error:
            raise StartupError(f"--limits-url is no URL of Redis: {error}.") from None
        self._redis: Any = Redis(connection_pool=pool)
        self._count, self._begin, self._end, self._renew = (
            self._redis.register_script(text) for text in (_COUNT, _BEGIN, _END, _RENEW)
        )
        self._leases: dict[str, str] = {}
        """Redis key of the set of streams for each lease of this process, by the lease's name"""
        self._settling: set[asyncio.Task[None]] = set()
        self._is_away = False
        self._lost = asyncio.Event()
        _SHARED.set(1)

    async def run(self) -> None:
        """Until cancelled, renew leases, and try to reach Redis while it is away."""
        while True:
            if self._is_away:
                await asyncio.sleep(_PROBE_SECONDS)
                await self._try_again()
                continue
            try:
                async with asyncio.timeout(_RENEW_SECONDS):
                    await self._lost.wait()
            except TimeoutError:
                await self._renew_leases()

    async def close(self) -> None:
        """Charge the requests that have ended, and disconnect."""
        if self._settling:
            await asyncio.wait(self._settling, timeout=_PATIENCE_SECONDS)
        await self._redis.aclose()

    async def count_request(self, account: Account) -> bool:
        """Count a request; return False if Redis is away. Raises RESOURCE_EXHAUSTED."""
        tier = account.tier
        if tier.requests_per_minute is None:
            return True
        answer = await self._call(
            self._count,
            [_key(account, "requests"), _key(account, "tokens")],
            [tier.requests_per_minute, tier.tokens_per_minute or 0],
        )
        if answer is None:
            return False
        granted, requests, tokens = answer
        now = time.monotonic()
        account.mirror(now, requests=float(requests), tokens=float(tokens))
        if not granted:
            raise account.requests_exhausted(now)
        return True

    def charge_requests(self, account: Account, more: int) -> bool:
        """Count further requests, even if this leaves a debt; return False if Redis is away."""
        per_minute = account.tier.requests_per_minute
        if per_minute is not None and not self._is_away:
            self._run_later(self._charge(account, per_minute, more))
        return not self._is_away

    async def begin(self, account: Account, tokens: int, choices: int) -> Lease:
        """Start a request; the lease is not shared if Redis is away. Raises RESOURCE_EXHAUSTED."""
        tier, lease = account.tier, Lease(choices)
        streams = _key(account, "streams")
        if tier.tokens_per_minute is not None:
            lease.reserved = min(tokens, tier.tokens_per_minute)
        if tier.tokens_per_minute is None and tier.concurrent_streams is None:
            lease.is_shared = True
            return lease
        most = -1 if tier.concurrent_streams is None else tier.concurrent_streams
        answer = await self._call(
            self._begin,
            [_key(account, "tokens"), streams],
            [
                *(tier.tokens_per_minute or 0, lease.reserved, most, choices),
                *(lease.name, _LEASE_MILLISECONDS),
            ],
        )
        if answer is not None:
            granted, left, running = answer
            now = time.monotonic()
            account.mirror(now, tokens=float(left))
            if not granted:
                if running >= 0:
                    raise account.streams_exhausted(running, choices)
                raise account.tokens_exhausted(lease.reserved, now)
            lease.is_shared = True
        if most >= 0:
            self._leases[lease.name] = streams
        return lease

    def end(self, account: Account, lease: Lease, used_tokens: int) -> None:
        """End a request, and charge its used tokens in a task that its answer does not wait for."""
        is_counted = self._leases.pop(lease.name, None) is not None
        difference = used_tokens - lease.reserved if lease.is_shared else 0
        if account.tier.tokens_per_minute is None:
            difference = 0
        if not self._is_away and (is_counted or difference):
            self._run_later(self._settle(account, lease.name, difference))

    def _run_later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _charge(self, account: Account, per_minute: int, more: int) -> None:
        keys = [_key(account, "requests"), _key(account, "streams")]
        left = await self._call(self._end, keys, [per_minute, more, ""])
        if left is not None:
            account.mirror(time.monotonic(), requests=float(left))

    async def _settle(self, account: Account, name: str, tokens: int) -> None:
        keys = [_key(account, "tokens"), _key(account, "streams")]
        per_minute = account.tier.tokens_per_minute or 0
        left = await self._call(self._end, keys, [per_minute, tokens, name])
        if left is not None:
            account.mirror(time.monotonic(), tokens=float(left))

    async def _renew_leases(self) -> bool:
        """Renew the leases of this process. Return whether Redis has answered."""
        by_key: dict[str, list[str]] = defaultdict(list)
        for name, key in self._leases.items():
            by_key[key].append(name)
        for key, names in by_key.items():
            if not await self._try(self._renew(keys=[key], args=[_LEASE_MILLISECONDS, *names])):
                return False
            # a request that ended meanwhile may have been removed before it was renewed
            ended = [name for name in names if name not in self._leases]
            if ended and not await self._try(self._redis.zrem(key, *ended)):
                return False
        return True

    async def _try_again(self) -> None:
        """Count in Redis again if it accepts writes."""
        probe = self._redis.set(f"{_PREFIX}:probe", 1, px=1000)
        if await self._try(probe) and await self._renew_leases():
            self._is_away = False
            self._lost.clear()
            _SHARED.set(1)
            _LOG.info("Redis is back: limits of keys hold over all processes again")

    async def _try(self, operation: Any) -> bool:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await operation
        except self._failures as error:
            self._note_loss(error)
            return False
        return True

    async def _call(self, script: Any, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Return a script's answer; None if Redis is away."""
        if self._is_away:
            return None
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                return await script(keys=keys, args=arguments)
        except self._failures as error:
            self._note_loss(error)
            return None

    def _note_loss(self, error: Exception) -> None:
        if self._is_away:
            return
        self._is_away = True
        self._lost.set()
        _SHARED.set(0)
        why = str(error) or f"no answer within {_PATIENCE_SECONDS:g} s"
        _LOG.warning("Redis is away, so each process counts the limits of keys: %s", why)


def _key(account: Account, what: str) -> str:
    return f"{_PREFIX}:{{{account.id}}}:{what}"  # the braces keep a key's values on one node
