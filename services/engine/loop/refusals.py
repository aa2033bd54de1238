"""Outputs that refuse or abort a request, each with its reason for the client."""

import torch

from services.engine.checked_request import SamplingSettings
from services.engine.messages import Refused

__all__ = [
    "kv_cache_too_small",
    "not_finite",
    "nothing_allowed",
    "queue_full",
    "stalled",
    "step_failed",
]

_NO_MEMORY = "can't allocate memory"
"""Part of torch's message when a CPU allocation fails"""


def queue_full(handle: int, waiting: int) -> Refused:
    """Refuse a request for which the queue has no room."""
    message = f"{waiting} sequences already wait; try again."
    return Refused(handle, "RESOURCE_EXHAUSTED", "QUEUE_FULL", message, 1.0)


def kv_cache_too_small(handle: int, prompt: int, output: int, capacity: int) -> Refused:
    """Refuse a request with a sequence of more tokens than the KV cache holds."""
    message = (
        f"The KV cache holds {capacity} tokens, which can never fit {prompt} prompt tokens and "
        f"{output} to generate; lower max_tokens or shorten the prompt."
    )
    return Refused(handle, "OUT_OF_RANGE", "KV_CACHE_TOO_SMALL", message)


def stalled(handle: int, seconds: float) -> Refused:
    """Abort a request whose client has granted no credit for `seconds`."""
    message = f"The client granted no credit for {seconds:g} s."
    return Refused(handle, "RESOURCE_EXHAUSTED", "STALLED", message)


def not_finite(handle: int) -> Refused:
    """Abort a request for which the model computes NaN: all later tokens would be NaN too."""
    message = "The model computed NaN; its weights may be broken."
    return Refused(handle, "INTERNAL", "NOT_FINITE", message)


def nothing_allowed(handle: int, sampling: SamplingSettings) -> Refused:
    """Abort a request whose own limits leave no id to draw."""
    is_allowed = sampling.allowed is not None
    field = "sampling.allowed_token_ids" if is_allowed else "sampling.bad_token_ids"
    message = (
        "The grammar, allowed_token_ids and bad_words together leave no token to generate: "
        "allow more of what the grammar needs."
    )
    return Refused(handle, "INVALID_ARGUMENT", "NOTHING_ALLOWED", message, field=field)


def step_failed(handle: int, error: Exception) -> Refused:
    """Abort a request whose own part of a step has raised."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY in str(error):
        message = "The engine ran out of memory for this request; try again, or send a shorter one."
        return Refused(handle, "RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", message, 1.0)
    message = "A step failed on this request; see the engine's log."
    return Refused(handle, "INTERNAL", "STEP_FAILED", message)
