"""Running completions of the process: start and drain."""

import asyncio

from services.tokenizer import metrics
from services.tokenizer.completion.completion_stream import CompletionStream
from services.tokenizer.completion.engine_request import CallContext
from services.tokenizer.completion.request_processor import RequestProcessor
from services.tokenizer.engines.engine_link import EngineLink
from services.tokenizer.engines.engine_pool import EnginePool
from services.tokenizer.send_queue import SendQueue

__all__ = ["CompletionRegistry"]


class CompletionRegistry:
    """Completions that have not ended."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._running: set[CompletionStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False
        """True if new completions are refused"""

    def start(
        self,
        processor: RequestProcessor,
        context: CallContext,
        send_queue: SendQueue[CompletionStream],
        *,
        credit: int | None = None,
        is_windowed: bool = False,
    ) -> CompletionStream:
        """Start a completion, which marks itself in `send_queue` when it has output or fails.

        credit: tokens per choice that the client grants; None without its own flow control.
        is_windowed: whether `CompletionStream.extend_window` controls the flow.
        """
        stream = CompletionStream(
            processor,
            context,
            self._pool,
            send_queue,
            self._discard,
            credit=credit,
            is_windowed=is_windowed,
        )
        self._running.add(stream)
        self._idle.clear()
        metrics.RUNNING.inc()
        stream.start(is_draining=self.is_draining)
        return stream

    def move_from(self, link: EngineLink) -> None:
        """Continue the completions of an engine that stops on the others."""
        for stream in [*self._running]:
            stream.move(link)

    async def drain(self) -> None:
        """Refuse new completions; return when the running ones have ended."""
        self.is_draining = True
        await self._idle.wait()

    def _discard(self, stream: CompletionStream) -> None:
        self._running.discard(stream)
        metrics.RUNNING.dec()
        if not self._running:
            self._idle.set()
