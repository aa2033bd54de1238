"""Running calls of gateways by the gateways' request ids."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace
from functools import partial

from services.common.accounts import identity as caller
from services.common.errors import draining_error
from services.common.interceptor import sane_request_id
from services.common.logging import request_id, traceparent
from services.common.settings import StreamSettings
from services.tokenizer.completion.completion_registry import CompletionRegistry
from services.tokenizer.completion.completion_span import start_span
from services.tokenizer.completion.completion_stream import CompletionStream
from services.tokenizer.completion_call import (
    CompletionCall,
    Context,
    StalledCalls,
    context_of_call,
)
from services.tokenizer.processor_factory import ProcessorFactory
from services.tokenizer.vllm_api.generate_processor import GenerateProcessor
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["GenerateCalls"]


class GenerateCalls:
    """Calls of gateways, which run translated requests as completions."""

    def __init__(
        self,
        registry: CompletionRegistry,
        processors: ProcessorFactory,
        model: str,
        settings: StreamSettings,
    ) -> None:
        """model: canonical id of the model, for the permissions of API keys."""
        self._registry = registry
        self._model = model
        self._processors = processors
        self._settings = settings
        self._stalled = StalledCalls(settings)
        self._streams: defaultdict[str, set[CompletionStream]] = defaultdict(set)
        """Running streams by the client's request id, which need not be unique"""

    @property
    def count(self) -> int:
        """Calls that have not ended."""
        return sum(map(len, self._streams.values()))

    async def run(
        self,
        request: completion_pb2.GenerateRequest,
        identity: str,
        name_field: Callable[[str], str],
        context: Context,
        *,
        salt: str = "",
        priority: int = 0,
    ) -> AsyncGenerator[completion_pb2.GenerateResponse, None]:
        """Yield the responses of a completion.

        identity: the client's id of the request; empty = the id of the call.
        name_field: returns the client's name of a field of `request`, for errors.
        salt: the client's own salt of the prefix cache, beside the tenant.
        priority: priority of the request; 0 = the priority in the metadata.
        """
        factory = self._processors
        processor = GenerateProcessor(request, factory.vocabulary, factory.infill, factory.images)
        known_as = sane_request_id(identity) if identity else request_id.get()
        start = partial(start_span, request, traceparent.get(), known_as)
        origin = context_of_call(context, request, self._model, known_as, start)
        if salt:
            origin = replace(origin, tenant=f"{origin.tenant}/{salt}")
        if priority:
            allowed = caller.current.get().priority(priority, name_field("priority"))
            origin = replace(origin, priority=allowed)
        call = CompletionCall(self._registry, processor, origin, self._settings)
        name = identity or known_as
        self._streams[name].add(call.stream)
        responses = call.responses(context, self._stalled)
        try:
            async for response in responses:
                yield response
        except ServiceError as error:
            error.field = name_field(error.field)
            raise
        finally:
            await responses.aclose()
            self._streams[name].discard(call.stream)
            if not self._streams[name]:
                del self._streams[name]

    def require_open(self) -> None:
        """Raise UNAVAILABLE if the service drains."""
        if self._registry.is_draining:
            raise draining_error()

    def abort(self, identities: Iterable[str]) -> None:
        """Cancel requests. Their clients get the generated tokens. Unknown ids have no effect."""
        for identity in identities:
            for stream in tuple(self._streams.get(identity, ())):
                stream.cancel()
