"""Processor of a request with a conversation: a template makes the prompt, a parser the answer."""

import asyncio
from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import accumulate

from services.tokenizer.chat.answer.call_grammars import ReasoningState
from services.tokenizer.chat.answer.call_parts import Parameters
from services.tokenizer.chat.answer.content_tokens import ContentTokens
from services.tokenizer.chat.answer.message import ChatMessage
from services.tokenizer.chat.answer.reasoning_tokens import ReasoningTokens
from services.tokenizer.chat.answer_grammar import (
    MOST_IGNORED,
    build_answer_grammar,
    forces_calls,
)
from services.tokenizer.chat.chat_templates import ChatPrompt, ChatTemplates, RenderedChat
from services.tokenizer.chat.dropped_messages import KeptMessages, shorter_conversations
from services.tokenizer.completion.choice import ChoiceOutput
from services.tokenizer.completion.plan import (
    CompletionPlan,
    Constraint,
    EncodedInput,
    choice_count,
    context_length,
    grammar_constraint,
    plan_request,
)
from services.tokenizer.completion.prompt_encoding import (
    CONTEXT_LENGTH_EXCEEDED,
    PromptPolicy,
    check_cut,
    encode_ids,
    kept_tokens,
    prompt_too_long,
)
from services.tokenizer.completion.request_processor import AddResponse, RequestProcessor
from services.tokenizer.completion.validation import check_request, require
from services.tokenizer.images.image_expander import ImageExpander
from services.tokenizer.images.image_reader import ImageReader
from services.tokenizer.images.request_images import RequestImage
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.vocabulary import Vocabulary
from services.tokenizer.tool_schemas import arguments_schemas, shown_tools
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["ConversationProcessor"]

_MESSAGES = "conversation.messages"  # path in a request


