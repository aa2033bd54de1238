"""Architectures whose refusal a look at their modules and a trial pass would not give."""

from collections.abc import Mapping

__all__ = ["REFUSED"]

REFUSED: Mapping[str, str] = {
    "OPTForCausalLM": "its head calls modules inside its layers",
}
"""Reason of each, a clause"""
