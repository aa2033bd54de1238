"""Processor of a Chat request: a completion of the prompt that its conversation makes."""

import asyncio
from collections.abc import Callable, Container, Sequence
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
from services.tokenizer.completion.complete_processor import is_large
from services.tokenizer.completion.plan import CompletionPlan, context_length, plan_completion
from services.tokenizer.completion.prompt_encoding import (
    CONTEXT_LENGTH_EXCEEDED,
    check_cut,
    kept_tokens,
    prompt_too_long,
)
from services.tokenizer.completion.validation import (
    check_complete,
    check_generates,
    check_model,
    require,
)
from services.tokenizer.images.held_images import NO_IMAGES
from services.tokenizer.images.image_expander import ImageExpander
from services.tokenizer.images.image_reader import ImageReader
from services.tokenizer.images.request_images import RequestImage, take_message_images
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.vocabulary import Vocabulary
from services.tokenizer.tool_schemas import arguments_schemas, check_tools, shown_tools
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["ChatProcessor"]

_PLACEHOLDER_PROMPT = completion_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=[0]))


class ChatProcessor:
    """Processor of one Chat request."""

    def __init__(
        self,
        request: completion_pb2.ChatRequest,
        vocabulary: Vocabulary,
        templates: ChatTemplates,
        reader: ImageReader,
    ) -> None:
        self._request = request
        """The request, without the bytes of its images after `_check`"""
        self._vocabulary = vocabulary
        self._templates = templates
        self._reader = reader
        self._held = NO_IMAGES
        """Bytes of the request's images that `reader.held` counts"""
        self._messages: list[ChatMessage] = []
        """Answers by index of the choice; empty until `plan`."""

    @property
    def model(self) -> str:
        return self._request.model

    def check(self, limits: ModelLimits) -> None:
        if not is_large(self._request):
            self._check(limits)

    async def plan(self, limits: ModelLimits) -> CompletionPlan:
        """Return the plan.

        Raises INVALID_ARGUMENT for a conversation that the template refuses, OUT_OF_RANGE for one
        that is too long, the errors of `ImageReader.read`, and those of `check` if the request is
        large.
        """
        if not is_large(self._request):
            return self._plan(limits, *await self._render(limits, None))
        given = await asyncio.to_thread(self._check, limits)
        self._held = self._reader.held.hold(given)
        images = await self._reader.read(given)
        rendered, images = await self._render(limits, images)
        return await asyncio.to_thread(self._plan, limits, rendered, images)

    def close(self) -> None:
        self._reader.held.release(self._held)
        self._held = NO_IMAGES

    def _check(self, limits: ModelLimits) -> Sequence[RequestImage]:
        """Validate the request; take and return its images."""
        check_model(self._request.model, limits.model)
        check_generates(limits)
        images = self._take_images(limits)
        request = self._request
        self._templates.check(self._prompt())
        check_tools(request.tools, request.tool_choice)
        if request.stopping.HasField("max_tokens") and not request.stopping.max_tokens:
            raise invalid("stopping.max_tokens", "An answer needs a limit of at least 1 token.")
        limits = replace(limits, max_logprobs=limits.max_chat_logprobs)
        check_complete(self._completion(limits.context_length), limits, None)
        if request.drop_oldest_messages and request.HasField("truncate_prompt_tokens"):
            raise invalid(
                "drop_oldest_messages",
                "truncate_prompt_tokens cuts the prompt, too: leave out one of the two.",
            )
        return images

    def _take_images(self, limits: ModelLimits) -> Sequence[RequestImage]:
        images = take_message_images(self._request.messages)
        if images:
            self._reader.require(images[0].field, limits)
            small = completion_pb2.ChatRequest()  # clearing fields would not free their memory
            small.CopyFrom(self._request)
            self._request = small
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
        ways = shorter_conversations(whole.messages)
        shown = images
        low, high = 0, len(ways) - 1
        place = low
        found: tuple[completion_pb2.ChatRequest, RenderedChat, ImageExpander | None] | None = None
        while low <= high:  # the whole first, then by halves
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
                raise prompt_too_long("messages", f"at least {least:,}", context, max_tokens=1)

        return await self._templates.render(self._prompt(), check_length, images)

    def _plan(
        self, limits: ModelLimits, rendered: RenderedChat, images: ImageExpander | None
    ) -> CompletionPlan:
        request, templates = self._request, self._templates
        if not rendered.ids:
            raise invalid("messages", "The chat template renders these messages to nothing.")
        stopping = request.stopping
        context = context_length(stopping, limits)
        keep = self._kept_tokens(context)
        ids = rendered.ids if keep is None else rendered.ids[-keep:]
        check_cut(len(rendered.ids) - len(ids), rendered.ids, rendered.images)
        completion = self._completion(max(1, context - len(ids)))
        completion.prompts[0].token_ids.ids[:] = ids
        if not stopping.ignore_eos:
            turn_ends = templates.turn_end_ids.difference(limits.eos_ids)
            completion.stopping.stop_token_ids.extend(turn_ends)
        behind = _text_before(request) if request.continue_last_message else None
        state = templates.reasoning_state(rendered.text, behind=behind)
        grammar = build_answer_grammar(request, templates.answers, state)
        if grammar is not None:
            require(limits, engine_pb2.CAPABILITY_GRAMMAR, grammar.field)
            completion.grammar.CopyFrom(grammar.spec)
        try:
            plan = plan_completion(completion, self._vocabulary, None, limits)
        except ServiceError as error:
            if error.field.startswith("prompts"):
                error.field = "messages"
            raise
        if images is not None and rendered.images is not None:
            plan.engine_request.images.extend(images.messages([rendered.images]))
            places = images.places([rendered.images], [prompt.ids for prompt in plan.prompts])
            plan = replace(plan, images=places)
        table = templates.table if plan.choice.skip_special_tokens else plan.full_table
        hidden = table.hidden if plan.choice.scored else None
        echo = _last_answer(request) if request.echo else ""
        tools = arguments_schemas(shown_tools(request.tools, request.tool_choice))
        resumed = {choice.index for choice in request.resume.choices}
        self._messages = [
            self._message(state, tools, hidden, table.pieces, "" if index in resumed else echo)
            for index in range(request.n if request.HasField("n") else 1)
        ]
        moved = [f"messages[{index}].role" for index in rendered.moved]
        if grammar is not None:
            plan = replace(plan, remap_error=grammar.remap_error, ignored=grammar.ignored)
        return replace(
            plan,
            ignored=[*moved, *plan.ignored][:MOST_IGNORED],
            table=table,
            begins_text=not request.continue_last_message,
            # scores of content that is held back are sent later than its ids
            generates_again=plan.generates_again or plan.choice.scored,
            writes_one_large=True,
        )

    def write_choice(
        self, output: ChoiceOutput, add: Callable[[], completion_pb2.ChatResponse]
    ) -> None:
        """Write output of one choice as parts of its message."""
        self._messages[output.index].write(output, add)

    @property
    def reasoning_tokens(self) -> int:
        return sum(message.reasoning_tokens for message in self._messages)

    def response_in(self, event: completion_pb2.SessionEvent) -> completion_pb2.ChatResponse:
        return event.chat

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
        """Return the number of prompt tokens that truncate_prompt_tokens keeps; None for all."""
        request = self._request
        if not request.HasField("truncate_prompt_tokens"):
            return None
        max_tokens = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else 1
        return kept_tokens(request.truncate_prompt_tokens, context, max_tokens)

    def _prompt(self) -> ChatPrompt:
        request = self._request
        return ChatPrompt(
            messages=request.messages,
            tools=shown_tools(request.tools, request.tool_choice),
            template=request.template,
            arguments_json=request.template_arguments_json,
            add_generation_prompt=(
                request.add_generation_prompt if request.HasField("add_generation_prompt") else None
            ),
            continue_last_message=request.continue_last_message,
            reasoning_effort=request.reasoning_effort,
        )

    def _completion(self, max_tokens: int) -> completion_pb2.CompleteRequest:
        """Return the request as a completion of a placeholder; `max_tokens` is the default."""
        request = self._request
        completion = completion_pb2.CompleteRequest(
            model=request.model,
            prompts=[_PLACEHOLDER_PROMPT],
            sampling=request.sampling,
            stopping=request.stopping,
            stop=request.stop,
            include_stop_string=request.include_stop_string,
            n=request.n if request.HasField("n") else None,
            logprobs=request.logprobs if request.HasField("logprobs") else None,
            grammar=request.grammar if request.HasField("grammar") else None,
            context_overflow=request.context_overflow,
            delivery=request.delivery,
            user=request.user,
            dry_sequence_breakers=request.dry_sequence_breakers,
            no_dry_sequence_breakers=request.no_dry_sequence_breakers,
            bad_words=request.bad_words,
            resume=request.resume if request.HasField("resume") else None,
        )
        for name in ("skip_special_tokens", "truncate_prompt_tokens", "prompt_logprobs"):
            if request.HasField(name):
                setattr(completion, name, getattr(request, name))
        if not request.stopping.HasField("max_tokens"):
            completion.stopping.max_tokens = max_tokens
        return completion


