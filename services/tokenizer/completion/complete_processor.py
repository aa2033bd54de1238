"""Request processors: validation, plan and responses of one request, by rpc."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol, TypeVar

from services.tokenizer.completion.choice import ChoiceOutput
from services.tokenizer.completion.plan import CompletionPlan
from services.tokenizer.completion.validation import check_complete
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.infill import InfillTemplate
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["CompleteProcessor", "RequestProcessor", "Response", "is_large"]

_INLINE_CHARACTERS = 4_096
"""Texts above this length are encoded in a thread, so that the event loop stays free."""
_LARGE_BYTES = 16_384

Response = TypeVar("Response", completion_pb2.CompleteResponse, completion_pb2.ChatResponse)


class RequestProcessor(Protocol[Response]):
    """One request, with everything that depends on its rpc."""

    def check(self, limits: ModelLimits) -> None:
        """Validate the request. Raises the ServiceError of its first wrong field.

        Returns quickly: a request that `is_large` is validated by `plan`.
        """

    def plan(self, limits: ModelLimits) -> CompletionPlan | Coroutine[None, None, CompletionPlan]:
        """Return the plan of a request that passed `check`, or a coroutine if that takes long."""

    def write_choice(self, output: ChoiceOutput, add: Callable[[], Response]) -> None:
        """Write output of one choice, as responses from `add`."""

    def response_in(self, event: completion_pb2.SessionEvent) -> Response:
        """Return the response that a Session's event carries for this rpc."""


def is_large(request: completion_pb2.CompleteRequest | completion_pb2.ChatRequest) -> bool:
    """Return whether all work on the request belongs in a thread.

    DRY breakers are searched for in the whole vocabulary, and each bad word is encoded by itself.
    """
    words = bool(request.dry_sequence_breakers) or bool(request.bad_words)
    return words or request.ByteSize() > _LARGE_BYTES


@dataclass(frozen=True, slots=True)
class CompleteProcessor:
    """Processor of a Complete request."""

    request: completion_pb2.CompleteRequest
    vocabulary: Vocabulary
    infill: InfillTemplate | None

    def check(self, limits: ModelLimits) -> None:
        """Validate the request, unless it is large. Raises as `check_complete`."""
        if not is_large(self.request):
            check_complete(self.request, limits, self.infill)

    def plan(self, limits: ModelLimits) -> CompletionPlan | Coroutine[None, None, CompletionPlan]:
        """Return the plan. Raises as `plan_completion`, and as `check_complete` if large."""
        request = self.request
        if is_large(request):
            return asyncio.to_thread(self._check_and_plan, limits)
        length = len(request.suffix) + sum(len(prompt.text) for prompt in request.prompts)
        if length > _INLINE_CHARACTERS:
            return asyncio.to_thread(self._plan, limits)
        return self._plan(limits)
