"""The life of one completion beside its output."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc

from services.common.settings import StreamSettings
from services.common.span import Span
from services.tokenizer.completion.choice import ChoiceOutput
from services.tokenizer.completion.completion_stream import CompletionStream
from services.tokenizer.completion.engine_request import CallContext
from services.tokenizer.completion.prompt_processor import PromptProcessor
from services.tokenizer.images.image_reader import ImageReader
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.send_queue import SendQueue
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.engine.v1 import engine_pb2 as engine
from tokenwire.pb.types.v1 import types_pb2 as types

_LIMITS = ModelLimits("m", "fp_0", 64, 99, frozenset(), frozenset(), 5, 20, 128, 16, True)


class _EngineSession:
    """A Session whose engine never answers."""

    def open(self, listener: object) -> int:
        return 1

    def send(self, command: object) -> None:
        pass


class _Placement:
    """A place on an engine that never answers."""

    link = SimpleNamespace(session=_EngineSession())

    def on_output(self) -> None:
        pass

    def leave(self) -> None:
        pass


class _FaultyProcessor(PromptProcessor):
    @staticmethod
    def write_choice(output: ChoiceOutput, add: Callable[[], completion.GenerateResponse]) -> None:
        raise ArithmeticError


def _started(make: type[PromptProcessor], vocabulary: Vocabulary) -> CompletionStream:
    prompt = completion.Prompt(token_ids=types.TokenIds(ids=[3]))
    request = completion.GenerateRequest(prompts=completion.Prompts(items=[prompt]))
    pool: Any = SimpleNamespace(
        is_serving=True,
        limits_of=lambda model: _LIMITS,
        place=lambda need, avoided: _Placement(),
        suspend=lambda link: None,
    )
    stream = CompletionStream(
        make(request, vocabulary, None, ImageReader(None, vocabulary, "m")),
        CallContext("", Span(""), "", 0, None),
        pool,
        SendQueue[CompletionStream](StreamSettings()),
        lambda ended: None,
        credit=None,
        is_windowed=False,
    )
    stream.start(is_draining=False)
    return stream


async def test_request_whose_output_can_not_be_written_fails_even_after_its_end(
    byte_level_vocabulary: Vocabulary,
) -> None:
    """A client of a Session would wait for its end forever."""
    stream = _started(_FaultyProcessor, byte_level_vocabulary)
    tokens = types.TokenColumns(ids=[4])
    stream.on_event(engine.SessionEvent(delta=engine.OutputDelta(tokens=tokens)))
    stream.on_event(engine.SessionEvent(completed=engine.Completed()))
    try:
        stream.write(completion.GenerateResponse)
    except ArithmeticError:
        stream.fail_unexpectedly()
    assert stream.error is not None
    assert stream.error.code is grpc.StatusCode.INTERNAL


async def test_cancelled_request_ends_when_the_engine_is_lost(
    byte_level_vocabulary: Vocabulary,
) -> None:
    """The next engine would generate for nobody."""
    stream = _started(PromptProcessor, byte_level_vocabulary)
    stream.cancel()
    stream.on_error(ServiceError(grpc.StatusCode.UNAVAILABLE, "SESSION_LOST", "It is lost."))
    await asyncio.sleep(0)
    assert stream.error is not None
    assert stream.error.code is grpc.StatusCode.CANCELLED
