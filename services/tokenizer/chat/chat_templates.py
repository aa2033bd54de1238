"""Chat templates of a checkpoint: prompts from messages and tools, and the form of answers."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import grpc

from services.common.background import keep_running
from services.common.json_values import Json
from services.tokenizer.chat.answer.call_grammars import ReasoningState
from services.tokenizer.chat.answer.call_parts import Parameters
from services.tokenizer.chat.answer.derivation import Renderings, derive_reasoning
from services.tokenizer.chat.answer.format_choice import choose_calls
from services.tokenizer.chat.answer.harmony_parser import HarmonyParser
from services.tokenizer.chat.answer.message_parser import MessageParser, PlainText, SegmentKind
from services.tokenizer.chat.answer.reasoning_formats import ReasoningFormat, reasoning_formats_of
from services.tokenizer.chat.answer.response_parser import ResponseParser
from services.tokenizer.chat.answer.tool_formats import ToolFormat, tool_format_of
from services.tokenizer.chat.answer_grammar import AnswerFormat
from services.tokenizer.chat.template.answer_probe import probe_answers, with_thinking
from services.tokenizer.chat.template.arguments import read_arguments
from services.tokenizer.chat.template.control_tokens import ControlTokens
from services.tokenizer.chat.template.fitted_conversation import fit_conversation
from services.tokenizer.chat.template.render_protocol import RenderJob
from services.tokenizer.chat.template.renderer import Renderer
from services.tokenizer.chat.template.template_messages import (
    TemplateFacts,
    check_messages,
    template_messages,
)
from services.tokenizer.chat.template.template_probe import find_turn_end, probe_template
from services.tokenizer.chat.template.template_syntax import require_syntax
from services.tokenizer.images.image_expander import ImageExpander, ImagePrompt
from services.tokenizer.images.image_family import ImageFamily
from services.tokenizer.text.checkpoint_files import DEFAULT_TEMPLATE
from services.tokenizer.text.vocabulary import Vocabulary
from services.tokenizer.tool_schemas import template_tools
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["ChatPrompt", "ChatTemplates", "RenderedChat"]

_LOG = logging.getLogger("chat")
_PROBE_SECONDS = 60.0
"""Seconds for which a chat waits for the probe of the templates"""
_INLINE_SIZE = 4_096  # bytes or characters; larger inputs are processed in a thread
_MAX_SIZE = 8 * 1024 * 1024  # bytes of a conversation, like the limit of rendered text
_ARGUMENTS = "conversation.template_arguments_json"
_THINKING_SWITCHES = ("enable_thinking", "thinking")  # Qwen, GLM; DeepSeek, Granite
_TOOL_TEMPLATE = "tool_use"
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_WITHIN = {
    ReasoningState.NONE: SegmentKind.CONTENT,
    ReasoningState.OPEN: SegmentKind.REASONING,
    ReasoningState.POSSIBLE: None,
}
_RESERVED_VARIABLES = frozenset({  # which requests can't set as template arguments
    "add_generation_prompt", "chat_template", "continue_final_message", "conversations", "messages",
    "return_assistant_tokens_mask", "tools",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Parts of a request that make the prompt."""

    messages: Sequence[completion_pb2.Message]
    tools: Sequence[completion_pb2.Tool]
    template: str
    arguments_json: str
    add_generation_prompt: bool | None
    """True if the prompt ends with an answer's header; None = unless a message is continued"""
    continue_last_message: bool
    reasoning_effort: str = ""
    """Effort of reasoning; empty = the template's default"""

    @classmethod
    def of(
        cls, conversation: completion_pb2.Conversation, tools: Sequence[completion_pb2.Tool]
    ) -> "ChatPrompt":
        """Return the prompt of a request's conversation, which shows these tools."""
        has_choice = conversation.HasField("add_generation_prompt")
        return cls(
            messages=conversation.messages,
            tools=tools,
            template=conversation.template,
            arguments_json=conversation.template_arguments_json,
            add_generation_prompt=conversation.add_generation_prompt if has_choice else None,
            continue_last_message=conversation.continue_last_message,
            reasoning_effort=conversation.reasoning_effort,
        )

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        messages = sum(message.ByteSize() for message in self.messages)
        tools = sum(tool.ByteSize() for tool in self.tools)
        return messages + tools + len(self.arguments_json)

    def variables(self) -> dict[str, Json]:
        """Return the template's variables. Raises INVALID_ARGUMENT for bad JSON or two efforts."""
        variables = read_arguments(self.arguments_json, _ARGUMENTS)
        effort = self.reasoning_effort
        if effort:
            if variables.setdefault("reasoning_effort", effort) != effort:
                raise invalid(
                    "conversation.reasoning_effort",
                    f"reasoning_effort is {effort}, but the template arguments have another: "
                    "leave out one of them.",
                )
            for switch in _THINKING_SWITCHES:
                variables.setdefault(switch, effort != "none")
        return variables


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered and encoded prompt."""

    text: str
    """Rendered text, with a mark for each image"""
    ids: Sequence[int]
    images: ImagePrompt | None
    """The prompt with its images; None if it has none"""
    moved: Sequence[int] = ()
    """Indices of messages that the template got as part of another one, or in another role"""


class ChatTemplates:
    """Chat templates of the checkpoint, and the form in which its model answers."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        model: str,
        images: ImageFamily | None = None,
        *,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
    ) -> None:
        """tool_format, reasoning_format: names of known formats, or "auto"."""
        self._vocabulary = vocabulary
        self._model = model
        self._image_mark = images.mark if images is not None else ""
        self._image_text = images.generic if images is not None else ""
        self._control_tokens = ControlTokens(vocabulary.control_tokens)
        require_syntax(vocabulary.chat_templates)
        self._renderer = Renderer(vocabulary.chat_templates, vocabulary.special_names)
        self._facts: dict[str, TemplateFacts] = {}
        templates = vocabulary.chat_templates.values()
        self._probing: asyncio.Future[None] | None = None
        self.turn_end_ids: frozenset[int] = frozenset()
        """Ids that end a message of the assistant"""
        self._marks: frozenset[str] = frozenset()
        """Control tokens of calls and reasoning"""
        self.table = vocabulary.table
        """Texts of generated tokens, among them the marks of calls and reasoning"""
        self._derives_calls = tool_format == "auto"
        self._reasoning = reasoning_formats_of(reasoning_format, templates)
        """Formats of reasoning that the templates may have"""
        self._derives_reasoning = reasoning_format == "auto"
        self._take_formats(
            tool_format_of(tool_format, templates, vocabulary.control_tokens),
            next(iter(self._reasoning), None),
        )

    @property
    def is_available(self) -> bool:
        """True if the checkpoint has any template."""
        return bool(self._vocabulary.chat_templates)

    @property
    def shows_tools(self) -> bool:
        """True if a template shows the tools of a request."""
        return any("tools" in source for source in self._vocabulary.chat_templates.values())

    @property
    def has_reasoning(self) -> bool:
        """True if answers may have reasoning, apart from their text."""
        return self.answers.reasoning is not None

    @property
    def takes_images(self) -> bool:
        """True if messages may have images."""
        return bool(self._image_mark)

    def _take_formats(self, calls: ToolFormat, reasoning: ReasoningFormat | None) -> None:
        """Read answers in these forms from now on, and update the ids that depend on them."""
        vocabulary = self._vocabulary
        texts = "\n".join([*calls.texts, *(reasoning.texts if reasoning else ())])
        marks = frozenset(token for token in vocabulary.control_tokens if token in texts)
        token_ids = {mark: vocabulary.ids[mark] for mark in marks if _is_control(mark, vocabulary)}
        self.answers = AnswerFormat(calls, reasoning, token_ids)
        if marks != self._marks:
            self._marks, self.table = marks, vocabulary.table_with(marks)
        ends = (mark for mark in calls.ends if mark in vocabulary.control_tokens)
        self.turn_end_ids |= {vocabulary.ids[mark] for mark in ends}

    def start(self) -> None:
        """Start to probe the templates; `render` waits for the result."""
        self._probing = keep_running("chat_templates", self._probe)

    async def until_probed(self) -> None:
        """Wait until the templates are probed. Raises UNAVAILABLE."""
        assert self._probing is not None, "start was not called"
        await self._until_probed(self._probing)

    async def stop(self) -> None:
        """End the render process."""
        if self._probing is not None:
            self._probing.cancel()
        await self._renderer.stop()

    def check(self, prompt: ChatPrompt) -> None:
        """Validate a prompt. This takes long for a large prompt.

        Raises FAILED_PRECONDITION if the model has no template, INVALID_ARGUMENT for wrong fields.
        """
        name = self._template_of(prompt)
        if not self.is_available:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "NO_CHAT_TEMPLATE",
                f"{self._model} has no chat template: use completions, or add a "
                "chat_template.jinja to its directory.",
            )
        if name not in self._vocabulary.chat_templates:
            known = ", ".join(sorted(self._vocabulary.chat_templates))
            raise invalid(
                "conversation.template", f"template must be one of {known}, got {name!r}."
            )
        if prompt.size > _MAX_SIZE:
            raise invalid(
                "conversation.messages",
                f"A conversation with its tools must have at most {_MAX_SIZE:,} bytes.",
            )
        check_messages(prompt.messages, continues_last=prompt.continue_last_message)
        if prompt.add_generation_prompt and prompt.continue_last_message:
            raise invalid(
                "conversation.add_generation_prompt",
                "add_generation_prompt can't be combined with continue_last_message.",
            )
        for key in prompt.variables():
            if key in _RESERVED_VARIABLES or not key.isidentifier():
                raise invalid(_ARGUMENTS, f"Template arguments can't set {key!r}.")

    async def render(
        self,
        prompt: ChatPrompt,
        check_text: Callable[[str], None] | None = None,
        images: ImageExpander | None = None,
    ) -> RenderedChat:
        """Return the text and ids of a valid prompt.

        check_text: called with the text before it is encoded. images: images of the messages; None
        if there are none. Raises the errors of `check_text`, `Renderer.render` and
        `ImageExpander.place_in_chat`.
        """
        await self.until_probed()
        is_large = prompt.size > _INLINE_SIZE
        prepare = asyncio.to_thread(self._prepared, prompt) if is_large else None
        prepared = await prepare if prepare is not None else self._prepared(prompt)
        rendering = await self._renderer.render(prepared.job)

        def encode() -> RenderedChat:
            parts = self._control_tokens.split(rendering.text, rendering.template_spans)
            parts = prepared.place(parts)
            text = "".join(part for part, _ in parts)
            if check_text is not None:
                check_text(text)
            if images is None:
                return RenderedChat(
                    text, self._vocabulary.encode_parts(parts), None, prepared.moved
                )
            parts, placed = images.place_in_chat(parts)
            ids, _ = placed.lengthen(self._vocabulary.encode_parts(parts))
            return RenderedChat(text, ids, placed, prepared.moved)

        is_long = images is not None or len(rendering.text) > _INLINE_SIZE
        return await asyncio.to_thread(encode) if is_long else encode()

    def reasoning_state(self, prompt: str, *, behind: str | None = None) -> ReasoningState:
        """Return the state at the end of a prompt. behind: text before a continued message."""
        form = self.answers.reasoning
        if form is None:
            return ReasoningState.NONE
        text = prompt.rstrip()
        opens = form.opens.strip()
        if text.endswith(opens):
            return ReasoningState.OPEN
        if behind is not None:  # the message itself may contain marks
            begin = text.rfind(behind) + len(behind) if behind and behind in text else 0
            is_open = text.rfind(opens, begin) > text.rfind(form.closes, begin)
            return ReasoningState.OPEN if is_open else ReasoningState.NONE
        return ReasoningState.NONE if text.endswith(form.closes) else ReasoningState.POSSIBLE

    def parser(
        self, state: ReasoningState, tools: Parameters, *, is_forced: bool = False
    ) -> MessageParser:
        """Return the parser of an answer. is_forced: whether a grammar forces calls of `tools`."""
        form = self.answers.reasoning
        if self.answers.has_channels:
            within = None if form is None else _WITHIN[state]
            return HarmonyParser(tools, within, is_forced=is_forced)
        reasoning = None if state is ReasoningState.NONE else form
        frame = form.separators if form is not None else ()
        if reasoning is None and not tools and not frame:
            return PlainText()
        return ResponseParser(
            reasoning,
            self.answers.calls if tools else None,
            tools,
            is_reasoning=state is ReasoningState.OPEN,
            is_forced=is_forced,
            frame=frame,
        )

    async def _until_probed(self, probing: "asyncio.Future[None]") -> None:
        """Wait for the probe, which starts again when it fails. Raises UNAVAILABLE."""
        if probing.done():
            return
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await asyncio.shield(probing)
        except TimeoutError:
            message = "The server can't read the model's chat template now; see its log."
            code = grpc.StatusCode.UNAVAILABLE
            raise ServiceError(code, "NO_RENDERER", message, retry_seconds=5) from None

    async def _probe(self) -> None:
        names = self._vocabulary.chat_templates
        with_tools = _TOOL_TEMPLATE if _TOOL_TEMPLATE in names else DEFAULT_TEMPLATE
        seen: list[Renderings] = []
        ends: list[str] = []
        for name in sorted(names, key=lambda name: name != with_tools):
            try:
                facts = await probe_template(self._renderer, name, names[name], self._image_mark)
            except ServiceError as error:
                if error.code is grpc.StatusCode.UNAVAILABLE:
                    raise  # the cause is not the template
                _LOG.warning("the chat template %s refuses messages: %s", name, error.message)
                facts = TemplateFacts()
            facts = await with_thinking(self._renderer, name, facts)
            self._facts[name] = facts
            seen.append(await probe_answers(self._renderer, name, facts))
            ends.append(await find_turn_end(self._renderer, name, facts))
        self._derive_formats(seen, self._facts.get(with_tools, TemplateFacts()))
        self.turn_end_ids = self.turn_end_ids.union(*map(self._turn_ends, ends))

    def _derive_formats(self, seen: Sequence[Renderings], facts: TemplateFacts) -> None:
        """Derive the forms of answers from the templates' renderings, as far as these show them.

        facts: facts of the template that renders tools, to which the first item of `seen` belongs.
        """
        reasoning = self.answers.reasoning
        if self._derives_reasoning:
            shown = next((each for each in seen if each.thought), Renderings())
            reasoning = derive_reasoning(shown, self._reasoning)
        calls = self.answers.calls
        if self._derives_calls and not (facts.shows_tools or facts.shows_calls):
            calls = tool_format_of("hermes", (), ())  # the description of the tools asks for it
        elif self._derives_calls:
            found = (choose_calls(calls, each, reasoning) for each in seen)
            calls = next(filter(None, found), calls)
        self._take_formats(calls, reasoning)

    def _turn_ends(self, end: str) -> frozenset[int]:
        """Return the ids that end a turn, from the text `end` behind a rendered turn.

        Tokens of calls and reasoning do not count, because they end only a part of a turn.
        """
        reasoning = self.answers.reasoning
        known = [*self.answers.calls.texts, *(reasoning.texts if reasoning is not None else ())]
        within = "\n".join(known)
        special = {text: token for token, text in self._vocabulary.special_tokens.items() if text}
        found = sorted((end.find(text), -len(text), text) for text in special if text in end)
        for place, _, text in found:
            if text not in within:
                is_behind_part = any(text in within for text in special if end.startswith(text))
                return frozenset({special[text]} if place == 0 or is_behind_part else ())
        return frozenset()

    def _template_of(self, prompt: ChatPrompt) -> str:
        """Return the name of the template: "tool_use" renders tools, as in transformers."""
        if prompt.template:
            return prompt.template
        has_own = prompt.tools and _TOOL_TEMPLATE in self._vocabulary.chat_templates
        return _TOOL_TEMPLATE if has_own else DEFAULT_TEMPLATE

    def _prepared(self, prompt: ChatPrompt) -> "_PreparedChat":
        name = self._template_of(prompt)
        facts, variables = self._facts[name], prompt.variables()
        own_texts: list[str] = []
        if not facts.takes_image_parts and _has_images(prompt.messages):
            own_texts.append(self._image_text)
        if facts.call_example and prompt.tools:
            own_texts.append(facts.call_example)
        # marks stand for texts with control tokens, which in a request would be encoded as text
        marks: dict[str, str] = {}
        if own_texts:
            written = template_messages(prompt.messages, facts)
            free = _unused_characters([written, template_tools(prompt.tools), variables])
            marks = {text: next(free) for text in own_texts}
        fitted = fit_conversation(
            prompt.messages, prompt.tools, facts, marks.get(facts.call_example, "")
        )
        job = RenderJob(
            template=name,
            messages=template_messages(fitted.messages, facts, marks.get(self._image_text, "")),
            tools=template_tools(fitted.tools) or None,
            variables=variables,
            add_generation_prompt=not prompt.continue_last_message
            and prompt.add_generation_prompt is not False,
            continue_last_message=prompt.continue_last_message,
        )
        return _PreparedChat(job, marks, fitted.moved)


