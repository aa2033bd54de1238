"""Processor of a request with prompts, whose text the model continues."""

import asyncio
from collections.abc import Coroutine, Sequence

from services.tokenizer.completion.choice import ChoiceOutput
from services.tokenizer.completion.plan import CompletionPlan, plan_prompts
from services.tokenizer.completion.request_processor import AddResponse, RequestProcessor
from services.tokenizer.completion.validation import check_prompts, check_request
from services.tokenizer.images.image_expander import ImageExpander
from services.tokenizer.images.image_reader import ImageReader
from services.tokenizer.images.request_images import RequestImage
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.infill import InfillTemplate
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["PromptProcessor", "write_text"]

_INLINE_CHARACTERS = 4_096  # longer texts are encoded in a thread: the event loop must stay free


class PromptProcessor(RequestProcessor):
    """Processor of one request with prompts."""

    def __init__(
        self,
        request: completion_pb2.GenerateRequest,
        vocabulary: Vocabulary,
        infill: InfillTemplate | None,
        reader: ImageReader,
    ) -> None:
        super().__init__(request, vocabulary, reader)
        self._infill = infill

    def plan(self, limits: ModelLimits) -> CompletionPlan | Coroutine[None, None, CompletionPlan]:
        """Return the plan. Raises the errors of `plan_prompts`, `ImageReader.read` and `check`."""
        prompts = self._request.prompts
        if prompts.images:
            return self._plan_with_images(limits)
        if self._is_large:
            return asyncio.to_thread(self._check_and_plan, limits)
        length = len(prompts.suffix) + sum(len(prompt.text) for prompt in prompts.items)
        if length > _INLINE_CHARACTERS:
            return asyncio.to_thread(self._plan, limits)
        return self._plan(limits)

    def write_choice(self, output: ChoiceOutput, add: AddResponse) -> None:
        write_text(output, add)

    def _check(self, limits: ModelLimits) -> Sequence[RequestImage]:
        request = self._request
        check_request(request, limits)
        check_prompts(request, limits, self._infill)
        if not request.prompts.images:
            return ()
        self._reader.require("prompts.images", limits)
        if request.prompts.HasField("suffix"):
            message = "images can't be combined with suffix: leave out one of them."
            raise invalid("prompts.images", message)
        return self._take_images(limits)

    def _check_and_plan(self, limits: ModelLimits) -> CompletionPlan:
        self._check(limits)
        return self._plan(limits)

    async def _plan_with_images(self, limits: ModelLimits) -> CompletionPlan:
        given = await asyncio.to_thread(self._check, limits)
        self._held = self._reader.held.hold(given)
        images = await self._reader.read(given)
        return await asyncio.to_thread(self._plan, limits, images)

    def _plan(self, limits: ModelLimits, images: ImageExpander | None = None) -> CompletionPlan:
        plan = plan_prompts(self._request, self._vocabulary, self._infill, limits, images)
        if images is None:
            self._reader.refuse_stray_tokens((prompt.ids for prompt in plan.prompts), limits)
        return plan


def write_text(output: ChoiceOutput, add: AddResponse) -> None:
    """Write output of one choice: its echo, its new tokens, the suffix, its end."""
    if output.echo is not None:
        delta = add().delta
        delta.index = output.index
        delta.text = output.echo.text
        delta.is_prompt = True
        output.echo.columns.write(delta)
    if output.has_tokens:
        delta = add().delta
        delta.index = output.index
        delta.text = output.text
        delta.position = output.position
        output.columns.write(delta)
    if output.suffix:
        delta = add().delta
        delta.index = output.index
        delta.text = output.suffix
        delta.position = output.position + len(output.columns.ids)
    if output.outcome is not None:
        output.outcome.write(output.index, add().finished)
