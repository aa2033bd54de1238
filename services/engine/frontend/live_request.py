"""Requests that the loop holds, and their callers."""

import asyncio
from dataclasses import dataclass
from typing import Any

from services.common.accounts.account import Account
from services.common.accounts.usage import RequestUsage
from services.engine.checked_request import CheckedRequest
from services.engine.frontend import request_accounting
from services.engine.frontend.adapter_registry import Adapter
from services.engine.frontend.request_span import RequestSpan
from services.engine.frontend.sink import Sink
from services.engine.messages import RequestDone

__all__ = ["Caller", "LiveRequest"]


@dataclass(frozen=True, slots=True)
class Caller:
    """Origin of a request, with its tenant, priority and deadline."""

    request_id: str
    traceparent: str = ""
    tenant: str = ""
    priority: int = 0
    timeout_seconds: float | None = None
    account: Account | None = None
    """Account of the API key; None for a service of the installation"""


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

    def count_usage(self, model: str, done: RequestDone | None, *, is_error: bool = False) -> None:
        """Count what the request has used for its API key; the tokenizer counts its own callers.

        model: name of the engine's model. done: None = the request ended early.
        """
        account = self.caller.account
        if account is None:
            return
        model = model if self.adapter is None else self.adapter.name
        if done is not None:
            counts = (done.prompt_tokens, done.completion_tokens, done.cached_tokens)
            usage = RequestUsage(model, *counts)
        else:  # the loop has computed the prompt once there is a token
            prompt = sum(map(len, self.checked.prompts)) if self.latency.tokens else 0
            usage = RequestUsage(model, prompt, self.latency.tokens, is_error=is_error)
        account.ledger.record(account, usage)
