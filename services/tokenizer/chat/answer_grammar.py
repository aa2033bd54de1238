"""Grammar of a chat's answer: reasoning, tool calls, constrained content."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.annotations import unenforced_in
from services.tokenizer.chat.answer.call_grammars import MessageGrammar, ReasoningState
from services.tokenizer.chat.answer.reasoning_formats import ReasoningFormat
from services.tokenizer.chat.answer.tool_formats import ToolFormat
from services.tokenizer.tool_schemas import (
    IndexedTool,
    unenforced_in_tools,
    without_unique_items,
)
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["MOST_IGNORED", "AnswerFormat", "AnswerGrammar", "build_answer_grammar", "forces_calls"]

MOST_IGNORED = 100  # paths


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Form in which a model writes tool calls and reasoning."""

    calls: ToolFormat
    reasoning: ReasoningFormat | None
    token_ids: Mapping[str, int]
    """Ids of the marks of calls and reasoning that are control tokens, which no text can spell"""

    @property
    def has_channels(self) -> bool:
        """True if messages are in gpt-oss's form, by the format of calls or that of reasoning."""
        return "harmony" in (self.calls.name, self.reasoning.name if self.reasoning else "")


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """A grammar, and the fields of the request from which it was built."""

    spec: types_pb2.GrammarSpec
    places: Mapping[str, str]
    """Fields of the request, by places in the grammar"""
    field: str
    """Field for errors whose place in the grammar is unknown"""
    ignored: Sequence[str]
    """Paths of schema keywords that are not enforced"""

    def remap_error(self, error: ServiceError) -> None:
        """Set the field of a grammar service's error to the field of the request."""
        if error.field == "grammar.json_whitespace":
            return
        error.field = self.field
        for place, field in self.places.items():
            if place + "." in error.message or place + " " in error.message:
                error.message = error.message.replace(place, "$")
                error.field = field


def forces_calls(choice: completion_pb2.ToolChoice) -> bool:
    """Return whether an answer must consist of calls, after its reasoning."""
    return choice.WhichOneof("choice") == "name" or (
        choice.mode == completion_pb2.TOOL_MODE_REQUIRED
    )


def build_answer_grammar(
    request: completion_pb2.GenerateRequest, form: AnswerFormat, state: ReasoningState
) -> AnswerGrammar | None:
    """Return the grammar of the answer; None if the request's own grammar, if any, is enough.

    The request is valid. Calls are constrained if the choice forces one, or a tool is strict.
    Raises INVALID_ARGUMENT for tools and grammars that the model's form can't express.
    """
    choice = request.tool_choice
    tools: list[IndexedTool] = list(enumerate(request.tools))
    if choice.WhichOneof("choice") == "name":
        tools = [(index, tool) for index, tool in tools if tool.name == choice.name]
    elif choice.mode == completion_pb2.TOOL_MODE_NONE:
        tools = []
    left_out: list[str] = []
    for place, tool in enumerate(() if form.calls.writes_json else tools):
        tools[place], paths = without_unique_items(tool)
        left_out += paths
    is_forced = forces_calls(choice)
    has_content = request.HasField("grammar") and not is_forced
    is_strict = any(tool.strict for _, tool in tools)
    reasoning = form.reasoning if state is not ReasoningState.NONE else None
    frame = ("", "")
    if form.reasoning is not None and not request.conversation.continue_last_message:
        frame = form.reasoning.frame  # a message that goes on is behind the first mark
    if not (is_forced or is_strict or (has_content and (tools or reasoning or any(frame)))):
        return None
    single = choice.WhichOneof("choice") == "name" or (
        request.HasField("parallel_tool_calls") and not request.parallel_tool_calls
    )
    grammar = MessageGrammar(form.calls, form.token_ids, frame)
    if is_forced:
        message = grammar.forced_calls(tools, single=single)
    elif not has_content:
        message = grammar.optional_calls(tools, single=single)
    elif not tools:
        message = grammar.content(request.grammar)
    elif not form.calls.opens:
        raise invalid(
            "grammar",
            "This model writes tool calls without a mark, so they can't be told from constrained "
            "content: leave out the grammar or the tools.",
        )
    else:
        content = grammar.content(request.grammar)
        message = f"({content} | {grammar.forced_calls(tools, single=single)})"
    if reasoning is not None:
        message = grammar.reasoned(reasoning, state, message)
    field = "grammar" if has_content and not (is_strict and tools) else "tools"
    ignored = [
        *(unenforced_in(request.grammar, "grammar") if has_content else ()),
        *unenforced_in_tools(tools),
        *left_out[:MOST_IGNORED],
        *grammar.ignored[:MOST_IGNORED],
    ]
    spec = grammar.finish(message)
    if has_content and request.grammar.HasField("json_whitespace"):
        spec.json_whitespace = request.grammar.json_whitespace
    return AnswerGrammar(spec, grammar.places, field, ignored)
