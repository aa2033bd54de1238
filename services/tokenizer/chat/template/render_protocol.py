"""Protocol of the render process: frames, each a length and then JSON."""

import signal
import struct
from typing import Any

import msgspec

__all__ = ["FRAME", "READY", "TIMED_OUT", "RenderJob", "Rendering", "Templates"]

FRAME = struct.Struct("<I")
READY = b"ready"  # the first answer
TIMED_OUT = signal.SIGPROF  # ends the process if a conversation exceeds its CPU time


class Templates(msgspec.Struct, frozen=True):
    """The first frame: templates and limits."""

    sources: dict[str, str]
    """Jinja sources by name"""
    variables: dict[str, str]
    """Variables of all templates, such as "bos_token"."""
    max_length: int
    """Characters of a rendered conversation"""
    seconds: float
    """CPU time per conversation: wall time would depend on the load of the machine"""


class RenderJob(msgspec.Struct, frozen=True):
    """One conversation to render."""

    template: str
    messages: Any
    """A list of messages, as JSON"""
    tools: Any = None
    """A list of tools as OpenAI's API writes them, as JSON; None for none."""
    variables: dict[str, Any] = {}
    """Variables of the request"""
    add_generation_prompt: bool = True
    continue_last_message: bool = False


class Rendering(msgspec.Struct, frozen=True):
    """Result of a job."""

    text: str = ""
    template_spans: list[int] = []
    """Begin and end of each run of characters that the template wrote, not the request"""
    error: str = ""
    """Error of the template or of the limits; "" without one."""
