"""Validation of beam searches, shared by tokenizer and engine."""

from collections.abc import Mapping

from tokenwire.errors import invalid
from tokenwire.pb.types.v1.types_pb2 import BeamSearch, SamplingParams

__all__ = ["check_beam_search"]


def check_beam_search(
    beams: BeamSearch, sampling: SamplingParams, others: Mapping[str, bool]
) -> None:
    """Raise INVALID_ARGUMENT for a wrong value, or a field that excludes a beam search.

    others: further fields that exclude it, and whether the request has them.
    """
    clashes = {
        **others,
        "sampling.temperature": sampling.HasField("temperature")
        and sampling.temperature not in (0, 1),
        "sampling.top_p": sampling.HasField("top_p") and sampling.top_p != 1,
        "sampling.top_k": sampling.top_k != 0,
        "sampling.min_p": sampling.min_p != 0,
        "sampling.frequency_penalty": sampling.frequency_penalty != 0,
        "sampling.presence_penalty": sampling.presence_penalty != 0,
        "sampling.repetition_penalty": sampling.HasField("repetition_penalty")
        and sampling.repetition_penalty != 1,
        "sampling.dry": sampling.dry.multiplier != 0,
        "sampling.mirostat": sampling.HasField("mirostat"),
    }
    for field, clash in clashes.items():
        if clash:
            name = field.removeprefix("sampling.")
            message = f"A beam search can't be combined with {name}: leave one of them out."
            raise invalid(field, message)
