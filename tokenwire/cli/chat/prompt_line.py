"""Line editor of the chat: history, several lines, completion of commands."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from tokenwire.serving.state_folder import state_folder

__all__ = ["QUOTES", "Choices", "LastingHistory", "PromptLine"]

QUOTES = '"""'
"""Marks around a message of several lines"""
Choices = Mapping[str, Iterable[str] | None]
"""Texts that may follow each command; None = a path"""
_HISTORY = "chat_history"
_MOST_HISTORY = 1 << 20
"""Bytes of history above which the older half is dropped"""
_PROMPT = FormattedText([("bold", ">>> ")])
_CONTINUED = FormattedText([("", "... ")])
_PLACEHOLDER = FormattedText([("fg:ansibrightblack", "Send a message (/help for commands)")])


class PromptLine:
    """Reader of messages from the terminal."""

    def __init__(self, choices: Choices) -> None:
        self._session: PromptSession[str] = PromptSession(
            _PROMPT,
            history=_history(),
            completer=_CommandCompleter(choices),
            complete_while_typing=Condition(_is_command),
            key_bindings=_bindings(),
            multiline=Condition(_is_open),
            prompt_continuation=_CONTINUED,
            placeholder=_PLACEHOLDER,
            enable_open_in_editor=True,
        )

    async def read(self, default: str = "") -> str:
        """Return what the user enters. Raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C.

        U+FFFD stands for bytes that are not UTF-8, which no message can hold.
        """
        text = await self._session.prompt_async(default=default)
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    @property
    def typed(self) -> str:
        """Text of the line when the last reading ended."""
        return self._session.default_buffer.text


class LastingHistory(FileHistory):
    """History that goes on in memory when the disk is full."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


class _CommandCompleter(Completer):
    """Completer of commands and of what follows them."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        command, space, rest = text.partition(" ")
        if not space:
            for name in self._choices:
                if name.startswith(command):
                    yield Completion(name, -len(command))
            return
        choices = self._choices.get(command, ())
        if choices is None:
            yield from self._paths.get_completions(Document(rest), event)
            return
        for choice in choices:
            if choice.startswith(rest):
                yield Completion(choice, -len(rest))


def _is_command() -> bool:
    return get_app().current_buffer.text.startswith("/")


def _is_open() -> bool:
    """Return whether the line has opening quotes without closing ones: Enter then adds a line."""
    text = get_app().current_buffer.text.lstrip()
    return text.startswith(QUOTES) and not (
        len(text) >= 2 * len(QUOTES) and text.rstrip().endswith(QUOTES)
    )


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _history() -> History:
    """Return the history file of the user; one in memory if it can't be used."""
    path = state_folder() / _HISTORY
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        if path.stat().st_size > _MOST_HISTORY:
            _halve(path)
        with path.open("ab"):
            return LastingHistory(str(path))
    except OSError:
        return InMemoryHistory()


def _halve(path: Path) -> None:
    """Drop the older half of the entries, which begin with an empty line and a date."""
    newer = path.read_bytes()[-_MOST_HISTORY // 2 :]
    begin = newer.find(b"\n\n# ")
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.touch(mode=0o600)
    fresh.write_bytes(newer[begin + 1 :] if begin >= 0 else b"")
    fresh.replace(path)
