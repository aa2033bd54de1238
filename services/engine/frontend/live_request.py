"""Requests that the loop holds, and their callers."""

import asyncio
from dataclasses import dataclass
from typing import Any

from services.engine.checked_request import CheckedRequest
from services.engine.frontend import request_accounting
from services.engine.frontend.adapter_registry import Adapter
from services.engine.frontend.request_span import RequestSpan
from services.engine.frontend.sink import Sink

__all__ = ["Caller", "LiveRequest"]


@dataclass(frozen=True, slots=True)
class Caller:
    """Origin of a request, with its tenant, priority and deadline."""

    request_id: str
    traceparent: str = ""
    tenant: str = ""
    priority: int = 0
    timeout_seconds: float | None = None


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that the loop holds."""

    caller: Caller
    checked: CheckedRequest
    sink: Sink[Any]
    latency: request_accounting.TokenLatency
    span: RequestSpan
    adapter: Adapter | None
    """Adapter of the request; None = the model alone"""
    deadline: asyncio.TimerHandle | None = None
    is_cancelled: bool = False
    """True if the client has cancelled all sequences"""
