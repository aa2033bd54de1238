"""State of a chat, and the way an answer comes into it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenwire.cli.chat.answer_view import AnswerView, LiveView, PlainView
from tokenwire.cli.chat.attachments import Attachments
from tokenwire.cli.chat.chat_server import ChatServer, ModelError
from tokenwire.cli.chat.chat_settings import ChatSettings
from tokenwire.cli.chat.conversation import Conversation
from tokenwire.cli.chat.live_rows import screen_size
from tokenwire.cli.chat.markdown_rows import RowRenderer
from tokenwire.client import Client
from tokenwire.errors import ServiceError
from tokenwire.messages import Message, ToolCallDelta, join_calls
from tokenwire.results import Delta, Usage
from tokenwire.stream import AnswerStream

__all__ = ["ChatState", "Reply"]


@dataclass(slots=True)
class Reply:
    """Parts of an answer that have come, and their times."""

    began: float = field(default_factory=time.monotonic)
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    tokens: int = 0
    first: float | None = None
    """Time of the first token"""
    last: float = 0.0
    """Time of the last token"""
    first_tokens: int = 0
    """Number of tokens that came with the first one"""

    def add(self, delta: Delta) -> None:
        """Take a part of the answer."""
        self.texts.append(delta.text)
        self.reasoning.append(delta.reasoning)
        self.calls.extend(delta.tool_calls)
        if delta.token_ids:
            self.tokens += len(delta.token_ids)
            self.last = time.monotonic()
            if self.first is None:
                self.first, self.first_tokens = self.last, self.tokens

    @property
    def message(self) -> Message | None:
        """The answer as a message; None if nothing has come."""
        text, reasoning = "".join(self.texts), "".join(self.reasoning)
        calls = join_calls(self.calls)
        if not (text or reasoning or calls):
            return None
        return Message("assistant", text or None, calls, reasoning=reasoning)

    def summary(self, usage: Usage | None) -> str:
        """Return tokens and speed in one line."""
        parts = [f"{usage.completion_tokens if usage else self.tokens} tokens"]
        later, seconds = self.tokens - self.first_tokens, self.last - (self.first or 0.0)
        if usage:  # the server's time: tokens that came in one message say nothing about speed
            later, seconds = usage.completion_tokens - 1, usage.decode_seconds
        if later > 0 and seconds > 0:
            parts.append(f"{later / seconds:.1f} tokens/s")
        if self.first is not None:
            parts.append(f"first token after {self.first - self.began:.2f} s")
        if usage:
            cached = f", {usage.cached_tokens} cached" if usage.cached_tokens else ""
            parts.append(f"prompt {usage.prompt_tokens} tokens{cached}")
        return " · ".join(parts)


@dataclass(slots=True)
class ChatState:
    """State that the commands and messages of a chat change."""

    server: ChatServer
    model: str
    attachments: Attachments
    settings: ChatSettings
    conversation: Conversation = field(default_factory=Conversation)
    unanswered: Message | None = None
    """Last message, if its request failed before anything came"""
    own_files: set[Path] = field(default_factory=set)
    """Files that this chat has written or read, and may write again"""
    is_over: bool = False
    renderer: RowRenderer | None = None
    """Renderer of answers; None = they are printed as plain text"""

    def say(self, text: str) -> None:
        """Print a line of the chat itself, dimmed."""
        if self.renderer is None:
            print(text, flush=True)
            return
        for line in text.split("\n"):
            rows = self.renderer.text_rows(line, screen_size()[0], "dim")
            print("\n".join(rows), flush=True)

    async def use_model(self, name: str) -> None:
        """Answer by another model from now on. Raises ModelError or ServiceError."""
        self.model = await self.server.find(name)

    async def answer(self, question: Message) -> None:
        """Ask, and show the answer. What came of it stays, even if it was stopped or failed."""
        self.conversation.messages.append(question)
        self.unanswered = None
        reply = Reply()
        async with self._view() as view:
            usage, problem = await self._receive(reply, view)
        answer = reply.message
        if answer is not None:
            self.conversation.messages.append(answer)
        else:
            self.conversation.messages.pop()
            self.unanswered = question
        if problem is not None:
            self.say(problem)
        if self.settings.verbose and reply.tokens:
            self.say(reply.summary(usage))

    async def show_last_answer(self) -> None:
        """Show the last message of a conversation that was loaded."""
        messages = self.conversation.messages
        if messages and messages[-1].content:
            async with self._view() as view:
                view.add(Delta(index=0, text=messages[-1].content))

    async def _receive(self, reply: Reply, view: AnswerView) -> tuple[Usage | None, str | None]:
        """Receive an answer. Return its usage, and the reason of an early end as a sentence."""
        try:
            async with self.server.lease(self.model, view.wait) as client:
                reply.began = time.monotonic()  # the load of a model says nothing about its speed
                async with self._stream(client) as stream:
                    async for delta in stream:
                        reply.add(delta)
                        view.add(delta)
                    return stream.usage, None
        except ServiceError as error:
            return None, await self.server.why_failed(error)
        except ModelError as error:
            return None, str(error)
        except asyncio.CancelledError:  # Ctrl-C; what has come stays
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            return None, "Stopped."

    def _stream(self, client: Client) -> AnswerStream:
        options: dict[str, Any] = dict(self.settings.request)
        if self.model:
            options["model"] = self.model
        return client.stream(self.conversation.whole, **options)

    @asynccontextmanager
    async def _view(self) -> AsyncIterator[AnswerView]:
        if self.renderer is None:
            view: AnswerView = PlainView()
        else:
            keeps = self.settings.reasoning == "show"
            view = LiveView(self.renderer, keeps_reasoning=keeps)
        try:
            yield view
        finally:
            await view.end()
