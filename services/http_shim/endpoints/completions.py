"""POST /v1/completions."""

import msgspec

from services.http_shim.endpoints.generation import Generation
from services.http_shim.formats.completion_requests import param_of, to_complete_request
from services.http_shim.formats.completion_responses import CompletionFormatter
from services.http_shim.formats.request_bodies import CompletionBody
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["Completions"]


class Completions(Generation[CompletionBody, completion_pb2.ChoiceDelta]):
    """The endpoint."""

    _decoder = msgspec.json.Decoder(CompletionBody)

    def _translate(self, body: CompletionBody) -> completion_pb2.CompleteRequest:
        return to_complete_request(body)

    def _param_of(self, path: str, body: CompletionBody) -> str:
        return param_of(path, body)

    def _formatter_of(self, body: CompletionBody) -> CompletionFormatter:
        return CompletionFormatter.of(body)
