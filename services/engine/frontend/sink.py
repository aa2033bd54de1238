"""Where the events of one request go."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from services.engine.frontend.outbox import Outbox
from services.engine.messages import Token
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2 import GenerateResponse, SessionEvent

__all__ = ["Sink"]

E = TypeVar("E", bound=GenerateResponse | SessionEvent)


class Sink(ABC, Generic[E]):
    """Puts them into an outbox. Called on the event loop; must not block."""

    def __init__(self, outbox: Outbox[E], add: Callable[..., E], handle: int = 0) -> None:
        """add: makes an event of one of its fields; handle: of the request, in the outbox."""
        self.outbox = outbox
        self._add = add
        self._handle = handle

    def on_accepted(self, accepted: engine_pb2.Accepted) -> None:
        self.outbox.put(self._add(accepted=accepted))

    def on_prompt_scores(self, scores: engine_pb2.PromptScores) -> None:
        self.outbox.put(self._add(prompt_scores=scores))

    def on_token(self, token: Token) -> None:
        self.outbox.put_token(self._handle, token, self._add)

    def on_finished(self, finished: engine_pb2.SequenceFinished) -> None:
        self.outbox.put(self._add(finished=finished))

    def on_completed(self, completed: engine_pb2.Completed) -> None:
        self.outbox.put(self._add(completed=completed))

    @abstractmethod
    def on_error(self, error: ServiceError) -> None: ...