class ConversationProcessor(RequestProcessor):
    """Processor of one request with a conversation."""

    def __init__(
        self,
        request: completion_pb2.GenerateRequest,
        vocabulary: Vocabulary,
        templates: ChatTemplates,
        reader: ImageReader,
    ) -> None:
        super().__init__(request, vocabulary, reader)
        self._templates = templates
        self._messages: list[ChatMessage] = []
        """Writers of the answers by index of the choice; empty before `plan`"""

    async def plan(self, limits: ModelLimits) -> CompletionPlan:
        """Return the plan.

        Raises INVALID_ARGUMENT for a conversation that the template refuses, OUT_OF_RANGE for one
        that is too long, the errors of `ImageReader.read`, and those of `check` if the request is
        large.
        """
        if not self._is_large:
            return self._plan(limits, *await self._render(limits, None))
        given = await asyncio.to_thread(self._check, limits)
        self._held = self._reader.held.hold(given)
        images = await self._reader.read(given)
        rendered, images = await self._render(limits, images)
        return await asyncio.to_thread(self._plan, limits, rendered, images)

    def write_choice(self, output: ChoiceOutput, add: AddResponse) -> None:
        """Write output of one choice as parts of its message."""
        self._messages[output.index].write(output, add)

    @property
    def reasoning_tokens(self) -> int:
        return sum(message.reasoning_tokens for message in self._messages)

    def _check(self, limits: ModelLimits) -> Sequence[RequestImage]:
        check_request(self._request, limits)
        images = self._take_images(limits)
        self._templates.check(self._prompt())
        return images

    async def _render(
        self, limits: ModelLimits, images: ImageExpander | None
    ) -> tuple[RenderedChat, ImageExpander | None]:
        """Return the prompt, and the images that it has."""
        context = context_length(self._request.stopping, limits)
        if self._request.drop_oldest_messages:
            return await self._render_what_fits(context, images)
        if self._kept_tokens(context) is not None:
            return await self._templates.render(self._prompt(), images=images), images
        return await self._render_within(context, images), images

    async def _render_what_fits(
        self, context: int, images: ImageExpander | None
    ) -> tuple[RenderedChat, ImageExpander | None]:
        """Return the prompt without the oldest messages if it is too long, and its images."""
        whole, stopping = self._request, self._request.stopping
        least_room = stopping.max_tokens if stopping.HasField("max_tokens") else context // 8
        most = kept_tokens(-1, context, max(1, least_room))
        ways = shorter_conversations(whole.conversation.messages)
        shown = images
        low, high = 0, len(ways) - 1
        place = low
        found: tuple[completion_pb2.GenerateRequest, RenderedChat, ImageExpander | None] | None = (
            None
        )
        while low <= high:  # try the whole conversation, then search by bisection
            self._request, shown = _shortened(whole, images, ways[place])
            try:
                rendered = await self._render_within(context, shown)
            except ServiceError as error:
                if error.reason != CONTEXT_LENGTH_EXCEEDED:
                    raise
                fits = False
            else:
                fits = len(rendered.ids) <= most
            if fits:
                found = self._request, _in_whole(rendered, whole, ways[place]), shown
                high = place - 1
            else:
                low = place + 1
            place = (low + high) // 2
        if found is None:  # the shortest conversation leaves less room, or is refused
            self._request, shown = _shortened(whole, images, ways[-1])
            rendered = await self._render_within(context, shown)
            return _in_whole(rendered, whole, ways[-1]), shown
        self._request, rendered, shown = found
        return rendered, shown

    async def _render_within(self, context: int, images: ImageExpander | None) -> RenderedChat:
        """Return the prompt. Raises OUT_OF_RANGE if its text alone exceeds the context."""

        def check_length(text: str) -> None:
            least = self._vocabulary.least_tokens(text, context - 1)
            if least >= context:  # a chat always needs room for output
                raise prompt_too_long(_MESSAGES, f"at least {least:,}", context, max_tokens=1)

        return await self._templates.render(self._prompt(), check_length, images)

    def _plan(
        self, limits: ModelLimits, rendered: RenderedChat, images: ImageExpander | None
    ) -> CompletionPlan:
        request, templates = self._request, self._templates
        continues = request.conversation.continue_last_message
        behind = _text_before(request.conversation) if continues else None
        state = templates.reasoning_state(rendered.text, behind=behind)
        encoded = self._encode(limits, rendered, images)
        encoded = replace(encoded, constraint=self._constraint(limits, state))
        plan = plan_request(request, encoded, self._vocabulary, limits)
        table = templates.table if plan.choice.skip_special_tokens else plan.full_table
        self._messages = self._answers(plan, state, table.hidden, table.pieces)
        moved = [f"{_MESSAGES}[{index}].role" for index in rendered.moved]
        return replace(
            plan,
            ignored=[*moved, *plan.ignored][:MOST_IGNORED],
            table=table,
            begins_text=not continues,
            # scores of content that is held back are sent later than its ids
            generates_again=plan.generates_again or plan.choice.scored,
            writes_one_large=True,
        )

    def _encode(
        self, limits: ModelLimits, rendered: RenderedChat, images: ImageExpander | None
    ) -> EncodedInput:
        """Return the prompt's ids, as far as the request keeps them, with their images."""
        if not rendered.ids:
            raise invalid(_MESSAGES, "The chat template renders these messages to nothing.")
        request, stopping = self._request, self._request.stopping
        context = context_length(stopping, limits)
        keep = self._kept_tokens(context)
        ids = rendered.ids if keep is None else rendered.ids[-keep:]
        check_cut(len(rendered.ids) - len(ids), rendered.ids, rendered.images)
        room = max(1, context - len(ids))
        policy = PromptPolicy(
            context_length=context,
            max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else room,
            truncate=False,
            refuse_overflow=request.context_overflow == completion_pb2.CONTEXT_OVERFLOW_ERROR,
            echo=False,
            infill=None,
            suffix=None,
        )
        encoded = EncodedInput(
            [encode_ids(self._vocabulary, ids, _MESSAGES, policy)],
            policy.max_tokens,
            stop_ids=self._templates.turn_end_ids.difference(limits.eos_ids),
        )
        if images is None or rendered.images is None:
            return encoded
        placed = [rendered.images]
        return replace(
            encoded,
            images=images.messages(placed),
            image_places=images.places(placed, [ids]),
        )

    def _constraint(self, limits: ModelLimits, state: ReasoningState) -> Constraint | None:
        """Return the constraint of the answers; the request's own grammar may be enough."""
        grammar = build_answer_grammar(self._request, self._templates.answers, state)
        if grammar is None:
            return grammar_constraint(self._request)
        require(limits, engine_pb2.CAPABILITY_GRAMMAR, grammar.field)
        return Constraint(grammar.spec, grammar.ignored, grammar.remap_error)

    def _answers(
        self,
        plan: CompletionPlan,
        state: ReasoningState,
        hidden: Container[int],
        pieces: Sequence[bytes],
    ) -> list[ChatMessage]:
        """Return the writer of each choice. A resumed choice has no echo, which the client has.

        hidden: ids without text. pieces: bytes of the tokens, as far as the text has them.
        """
        request = self._request
        echo = _last_answer(request.conversation) if request.echo else ""
        tools = arguments_schemas(shown_tools(request.tools, request.tool_choice))
        resumed = {choice.index for choice in request.resume.choices}
        scored = hidden if plan.choice.scored else None
        return [
            self._message(state, tools, scored, pieces, "" if index in resumed else echo)
            for index in range(choice_count(request))
        ]

    def _message(
        self,
        state: ReasoningState,
        tools: Parameters,
        hidden: Container[int] | None,
        pieces: Sequence[bytes],
        echo: str,
    ) -> ChatMessage:
        """Return the writer of an answer; `hidden` are ids without text, None if unscored.

        pieces: bytes of the tokens, as far as the text has them.
        """
        request, templates = self._request, self._templates
        return ChatMessage(
            templates.parser(state, tools, is_forced=forces_calls(request.tool_choice)),
            None if hidden is None else ContentTokens(self._vocabulary.full_table.pieces, hidden),
            ReasoningTokens(pieces),
            turn_ends=templates.turn_end_ids.difference(request.stopping.stop_token_ids),
            single_call=request.HasField("parallel_tool_calls") and not request.parallel_tool_calls,
            is_forced=request.tool_choice.WhichOneof("choice") == "name",
            echo=echo,
        )

    def _kept_tokens(self, context: int) -> int | None:
        """Return the number of prompt tokens that truncate_prompt_tokens keeps; None = all."""
        request = self._request
        if not request.HasField("truncate_prompt_tokens"):
            return None
        max_tokens = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else 1
        return kept_tokens(request.truncate_prompt_tokens, context, max_tokens)

    def _prompt(self) -> ChatPrompt:
        request = self._request
        return ChatPrompt.of(request.conversation, shown_tools(request.tools, request.tool_choice))


