"""What goes to the render process and comes back: frames, each a length and then JSON."""

import signal
import struct
from typing import Any

import msgspec

__all__ = ["FRAME", "READY", "TIMED_OUT", "RenderJob", "Rendering", "Templates"]

FRAME = struct.Struct("<I")
READY = b"ready"  # the first frame that comes back
TIMED_OUT = signal.SIGPROF  # ends the process when a conversation used up its CPU time


class Templates(msgspec.Struct, frozen=True):
    """What the process is told first."""

    sources: dict[str, str]
    """By name."""
    variables: dict[str, str]
    """That all templates know ("bos_token")."""
    max_length: int
    """Of what is rendered, in characters."""
    seconds: float
    """CPU time that a conversation may take: a busy machine must not change the verdict."""


class RenderJob(msgspec.Struct, frozen=True):
    """One conversation."""

    template: str
    messages: Any
    """A list of messages, as JSON."""
    tools: Any = None
    """A list of tools as OpenAI's API writes them, as JSON; None for none."""
    variables: dict[str, Any] = {}
    """Further ones, of the request."""
    add_generation_prompt: bool = True
    continue_last_message: bool = False


class Rendering(msgspec.Struct, frozen=True):
    """What became of a job."""

    text: str = ""
    error: str = ""
    """What the template, or the renderer, says against the conversation; "" = nothing."""