@dataclass(frozen=True, slots=True)
class _PreparedChat:
    job: RenderJob
    marks: Mapping[str, str]
    """Text for which each placeholder character in the conversation stands"""
    moved: Sequence[int]

    def place(self, parts: Iterable[tuple[str, bool]]) -> list[tuple[str, bool]]:
        """Return parts of the prompt with the texts in place of their marks."""
        placed = []
        for part, is_spelled in parts:
            for text, mark in self.marks.items():
                part = part.replace(mark, text)
            placed.append((part, is_spelled))
        return placed


def _unused_characters(value: Json) -> Iterator[str]:
    """Yield characters for private use that no text of the value contains."""
    present = frozenset().union(*_texts(value))
    return (chr(code) for code in _PRIVATE_USE if chr(code) not in present)


def _texts(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        yield from _texts([*value.values()])
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _has_images(messages: Sequence[completion_pb2.Message]) -> bool:
    return any(part.HasField("image") for message in messages for part in message.parts)


def _is_control(mark: str, vocabulary: Vocabulary) -> bool:
    """Return whether llguidance treats the mark as a token, which is or looks special."""
    looks_special = mark.startswith("<") and mark.endswith(">")
    return mark in vocabulary.control_tokens and (
        looks_special or mark in vocabulary.special_tokens.values()
    )
