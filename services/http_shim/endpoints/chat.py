"""POST /v1/chat/completions."""

import msgspec

from services.http_shim.endpoints.generation import Generation
from services.http_shim.formats.chat_requests import chat_param_of, to_chat_request
from services.http_shim.formats.chat_responses import ChatFormatter
from services.http_shim.formats.request_bodies import ChatBody
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["Chat"]


class Chat(Generation[ChatBody, completion_pb2.ChatDelta]):
    """The endpoint."""

    _decoder = msgspec.json.Decoder(ChatBody)

    def _translate(self, body: ChatBody) -> completion_pb2.ChatRequest:
        return to_chat_request(body)

    def _param_of(self, path: str, body: ChatBody) -> str:
        return chat_param_of(path, body)

    def _formatter_of(self, body: ChatBody) -> ChatFormatter:
        return ChatFormatter.of(body)
