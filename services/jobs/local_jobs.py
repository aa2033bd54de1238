"""The service as the requests that it makes itself use it."""

from collections.abc import Sequence

from services.jobs.creator import stated_creator
from services.jobs.documents.documents import Documents
from services.jobs.response_service import stored_response
from services.jobs.responses.responses import Responses
from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = ["LocalJobs"]


class LocalJobs:
    """The kept responses and the texts of documents, for requests of this process."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self.responses: Responses | None = None
        """Set before the first request: the responses need the answers, which need this object"""

    async def keep(self, request: jobs_pb2.PutResponseRequest) -> bool:
        assert self.responses is not None
        owner = stated_creator(request.context).owner
        return await self.responses.keep(stored_response(request.response, owner))

    async def find(self, request: jobs_pb2.GetResponseRequest) -> jobs_pb2.GetResponseResponse:
        assert self.responses is not None
        owner = stated_creator(request.context).owner
        stored = await self.responses.get(request.response_id, owner)
        return jobs_pb2.GetResponseResponse(
            response_json=stored.response,
            is_running=stored.is_running,
            context_json=stored.context,
        )

    async def read_texts(self, request: jobs_pb2.ReadTextRequest) -> Sequence[str]:
        return await self._documents.read(request.documents, stated_creator(request.context).owner)
