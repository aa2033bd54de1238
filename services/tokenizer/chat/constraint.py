"""What constrains the answer of a chat: its calls, its content, or nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.annotations import unenforced_in
from services.tokenizer.chat.answer.call_grammars import MessageGrammar, ReasoningState
from services.tokenizer.chat.answer.tool_formats import ReasoningFormat, ToolFormat
from services.tokenizer.tools import PlacedTool, unenforced_in_tools
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["AnswerFormat", "Constraint", "constrain", "forces_calls"]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the model writes its answers."""

    calls: ToolFormat
    reasoning: ReasoningFormat | None
    token_ids: Mapping[str, int]
    """The marks of both that are tokens which no text can spell, for the grammar service."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and what of the request it was made of."""

    grammar: types_pb2.GrammarSpec
    places: Mapping[str, str]
    """Fields of the request, by places in the grammar."""
    field: str
    """The field to blame where no place is known."""
    ignored: Sequence[str]
    """Paths of what the request's schemas say without effect"""

    def blame(self, error: ServiceError) -> None:
        """Make what the grammar service refused speak of the request."""
        error.field = self.field
        for place, field in self.places.items():
            if place + "." in error.message or place + " " in error.message:
                error.message = error.message.replace(place, "$")
                error.field = field


def forces_calls(choice: completion_pb2.ToolChoice) -> bool:
    """Whether an answer is nothing but calls, behind its reasoning."""
    return choice.WhichOneof("choice") == "name" or (
        choice.mode == completion_pb2.TOOL_MODE_REQUIRED
    )


def constrain(
    request: completion_pb2.ChatRequest, form: AnswerFormat, state: ReasoningState
) -> Constraint | None:
    """None where the grammar of the request, if any, is all there is. The request was checked.

    Calls are constrained where the choice forces one, and where a tool is strict.
    """
    choice = request.tool_choice
    tools: list[PlacedTool] = list(enumerate(request.tools))
    if choice.WhichOneof("choice") == "name":
        tools = [(index, tool) for index, tool in tools if tool.name == choice.name]
    elif choice.mode == completion_pb2.TOOL_MODE_NONE:
        tools = []
    is_forced = forces_calls(choice)
    has_content = request.HasField("grammar") and not is_forced
    is_strict = any(tool.strict for _, tool in tools)
    reasoning = form.reasoning if state is not ReasoningState.NONE else None
    if not (is_forced or is_strict or (has_content and (tools or reasoning))):
        return None
    single = choice.WhichOneof("choice") == "name" or (
        request.HasField("parallel_tool_calls") and not request.parallel_tool_calls
    )
    grammar = MessageGrammar(form.calls, form.token_ids)
    if is_forced:
        message = grammar.forced_calls(tools, single=single)
    elif not has_content:
        message = grammar.optional_calls(tools, single=single)
    elif not tools:
        message = grammar.content(request.grammar)
    elif not form.calls.opens:
        raise invalid(
            "grammar",
            "This model's calls have no mark of their own, which would tell them from constrained "
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
    ]
    return Constraint(grammar.finish(message), grammar.places, field, ignored)
