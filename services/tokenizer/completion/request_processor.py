"""Base class of request processors: validation, plan and output of one request."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeAlias

from services.tokenizer.completion.choice import ChoiceOutput
from services.tokenizer.completion.plan import CompletionPlan
from services.tokenizer.images.held_images import NO_IMAGES
from services.tokenizer.images.image_reader import ImageReader
from services.tokenizer.images.request_images import RequestImage, has_images, take_images
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["AddResponse", "RequestProcessor"]

_LARGE_BYTES = 16_384
_LARGE_PARTS = _LARGE_BYTES // 2  # each part takes at least two bytes

AddResponse: TypeAlias = Callable[[], completion_pb2.GenerateResponse]
"""Function that adds a response to those that go to the client, and returns it"""


class RequestProcessor(ABC):
    """One request, with everything that depends on its input: prompts, or a conversation."""

    def __init__(
        self, request: completion_pb2.GenerateRequest, vocabulary: Vocabulary, reader: ImageReader
    ) -> None:
        self._request = request
        """The request; `_take_images` takes the images out of it"""
        self._vocabulary = vocabulary
        self._reader = reader
        self._held = NO_IMAGES
        """Bytes of the request's images, which `reader.held` counts"""

    @property
    def model(self) -> str:
        """Name of the model that the request asks for."""
        return self._request.model

    def check(self, limits: ModelLimits) -> None:
        """Validate the request, unless it is large. Raises the error of its first wrong field."""
        if not self._is_large:
            self._check(limits)

    @abstractmethod
    def plan(self, limits: ModelLimits) -> CompletionPlan | Coroutine[None, None, CompletionPlan]:
        """Return the plan, or a coroutine if that takes long; validate a large request first."""

    @abstractmethod
    def write_choice(self, output: ChoiceOutput, add: AddResponse) -> None:
        """Write output of one choice, as responses from `add`."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning in all output that was written."""
        return 0

    def close(self) -> None:
        """Release the memory of the request's images, at its end."""
        self._reader.held.release(self._held)
        self._held = NO_IMAGES

    @abstractmethod
    def _check(self, limits: ModelLimits) -> Sequence[RequestImage]:
        """Validate the request; take and return its images."""

    @property
    def _is_large(self) -> bool:
        """True if all work on the request belongs in a thread.

        DRY breakers are searched for in the whole vocabulary, and each bad word is encoded by
        itself.
        """
        request = self._request
        words = bool(request.dry_sequence_breakers) or bool(request.bad_words)
        # images first: the size costs a serialization
        return words or has_images(request, _LARGE_PARTS) or request.ByteSize() > _LARGE_BYTES

    def _take_images(self, limits: ModelLimits) -> Sequence[RequestImage]:
        """Take the images out of the request. Raises INVALID_ARGUMENT for wrong ones."""
        self._request, images = take_images(self._request)
        if images:
            self._reader.require(images[0].field, limits)
        return images
