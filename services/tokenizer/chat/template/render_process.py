"""Process that renders chat templates.

Its command is `python -m services.tokenizer.chat.template.render_process`.

A template is a program by the checkpoint's author, whose input is a user's conversation. It can
loop forever, or exhaust memory. Only the end of its process stops it, so it gets its own process.

Frames arrive on stdin: the templates, then jobs. Each frame gets one frame on stdout as answer.
"""

import resource
import signal
import sys
from typing import Any, BinaryIO

import msgspec
from jinja2 import Template, TemplateError

from services.tokenizer.chat.template.environment import TemplateEnvironment
from services.tokenizer.chat.template.render_protocol import (
    FRAME,
    READY,
    TIMED_OUT,
    Rendering,
    RenderJob,
    Templates,
)
from services.tokenizer.chat.template.traced_text import (
    TracedText,
    from_template,
    plain_text,
    template_spans,
    trace_json,
)

_MAX_ADDED_MEMORY = 1 << 30  # bytes
_PAGE = resource.getpagesize()
_END_MARK = (
    "CONTINUE_FINAL_MESSAGE_TAG "  # transformers'; the space shows whether texts are trimmed
)


class PromptRenderer:
    """Compiled templates of a checkpoint."""

    def __init__(self, templates: Templates) -> None:
        self._templates = templates
        self._environment = TemplateEnvironment()
        self._compiled: dict[str, Template] = {}
        self._variables = {name: from_template(text) for name, text in templates.variables.items()}

    def render(self, job: RenderJob) -> Rendering:
        """Render a conversation."""
        try:
            text = self._text(job)
            if len(text) > self._templates.max_length:
                most = f"{self._templates.max_length:,}"
                return Rendering(error=f"The chat template writes more than {most} characters.")
            return Rendering(plain_text(text), template_spans(text))
        except TemplateError as error:
            return Rendering(error=plain_text(error.message or type(error).__name__))
        except MemoryError:
            return Rendering(error="The chat template takes too much memory.")
        except Exception as error:  # a template can raise whatever Python can
            return Rendering(error=f"The chat template failed: {type(error).__name__}: {error}")

    def _text(self, job: RenderJob) -> TracedText:
        messages = [_message(message) for message in job.messages]
        if job.continue_last_message:
            _mark_end(messages[-1])
        variables = {name: trace_json(value) for name, value in job.variables.items()}
        rendered = self._template(job.template).render(
            {"documents": None, **self._variables, **variables},
            messages=messages,
            tools=trace_json(job.tools),
            add_generation_prompt=job.add_generation_prompt,
        )
        assert isinstance(rendered, TracedText)
        return _cut_at_mark(rendered) if job.continue_last_message else rendered

    def _template(self, name: str) -> Template:
        if name not in self._compiled:
            self._compiled[name] = self._environment.from_string(self._templates.sources[name])
        return self._compiled[name]


def _message(message: Any) -> dict[str, Any]:
    """Return a message whose role counts as text of the template, because it is a known word."""
    traced = trace_json(message)
    assert isinstance(traced, dict)
    return {**traced, "role": from_template(message["role"])}


def _mark_end(message: dict[str, Any]) -> None:
    """Put the mark behind the last text of a message."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _END_MARK
        return
    last = [part for part in content if "text" in part][-1]
    last["text"] += _END_MARK


def _cut_at_mark(rendered: TracedText) -> TracedText:
    """Return the text before the mark. Raises TemplateError if the template left the mark out."""
    place = rendered.rfind(_END_MARK.strip())
    if place < 0:
        raise TemplateError(
            "The chat template leaves out the end of the last message, so that it can't be "
            "continued. Send its text without reasoning, or leave the message out."
        )
    begin = rendered[:place]
    return begin if rendered.startswith(_END_MARK, place) else begin.rstrip()


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Render jobs until the source ends."""
    if not (frame := _read(source)):
        return  # the service has stopped
    templates = msgspec.json.decode(frame, type=Templates)
    renderer = PromptRenderer(templates)
    decoder, encoder = msgspec.json.Decoder(RenderJob), msgspec.json.Encoder()
    limit = _address_space() + _MAX_ADDED_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(TIMED_OUT, signal.SIG_DFL)  # ends the process even within a template
    _write(sink, READY)
    while frame := _read(source):
        signal.setitimer(signal.ITIMER_PROF, templates.seconds)
        answer = encoder.encode(renderer.render(decoder.decode(frame)))
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