def _shortened(
    request: completion_pb2.ChatRequest, images: ImageExpander | None, kept: KeptMessages
) -> tuple[completion_pb2.ChatRequest, ImageExpander | None]:
    """Return a request with the kept messages alone, and their images."""
    indices = [*kept.indices(len(request.messages))]
    short = completion_pb2.ChatRequest()
    short.CopyFrom(request)
    del short.messages[:]
    short.messages.extend(request.messages[index] for index in indices)
    if images is None:
        return short, None
    counts = [sum(part.HasField("image") for part in each.parts) for each in request.messages]
    begins = [*accumulate(counts, initial=0)]
    places = [place for i in indices for place in range(begins[i], begins[i + 1])]
    return short, images.of(places) if places else None


def _in_whole(
    rendered: RenderedChat, request: completion_pb2.ChatRequest, kept: KeptMessages
) -> RenderedChat:
    """Return the prompt of the kept messages with the indices that they have in the request."""
    indices = [*kept.indices(len(request.messages))]
    return replace(rendered, moved=[indices[index] for index in rendered.moved])


def _last_answer(request: completion_pb2.ChatRequest) -> str:
    """Return the content of the last message if it is the assistant's, else ""."""
    last = request.messages[-1]
    is_answer = last.role == completion_pb2.ROLE_ASSISTANT
    return "\n".join(_texts(last)) if is_answer else ""


def _text_before(request: completion_pb2.ChatRequest) -> str:
    """Return the last text part of the second-last message, trimmed as templates do, or ""."""
    texts = [text for message in request.messages[-2:-1] for text in _texts(message)]
    return texts[-1].strip() if texts else ""


def _texts(message: completion_pb2.Message) -> list[str]:
    """Return the text parts of a message."""
    return [part.text for part in message.parts if part.HasField("text")]