def _shortened(
    request: completion_pb2.GenerateRequest, images: ImageExpander | None, kept: KeptMessages
) -> tuple[completion_pb2.GenerateRequest, ImageExpander | None]:
    """Return a request with the kept messages alone, and their images."""
    messages = request.conversation.messages
    indices = [*kept.indices(len(messages))]
    short = completion_pb2.GenerateRequest()
    short.CopyFrom(request)
    del short.conversation.messages[:]
    short.conversation.messages.extend(messages[index] for index in indices)
    if images is None:
        return short, None
    counts = [sum(part.HasField("image") for part in each.parts) for each in messages]
    begins = [*accumulate(counts, initial=0)]
    places = [place for i in indices for place in range(begins[i], begins[i + 1])]
    return short, images.of(places) if places else None


def _in_whole(
    rendered: RenderedChat, request: completion_pb2.GenerateRequest, kept: KeptMessages
) -> RenderedChat:
    """Return the prompt of the kept messages with the indices that they have in the request."""
    indices = [*kept.indices(len(request.conversation.messages))]
    return replace(rendered, moved=[indices[index] for index in rendered.moved])


def _last_answer(conversation: completion_pb2.Conversation) -> str:
    """Return the content of the last message if it is the assistant's, else ""."""
    last = conversation.messages[-1]
    is_answer = last.role == completion_pb2.ROLE_ASSISTANT
    return "\n".join(_texts(last)) if is_answer else ""


def _text_before(conversation: completion_pb2.Conversation) -> str:
    """Return the last text part of the second-last message, trimmed as templates do, or ""."""
    texts = [text for message in conversation.messages[-2:-1] for text in _texts(message)]
    return texts[-1].strip() if texts else ""


def _texts(message: completion_pb2.Message) -> list[str]:
    """Return the text parts of a message."""
    return [part.text for part in message.parts if part.HasField("text")]
