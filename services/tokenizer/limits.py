"""What requests may ask for: the engine's model and limits, and this service's own."""

from collections.abc import Collection
from dataclasses import dataclass

from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """All that validation and planning need to know. Lengths are in tokens."""

    model: str
    system_fingerprint: str
    context_length: int
    vocabulary_size: int
    eos_ids: Collection[int]
    capabilities: Collection["engine_pb2.Capability.ValueType"]
    max_logprobs: int
    max_chat_logprobs: int
    max_sequences: int
    max_stop_strings: int
    appends_suffix: bool
    """Whether a suffix is appended on models without infill; it is refused otherwise."""
