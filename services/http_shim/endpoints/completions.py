"""POST /v1/completions."""

import msgspec

from services.http_shim.endpoints.generation import Generation
from services.http_shim.formats.completion_responses import CompletionShape
from services.http_shim.formats.requests import CompletionBody
from services.http_shim.formats.translate import param_of, to_complete_request
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["Completions"]


class Completions(Generation[CompletionBody, completion_pb2.ChoiceDelta]):
    """The endpoint."""

    _decoder = msgspec.json.Decoder(CompletionBody)

    def _translate(self, body: CompletionBody) -> completion_pb2.CompleteRequest:
        return to_complete_request(body)

    def _param_of(self, path: str, body: CompletionBody) -> str:
        return param_of(path, body)

    def _shape_of(self, body: CompletionBody) -> CompletionShape:
        return CompletionShape.of(body)
