"""Process that renders chat templates.

Its command is `python -m services.tokenizer.chat.template.render_process`.

A template is a program from the checkpoint's author with a user's conversation as input. It can
loop forever, or exhaust memory. Only the end of its process stops it, so it gets its own process.

Frames arrive on stdin: the templates, then jobs. Each is answered by one frame on stdout.
"""

import resource
import signal
import sys
from typing import BinaryIO

import msgspec
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from services.tokenizer.chat.template.render_protocol import (
    FRAME,
    READY,
    TIMED_OUT,
    Rendering,
    RenderJob,
    Templates,
)

_MAX_ADDED_MEMORY = 1 << 30  # bytes
_PAGE = resource.getpagesize()


def render(templates: Templates, job: RenderJob) -> Rendering:
    """Render a conversation."""
    try:
        rendered = render_jinja_template(
            conversations=[job.messages],
            tools=job.tools,
            chat_template=templates.sources[job.template],
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_last_message,
            **templates.variables | job.variables,
        )
        text = rendered[0][0]
    except TemplateError as error:
        return Rendering(error=error.message or type(error).__name__)
    except MemoryError:
        return Rendering(error="The chat template takes too much memory.")
    except Exception as error:  # a template can raise whatever Python can
        return Rendering(error=f"The chat template failed: {type(error).__name__}: {error}")
    if len(text) > templates.max_length:
        most = f"{templates.max_length:,}"
        return Rendering(error=f"The chat template writes more than {most} characters.")
    return Rendering(text)


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Render jobs until the source ends."""
    if not (frame := _read(source)):
        return  # the service has stopped
    templates = msgspec.json.decode(frame, type=Templates)
    decoder, encoder = msgspec.json.Decoder(RenderJob), msgspec.json.Encoder()
    limit = _address_space() + _MAX_ADDED_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(TIMED_OUT, signal.SIG_DFL)  # ends the process even within a template
    _write(sink, READY)
    while frame := _read(source):
        signal.setitimer(signal.ITIMER_PROF, templates.seconds)
        answer = encoder.encode(render(templates, decoder.decode(frame)))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(sink, answer)


def _address_space() -> int:
    """Return the bytes that this process has mapped."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * _PAGE


def _read(source: BinaryIO) -> bytes:
    """Return the next frame; b"" at the end."""
    header = source.read(FRAME.size)
    return source.read(FRAME.unpack(header)[0]) if len(header) == FRAME.size else b""


def _write(sink: BinaryIO, content: bytes) -> None:
    sink.write(FRAME.pack(len(content)) + content)
    sink.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
