"""Statuses of models: JSON of /status.json."""

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from services.http_shim.backends.model_source import ServedStatus
from services.http_shim.backends.status_history import LoadSample
from services.http_shim.endpoints.model_cards import LoadStatus, load_status
from tokenwire.pb.completion.v1 import models_pb2

__all__ = ["EngineStatus", "ModelStatus", "RecentTimes", "Status", "model_status"]


_STATES = {
    models_pb2.ENGINE_STATE_SERVING: "serving",
    models_pb2.ENGINE_STATE_AWAY: "away",
    models_pb2.ENGINE_STATE_REFUSED: "refused",
}


class RecentTimes(Struct):
    """Distribution of the last times, in seconds; null if there is none."""

    window_seconds: float
    count: int
    p50_seconds: float | None
    p95_seconds: float | None


class MemoryPool(Struct):
    """A part of an engine's memory."""

    kind: str
    """weights, kv_cache, states or adapters"""
    window: int
    """Last tokens that the layers of a KV cache read; 0 = all"""
    bytes: int
    used_bytes: int
    cached_bytes: int
    """Further bytes that keep cached prefixes, until room is needed"""


class EngineStatus(Struct):
    """An engine, and its load if it serves. Models that share an engine report the same."""

    target: str
    state: str
    """serving, away or refused"""
    reason: str | None = None
    """Reason for which it is refused"""
    version: str | None = None
    device: str | None = None
    dtype: str | None = None
    kernels: str | None = None
    running_sequences: int | None = None
    waiting_sequences: int | None = None
    kv_blocks: int | None = None
    kv_used_blocks: int | None = None
    kv_block_size: int | None = None
    draining: bool | None = None
    memory: list[MemoryPool] | None = None


class ModelStatus(Struct):
    """Counts of a model since its tokenizer service started, or null if that is not reachable."""

    id: str
    reachable: bool
    status: LoadStatus
    version: str | None = None
    uptime_seconds: float | None = None
    running_requests: int | None = None
    requests: dict[str, int] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    first_token: RecentTimes | None = None
    engines: list[EngineStatus] | None = None
    history: Sequence[LoadSample] | UnsetType = UNSET
    """Samples of the last ten minutes, with the parameter `since`: those after that time"""


class Status(Struct):
    """The shim and its models."""

    version: str
    uptime_seconds: float
    models: list[ModelStatus]


def model_status(served: ServedStatus) -> ModelStatus:
    """Return the status of a model."""
    answer = served.status
    status = load_status(served.state, on_demand=served.on_demand)
    if answer is None:
        return ModelStatus(served.id, reachable=False, status=status)
    return ModelStatus(
        served.id,
        reachable=True,
        status=status,
        version=answer.version,
        uptime_seconds=answer.uptime_seconds,
        running_requests=answer.running_requests,
        requests={each.outcome: each.requests for each in answer.outcomes},
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        completion_tokens=answer.completion_tokens,
        first_token=_recent_times(answer.first_token),
        engines=[_engine_status(each) for each in answer.engines],
    )


def _recent_times(times: models_pb2.RecentTimes) -> RecentTimes:
    return RecentTimes(
        window_seconds=times.window_seconds,
        count=times.count,
        p50_seconds=times.p50_seconds if times.count else None,
        p95_seconds=times.p95_seconds if times.count else None,
    )


def _engine_status(engine: models_pb2.EngineStatus) -> EngineStatus:
    state = _STATES.get(engine.state, "away")
    if state != "serving":
        return EngineStatus(engine.target, state, reason=engine.reason or None)
    return EngineStatus(
        engine.target,
        state,
        version=engine.version,
        device=engine.device,
        dtype=engine.dtype,
        kernels=engine.kernels,
        running_sequences=engine.running_sequences,
        waiting_sequences=engine.waiting_sequences,
        kv_blocks=engine.total_blocks,
        kv_used_blocks=engine.used_blocks,
        kv_block_size=engine.block_size,
        draining=engine.draining,
        memory=[
            MemoryPool(each.kind, each.window, each.bytes, each.used_bytes, each.cached_bytes)
            for each in engine.memory
        ],
    )
