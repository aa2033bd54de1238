"""Request processors: validation, plan and responses of one request, by rpc."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol, TypeVar

from services.tokenizer.completion.choice import ChoiceOutput
from services.tokenizer.completion.plan import CompletionPlan, plan_completion
from services.tokenizer.completion.validation import check_complete
from services.tokenizer.images.held_images import NO_IMAGES
from services.tokenizer.images.image_expander import ImageExpander
from services.tokenizer.images.image_reader import ImageReader
from services.tokenizer.images.request_images import RequestImage, has_images, take_images
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.infill import InfillTemplate
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["CompleteProcessor", "RequestProcessor", "Response", "is_large"]

_INLINE_CHARACTERS = 4_096  # longer texts are encoded in a thread: the event loop must stay free
_LARGE_BYTES = 16_384
_LARGE_PARTS = _LARGE_BYTES // 2  # each takes two bytes at least

Response = TypeVar("Response", completion_pb2.CompleteResponse, completion_pb2.ChatResponse)


class RequestProcessor(Protocol[Response]):
    """One request, with everything that depends on its rpc."""

    @property
    def model(self) -> str:
        """Name of the model that the request asks for."""

    def check(self, limits: ModelLimits) -> None:
        """Validate the request, unless it `is_large`. Raises the error of its first wrong field."""

    def plan(self, limits: ModelLimits) -> CompletionPlan | Coroutine[None, None, CompletionPlan]:
        """Return the plan, or a coroutine if that takes long; validate a large request first."""

    def close(self) -> None:
        """Give back what the request holds, at its end."""

    def write_choice(self, output: ChoiceOutput, add: Callable[[], Response]) -> None:
        """Write output of one choice, as responses from `add`."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning in all output that was written."""

    def response_in(self, event: completion_pb2.SessionEvent) -> Response:
        """Return the response that a Session's event carries for this rpc."""


def is_large(request: completion_pb2.CompleteRequest | completion_pb2.ChatRequest) -> bool:
    """Return whether all work on the request belongs in a thread.

    DRY breakers are searched for in the whole vocabulary, and each bad word is encoded by itself.
    """
    words = bool(request.dry_sequence_breakers) or bool(request.bad_words)
    # images first: the size costs a serialization
    return words or has_images(request, _LARGE_PARTS) or request.ByteSize() > _LARGE_BYTES


class CompleteProcessor:
    """Processor of a Complete request."""

    def __init__(
        self,
        request: completion_pb2.CompleteRequest,
        vocabulary: Vocabulary,
        infill: InfillTemplate | None,
        reader: ImageReader,
    ) -> None:
        self._request = request
        """The request, without the bytes of its images after `_check`"""
        self._vocabulary = vocabulary
        self._infill = infill
        self._reader = reader
        self._held = NO_IMAGES
        """Bytes of the request's images that `reader.held` counts"""

    @property
    def model(self) -> str:
        return self._request.model

    def check(self, limits: ModelLimits) -> None:
        if not is_large(self._request):
            self._check(limits)

    def plan(self, limits: ModelLimits) -> CompletionPlan | Coroutine[None, None, CompletionPlan]:
        """Return the plan. Raises as `plan_completion` and `ImageReader.read`, and as `check`."""
        request = self._request
        if request.images:
            return self._plan_with_images(limits)
        if is_large(request):
            return asyncio.to_thread(self._check_and_plan, limits)
        length = len(request.suffix) + sum(len(prompt.text) for prompt in request.prompts)
        if length > _INLINE_CHARACTERS:
            return asyncio.to_thread(self._plan, limits)
        return self._plan(limits)

    def close(self) -> None:
        self._reader.held.release(self._held)
        self._held = NO_IMAGES

    @staticmethod
    def write_choice(
        output: ChoiceOutput, add: Callable[[], completion_pb2.CompleteResponse]
    ) -> None:
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
            if output.columns.ids:
                output.columns.write(delta)
        if output.suffix:
            delta = add().delta
            delta.index = output.index
            delta.text = output.suffix
            delta.position = output.position + len(output.columns.ids)
        if output.outcome is not None:
            output.outcome.write(output.index, add().finished)

    @property
    def reasoning_tokens(self) -> int:
        return 0

    def response_in(self, event: completion_pb2.SessionEvent) -> completion_pb2.CompleteResponse:
        return event.complete

    def _check(self, limits: ModelLimits) -> Sequence[RequestImage]:
        """Validate the request; take and return its images."""
        request = self._request
        check_complete(request, limits, self._infill)
        if not request.images:
            return ()
        self._reader.require("images", limits)
        if request.HasField("suffix"):
            message = "images can't be combined with suffix: leave out one of them."
            raise invalid("images", message)
        self._request, images = take_images(request)
        return images

    def _check_and_plan(self, limits: ModelLimits) -> CompletionPlan:
        self._check(limits)
        return self._plan(limits)

    async def _plan_with_images(self, limits: ModelLimits) -> CompletionPlan:
        given = await asyncio.to_thread(self._check, limits)
        self._held = self._reader.held.hold(given)
        images = await self._reader.read(given)
        return await asyncio.to_thread(self._plan, limits, images)

    def _plan(self, limits: ModelLimits, images: ImageExpander | None = None) -> CompletionPlan:
        plan = plan_completion(self._request, self._vocabulary, self._infill, limits, images)
        if images is None:
            self._reader.refuse_stray_tokens((prompt.ids for prompt in plan.prompts), limits)
        return plan
