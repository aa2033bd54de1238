"""Loop of the interactive chat."""

import asyncio
import contextlib
import os
import signal
import sys
import termios
from collections.abc import Coroutine, Iterator

from tokenwire.cli.chat.attachments import Attachments
from tokenwire.cli.chat.chat_server import ChatServer
from tokenwire.cli.chat.chat_settings import ChatSettings
from tokenwire.cli.chat.chat_state import ChatState
from tokenwire.cli.chat.markdown_rows import RowRenderer
from tokenwire.cli.chat.pdf_reader import PdfReader
from tokenwire.cli.chat.prompt_line import QUOTES, PromptLine
from tokenwire.cli.chat.slash_commands import COMMANDS, choices, run_command

__all__ = ["open_state", "run_chat"]


async def open_state(
    server: ChatServer, model: str, pdfs: PdfReader, settings: ChatSettings
) -> ChatState:
    """Return the state of a chat on the terminal. Raises ModelError or ServiceError."""
    name = await server.find(model)
    state = ChatState(server, name, Attachments(pdfs.read), settings)
    if os.environ.get("TERM", "dumb") != "dumb" and sys.stdout.isatty():
        state.renderer = RowRenderer()
    return state


async def run_chat(state: ChatState) -> None:
    """Read messages and commands until the user leaves."""
    prompt = PromptLine(choices())
    was_interrupted = False
    while not state.is_over:
        try:
            line = await prompt.read()
        except EOFError:
            return
        except KeyboardInterrupt:
            if prompt.typed:
                was_interrupted = False
                continue
            if was_interrupted:
                return
            was_interrupted = True
            state.say("Ctrl-C again leaves; so do Ctrl-D and /bye.")
            continue
        was_interrupted = False
        await _stoppable(state, _take(state, line))


async def _stoppable(state: ChatState, work: Coroutine[None, None, None]) -> None:
    """Run `work`; Ctrl-C stops it, and the chat goes on."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)
    task = asyncio.create_task(work)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        with _silent_keys():
            await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
        state.say("Stopped.")
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


async def _take(state: ChatState, line: str) -> None:
    text = _message(line)
    if not text and not state.attachments.names:
        return
    first = line.lstrip().partition(" ")[0].partition("\n")[0]
    if first.startswith("/") and (first in COMMANDS or "/" not in first[1:]):
        await run_command(state, _whole_command(line))
    else:
        await state.answer(state.attachments.take(text))
        print()


def _message(line: str) -> str:
    """Return a message without the quotes around several lines."""
    text = line.strip()
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES)
        text = text.removesuffix(QUOTES) if text.endswith(QUOTES) else text
        text = text.strip("\n")
    return text


def _whole_command(line: str) -> str:
    """Return a command whose argument may be quoted over several lines."""
    name, _, rest = line.strip().partition(" ")
    return f"{name} {_message(rest)}" if rest else name


@contextlib.contextmanager
def _silent_keys() -> Iterator[None]:
    """Show no keys while the chat works; they stay for the next line of input."""
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, ValueError, OSError):
        yield
        return
    silent = list(before)
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
