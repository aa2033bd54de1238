"""Keeping of responses: the jobs service stores them at their end, and later ones continue them."""

import logging

import grpc
import msgspec

from services.http_shim.dialects.fields import JsonObject
from services.http_shim.dialects.responses.read import NO_ITEMS
from services.http_shim.dialects.responses.write import KeptResponse, fail_response
from services.http_shim.endpoints.background_responses import TOO_LARGE
from services.http_shim.jobs.jobs import InnerJobs
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = ["ResponseKeeper"]

_LOG = logging.getLogger("responses")


class ResponseKeeper:
    """Keeps responses, each on behalf of a caller."""

    def __init__(self, jobs: InnerJobs) -> None:
        self._jobs = jobs

    async def context(self, fields: JsonObject, caller: jobs_pb2.RequestContext) -> bytes:
        """Return the JSON array of the items that a body continues.

        Raises NOT_FOUND for a response that is not kept, INVALID_ARGUMENT for one that still runs.
        """
        previous = fields.get("previous_response_id")
        if not isinstance(previous, str):
            return NO_ITEMS  # the types refuse a wrong one
        asked = jobs_pb2.GetResponseRequest(context=caller, response_id=previous, with_context=True)
        try:
            stored = await self._jobs.find(asked)
        except ServiceError as error:
            error.field = "previous_response_id"
            raise
        if stored.is_running:
            message = f"The response {previous!r} is not complete; wait for its end."
            raise invalid("previous_response_id", message)
        return stored.context_json

    async def keep(self, kept: KeptResponse, caller: jobs_pb2.RequestContext) -> None:
        """Keep a response, which says whether it is kept."""
        try:
            kept.response.store = await self._put(kept, caller)
        except ServiceError as error:  # the answer itself is complete
            _LOG.warning("a response could not be kept: %r", error)
            kept.response.store = False

    async def keep_running(self, kept: KeptResponse, caller: jobs_pb2.RequestContext) -> None:
        """Keep a response that begins to run in the background.

        Raises INVALID_ARGUMENT if it is too large, and UNAVAILABLE if the store fails.
        """
        if not await self._put(kept, caller, is_running=True):
            raise invalid("background", TOO_LARGE)

    async def keep_background(self, kept: KeptResponse, caller: jobs_pb2.RequestContext) -> None:
        """Keep the end of a response in the background, or its failure if it is too large."""
        if not await self._put(kept, caller):
            code, message = grpc.StatusCode.INTERNAL, "The response is too large to be kept."
            kept.response.output = []
            fail_response(kept.response, ServiceError(code, "NOT_KEPT", message))
            await self._put(kept, caller)

    async def _put(
        self, kept: KeptResponse, caller: jobs_pb2.RequestContext, *, is_running: bool = False
    ) -> bool:
        stored = jobs_pb2.StoredResponse(
            id=kept.response.id,
            response_json=msgspec.json.encode(kept.response),
            input_json=kept.input,
            context_json=kept.conversation,
            is_running=is_running,
        )
        request = jobs_pb2.PutResponseRequest(context=caller, response=stored)
        return await self._jobs.keep(request)
