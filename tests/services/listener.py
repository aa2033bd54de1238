"""Listener that collects the answer to one request of a completion session."""

import asyncio
from typing import Any, Generic, Protocol, TypeVar

from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion

__all__ = ["Listener"]


class _Answer(Protocol):
    def take(self, response: Any, /) -> None: ...


Answer = TypeVar("Answer", bound=_Answer)


class Listener(Generic[Answer]):
    """Events of one request of a Session, collected in `answer`."""

    def __init__(self, answer: Answer) -> None:
        loop = asyncio.get_running_loop()
        self.answer = answer
        self.began: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Answer] = loop.create_future()

    def on_event(self, event: completion.SessionEvent) -> None:
        response = event.response
        self.answer.take(response)
        if response.HasField("delta") and not self.began.done():
            self.began.set_result(None)
        if response.HasField("completed"):
            self.ended.set_result(self.answer)

    def on_error(self, error: ServiceError) -> None:
        self.ended.set_exception(error)
