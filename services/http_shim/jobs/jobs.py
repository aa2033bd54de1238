"""Calls of the jobs service that requests to generate make."""

from collections.abc import Sequence
from typing import Protocol

from services.http_shim.http.exchange import Exchange
from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = ["InnerJobs", "context_of"]


class InnerJobs(Protocol):
    """The kept responses, and the text of documents.

    A shim asks the jobs service by `JobsClient`. The jobs service itself, which calls the shim's
    routes for batches and responses in the background, has them in its own process.
    """

    async def keep(self, request: jobs_pb2.PutResponseRequest) -> bool:
        """Keep a response; return false if it is too large, or nothing keeps any.

        Raises ServiceError, mostly UNAVAILABLE.
        """

    async def find(self, request: jobs_pb2.GetResponseRequest) -> jobs_pb2.GetResponseResponse:
        """Return a kept response. Raises NOT_FOUND, UNAVAILABLE and UNIMPLEMENTED."""

    async def read_texts(self, request: jobs_pb2.ReadTextRequest) -> Sequence[str]:
        """Return the text of each document.

        Raises INVALID_ARGUMENT and NOT_FOUND with the field of a document, UNAVAILABLE and
        UNIMPLEMENTED.
        """


def context_of(exchange: Exchange) -> jobs_pb2.RequestContext:
    """Return on whose behalf the request of an exchange asks."""
    return jobs_pb2.RequestContext(
        account="" if exchange.account is None else exchange.account.id,
        tenant=exchange.tenant,
        priority=exchange.priority,
        may_schedule=exchange.may_schedule,
    )
