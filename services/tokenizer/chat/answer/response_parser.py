"""Parser that splits a message's text into reasoning, content and tool calls as it arrives."""

from collections.abc import Generator, Sequence

from services.tokenizer.chat.answer.call_parts import Parameters
from services.tokenizer.chat.answer.message_parser import SegmentKind
from services.tokenizer.chat.answer.reasoning_formats import ReasoningFormat
from services.tokenizer.chat.answer.syntax_reader import read_calls
from services.tokenizer.chat.answer.text_reader import Reading, ReadingParser, is_half
from services.tokenizer.chat.answer.tool_formats import ToolFormat

__all__ = ["ResponseParser"]


class ResponseParser(ReadingParser):
    """Parser of one message. Whitespace between its parts belongs to none of them."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        calls: ToolFormat | None,
        tools: Parameters,
        *,
        is_reasoning: bool,
        is_forced: bool = False,
        frame: Sequence[str] = (),
    ) -> None:
        """reasoning, calls: forms of the model; None = the message has no reasoning, or no calls.

        is_reasoning: whether the prompt ends inside reasoning.
        is_forced: whether a grammar forces calls, so that all other text is markup.
        frame: marks around content, which belong to no part.
        """
        self._reasoning = reasoning
        self._calls = calls
        self._tools = tools
        self._is_reasoning = is_reasoning
        self._frame = (*frame, *_content_marks(calls))
        self._beside_calls = SegmentKind.MARKUP if is_forced else SegmentKind.CONTENT
        super().__init__()

    def _read(self) -> Generator[None, None, None]:
        reader, calls = self._reader, self._calls
        if (yield from self._read_reasoning()):
            yield from reader.skip_space()
        if calls is None and not self._frame:
            while (yield from reader.more()):
                reader.settle(SegmentKind.CONTENT, len(reader.text))
            return
        if calls is not None and (yield from self._read_leading_calls(calls)):
            yield from reader.skip_space()
        reader.at = 0
        marks = (*self._frame, *(calls.opens if calls is not None else ()))
        while (yield from reader.text_until(self._beside_calls, marks)):
            mark_at = reader.at
            if (yield from self._skip_frame()) or (
                calls is not None and (yield from self._read_calls(calls))
            ):
                yield from reader.skip_space()
            else:  # no call begins at this mark, but one may begin at a later mark
                reader.settle_as(self._beside_calls, mark_at + 1)

    def _read_reasoning(self) -> Reading:
        """Read reasoning; return whether there was any."""
        reader = self._reader
        if self._reasoning is None:
            return False
        if not self._is_reasoning:
            yield from reader.space()
            opens = self._reasoning.opens.strip()
            if not (yield from reader.literal(opens)):
                rest = reader.text[reader.at :]
                if reader.is_interrupted and is_half(rest, (opens,)):
                    reader.settle_as(SegmentKind.MARKUP, len(reader.text))
                reader.at = 0
                return False
            reader.settle(SegmentKind.MARKUP, reader.at, "")
        yield from reader.skip_space()
        closes = self._reasoning.closes
        if (yield from reader.text_until(SegmentKind.REASONING, (closes,))):
            reader.settle(SegmentKind.MARKUP, reader.at + len(closes), "")
        return True

    def _skip_frame(self) -> Reading:
        """Settle a mark around content as markup; return whether it is there."""
        reader = self._reader
        for mark in self._frame:
            if (yield from reader.literal(mark)):
                reader.settle(SegmentKind.MARKUP, reader.at, "")
                return True
        return False

    def _read_leading_calls(self, calls: ToolFormat) -> Reading:
        """Read calls without a mark at the start of the message."""
        reader = self._reader
        for syntax in calls.syntaxes:
            if syntax.content and (yield from reader.literal(syntax.content)):
                reader.settle(SegmentKind.MARKUP, reader.at, "")
                return True
            if syntax.is_opened and (yield from self._read_calls(calls, is_opened=True)):
                return True
        may_lead = calls.leads and (yield from reader.space())
        if may_lead and reader.text[reader.at] in calls.leads:
            return (yield from self._read_calls(calls))
        return False

    def _read_calls(self, calls: ToolFormat, *, is_opened: bool = False) -> Reading:
        """Read calls from `at` on. An unfinished call or mark of an interrupted answer is left out.

        is_opened: whether the prompt has begun the first call.
        """
        reader = self._reader
        reader.ran_out = False
        begin = reader.at
        for syntax in calls.syntaxes:
            reader.at = begin
            if is_opened and not syntax.is_opened:
                continue
            if (yield from read_calls(reader, self._tools, syntax, is_opened=is_opened)):
                found = True
                break
        else:
            reader.at, found = begin, False
        if reader.ran_out and reader.is_interrupted:
            reader.settle_as(SegmentKind.MARKUP, len(reader.text))
            return True
        return found


def _content_marks(calls: ToolFormat | None) -> Sequence[str]:
    """Return the marks behind which a message goes on with content after calls."""
    syntaxes = calls.syntaxes if calls is not None else ()
    return [syntax.begins + syntax.content for syntax in syntaxes if syntax.content]
