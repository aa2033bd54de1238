"""Parser of gpt-oss's messages, which consist of parts with headers (OpenAI's Harmony format).

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…

The channel `analysis` is reasoning; `final`, and `commentary` without a recipient, are content. A
part with a recipient, <|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}, is a
call. The recipient may also stand in front of the channel.
"""

import re
from collections.abc import Generator, Sequence

from services.tokenizer.chat.answer.call_parts import Parameters, arguments_object
from services.tokenizer.chat.answer.message_parser import SegmentKind
from services.tokenizer.chat.answer.text_reader import Reading, ReadingParser, is_half

__all__ = ["HarmonyParser"]

_HEADS = ("<|start|>", "<|channel|>", " to=")
"""Beginnings of headers"""
_BODY = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
"""Ends of bodies, of which the last two begin the next header"""
_LONGEST_HEADER = 512
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser(ReadingParser):
    """Parser of one message. Whitespace between its parts belongs to none of them."""

    def __init__(
        self, tools: Parameters, within: SegmentKind | None = None, *, is_forced: bool = False
    ) -> None:
        """tools: tools that the model may call.

        within: kind of the part in which the prompt ends; None = it ends in front of a header.
        is_forced: whether a grammar forces calls, so that all other text is markup.
        """
        self._tools = tools
        self._within = within
        self._content = SegmentKind.MARKUP if is_forced else SegmentKind.CONTENT
        self._written: set[SegmentKind] = set()
        super().__init__()

    def _read(self) -> Generator[None, None, None]:
        reader = self._reader
        if self._within is not None:
            self._written.add(self._within)
            yield from self._read_body(self._within)
        while True:
            reader.at = 0
            if not (yield from reader.more()):
                return
            if not (yield from self._read_part()):
                if reader.text.startswith(_ENDS[-2:]):  # no header follows this beginning of one
                    reader.settle_as(self._content, 1)
                yield from self._read_body(self._content)

    def _read_part(self) -> Reading:
        """Read a header and its body; return False, and settle nothing, if there is none."""
        reader = self._reader
        if not (yield from self._read_header()):
            return False
        header, begin = reader.text[: reader.at], reader.at + len(_BODY)
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            yield from self._read_call(recipient[1].removeprefix("functions."), begin)
            return True
        channel = _CHANNEL.search(header)
        is_reasoning = channel is not None and channel[1] == "analysis"
        kind = SegmentKind.REASONING if is_reasoning else self._content
        reader.settle(SegmentKind.MARKUP, begin, "")
        if kind in self._written and kind is not SegmentKind.MARKUP:
            reader.settle(kind, 0, "\n")
        self._written.add(kind)
        yield from self._read_body(kind)
        return True

    def _read_call(self, name: str, begin: int) -> Generator[None, None, None]:
        """Read a call whose body begins at `begin`. A call of an unknown tool is content."""
        reader = self._reader
        reader.at = begin
        if name in self._tools and (yield from reader.space()) and reader.text[reader.at] == "{":
            reader.settle(SegmentKind.CALL, reader.at, name)
            yield from arguments_object(reader)
        elif name in self._tools and reader.is_interrupted and not reader.text[begin:].strip():
            reader.settle_as(SegmentKind.MARKUP, len(reader.text))
        else:
            reader.settle_as(self._content, begin)
        yield from self._read_body(self._content)

    def _read_header(self) -> Reading:
        """Read up to the mark that begins the body."""
        reader = self._reader
        while not any(reader.text.startswith(head) for head in _HEADS):
            if reader.is_ended or not is_half(reader.text, _HEADS):
                return self._leave_out_half(_HEADS)
            yield
        while (place := reader.text.find(_BODY)) < 0:
            if len(reader.text) > _LONGEST_HEADER:
                return False
            if reader.is_ended:
                return self._leave_out_half((reader.text,))
            yield
        reader.at = place
        return True

    def _leave_out_half(self, marks: Sequence[str]) -> bool:
        """Settle a header that an interruption cut as markup. Return false if there is none."""
        if self._reader.is_interrupted and is_half(self._reader.text, marks):
            self._reader.settle_as(SegmentKind.MARKUP, len(self._reader.text))
        return False

    def _read_body(self, kind: SegmentKind) -> Generator[None, None, None]:
        """Read the text of a part, and the mark that ends it."""
        reader = self._reader
        if not (yield from reader.text_until(kind, _ENDS)):
            return
        end = next(end for end in _ENDS if reader.text.startswith(end, reader.at))
        length = 0 if end in _HEADS else len(end)
        reader.settle(SegmentKind.MARKUP, reader.at + length, "")
