"""Parser that splits a message's text into reasoning, content and tool calls as it arrives."""

from collections.abc import Generator, Sequence

from services.tokenizer.chat.answer.call_readers import Parameters
from services.tokenizer.chat.answer.message_parser import Segment, SegmentKind
from services.tokenizer.chat.answer.text_reader import Reading, TextReader
from services.tokenizer.chat.answer.tool_formats import ReasoningFormat, ToolFormat

__all__ = ["ResponseParser"]


class ResponseParser:
    """Parser of one message. Whitespace between its parts belongs to none of them."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        calls: ToolFormat | None,
        tools: Parameters,
        *,
        is_reasoning: bool,
        is_forced: bool = False,
    ) -> None:
        """Take the model's forms; None for a message without reasoning or without calls.

        is_reasoning: whether the prompt ends inside reasoning.
        is_forced: whether a grammar forces calls, so that all other text is markup.
        """
        self._reader = TextReader()
        self._reasoning = reasoning
        self._calls = calls
        self._tools = tools
        self._is_reasoning = is_reasoning
        self._beside_calls = SegmentKind.MARKUP if is_forced else SegmentKind.CONTENT
        self._run = self._read()
        next(self._run, None)

    def feed(self, text: str) -> Sequence[Segment]:
        self._reader.text += text
        next(self._run, None)
        return self._reader.take()

    def finish(self, *, is_cut: bool, is_stopped: bool = False) -> Sequence[Segment]:
        self._reader.is_ended, self._reader.is_cut = True, is_cut
        self._reader.is_interrupted = is_cut or is_stopped
        next(self._run, None)
        return self._reader.take()

    def _read(self) -> Generator[None, None, None]:
        reader, calls = self._reader, self._calls
        if (yield from self._read_reasoning()):
            yield from self._skip_space()
        if calls is None:
            while (yield from reader.more()):
                reader.settle(SegmentKind.CONTENT, len(reader.text))
            return
        if (yield from self._read_leading_calls(calls)):
            yield from self._skip_space()
        reader.at = 0
        while (yield from self._read_text(self._beside_calls, calls.opens)):
            mark_at = reader.at
            if (yield from self._read_calls(calls)):
                yield from self._skip_space()
            else:  # the mark begins no call; a later one may
                self._settle(self._beside_calls, mark_at + 1)

    def _read_reasoning(self) -> Reading:
        """Read reasoning; return whether there was any."""
        reader = self._reader
        if self._reasoning is None:
            return False
        if not self._is_reasoning:
            yield from reader.space()
            if not (yield from reader.literal(self._reasoning.opens)):
                begun = reader.text[reader.at :]
                if reader.is_interrupted and _is_half(begun, (self._reasoning.opens,)):
                    self._settle(SegmentKind.MARKUP, len(reader.text))
                reader.at = 0
                return False
            reader.settle(SegmentKind.MARKUP, reader.at, "")
        yield from self._skip_space()
        closes = self._reasoning.closes
        if (yield from self._read_text(SegmentKind.REASONING, (closes,))):
            reader.settle(SegmentKind.MARKUP, reader.at + len(closes), "")
        return True

    def _read_leading_calls(self, calls: ToolFormat) -> Reading:
        """Read calls without a mark at the start of the message."""
        reader = self._reader
        may_lead = calls.leads and (yield from reader.space())
        if may_lead and reader.text[reader.at] in calls.leads:
            return (yield from self._read_calls(calls))
        return False

    def _read_calls(self, calls: ToolFormat) -> Reading:
        """Read calls from `at` on; an interrupted answer leaves out an unfinished call or mark."""
        reader = self._reader
        reader.ran_out = False
        found = yield from calls.read(reader, self._tools)
        if reader.ran_out and reader.is_interrupted:
            self._settle(SegmentKind.MARKUP, len(reader.text))
            return True
        return found

    def _read_text(self, kind: SegmentKind, marks: Sequence[str]) -> Reading:
        """Settle text up to a mark and the whitespace before it; return false without a mark."""
        reader, is_empty = self._reader, True
        while True:
            places = [place for mark in marks if (place := reader.text.find(mark)) >= 0]
            if places:
                kept = len(reader.text[: min(places)].rstrip())
                self._settle(kind, kept)
                reader.at = min(places) - kept
                return True
            if is_empty and reader.is_interrupted and _is_half(reader.text.strip(), marks):
                kind = SegmentKind.MARKUP
            held = 0 if reader.is_ended else _held(reader.text, marks)
            is_empty = is_empty and held == len(reader.text)
            self._settle(kind, len(reader.text) - held)
            if reader.is_ended:
                return False
            yield

    def _settle(self, kind: SegmentKind, upto: int) -> None:
        self._reader.settle(kind, upto, "" if kind is SegmentKind.MARKUP else None)

    def _skip_space(self) -> Generator[None, None, None]:
        reader = self._reader
        reader.at = 0
        yield from reader.space()
        reader.settle(SegmentKind.MARKUP, reader.at, "")


def _is_half(text: str, marks: Sequence[str]) -> bool:
    return bool(text) and any(mark.startswith(text) for mark in marks)


def _held(text: str, marks: Sequence[str]) -> int:
    """Return the length of the end that may belong to a mark or to whitespace before one."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    partial = next(
        (
            size
            for size in range(longest, 0, -1)
            if any(mark.startswith(text[-size:]) for mark in marks)
        ),
        0,
    )
    return len(text) - len(text[: len(text) - partial].rstrip())
