"""Commands of the chat that begin with a slash."""

import json
import os
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from tokenwire.cli.chat.attachments import AttachmentError, read_file
from tokenwire.cli.chat.chat_server import ModelError
from tokenwire.cli.chat.chat_settings import NAMES, SettingError
from tokenwire.cli.chat.chat_state import ChatState
from tokenwire.cli.chat.conversation import ConversationError, read_messages, write_messages
from tokenwire.cli.chat.prompt_line import Choices
from tokenwire.cli.visible_text import visible
from tokenwire.errors import ServiceError
from tokenwire.flag_parser import suggestion

__all__ = ["COMMANDS", "choices", "run_command"]


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command: what follows it, its meaning, and the function that runs it."""

    usage: str
    meaning: str
    run: Callable[[ChatState, str], Awaitable[None]]
    takes_path: bool = False


async def run_command(state: ChatState, line: str) -> None:
    """Run a line that begins with a slash; print a sentence if that fails."""
    name, _, rest = line.strip().partition(" ")
    command = COMMANDS.get({"/?": "/help", "/exit": "/bye", "/quit": "/bye"}.get(name, name))
    if command is None:
        hint = suggestion(name, COMMANDS) or " /help lists the commands."
        state.say(f"There is no command {visible(name)}.{hint}")
        return
    try:
        await command.run(state, rest.strip())
    except (AttachmentError, ModelError, SettingError) as error:
        state.say(str(error))
    except ServiceError as error:
        state.say(await state.server.why_failed(error))


def choices() -> Choices:
    """Return what may follow each command, for completion."""
    found = {name: None if each.takes_path else () for name, each in COMMANDS.items()}
    return {**found, "/set": [f"{name} " for name in NAMES]}


async def _help(state: ChatState, rest: str) -> None:
    width = max(len(f"{name} {each.usage}") for name, each in COMMANDS.items())
    for name, each in COMMANDS.items():
        state.say(f"{f'{name} {each.usage}':{width}}  {each.meaning}")
    state.say(
        '\n"""  begins and ends a message of several lines; Alt-Enter adds a line.\n'
        "Ctrl-C stops an answer, and leaves if pressed twice; Ctrl-D leaves."
    )


async def _system(state: ChatState, rest: str) -> None:
    if not rest:
        state.say(visible(state.conversation.system) or "There is no system message.")
        return
    state.conversation.system = "" if rest in ("none", '""') else _unquoted(rest)
    state.say("System message set." if state.conversation.system else "System message removed.")


async def _set(state: ChatState, rest: str) -> None:
    name, _, value = rest.partition(" ")
    if not name:
        for each, text in state.settings.shown():
            state.say(f"{each:18} {text}")
    elif not value.strip():
        if name not in ("verbose",):
            raise SettingError(f"/set {name} needs a value, such as /set temperature 0.7.")
        state.settings.set(name, "on")
    else:
        state.settings.set(name, value.strip())


async def _image(state: ChatState, rest: str) -> None:
    state.attachments.add_image(_path(rest, "/image photo.jpg"))
    _say_attached(state)


async def _file(state: ChatState, rest: str) -> None:
    length = await state.attachments.add_file(_path(rest, "/file notes.txt"))
    state.say(f"{length:,} characters of text.")
    _say_attached(state)


async def _regenerate(state: ChatState, rest: str) -> None:
    question = state.conversation.drop_answer() or state.unanswered
    if question is None:
        state.say("There is no message to answer again.")
        return
    await state.answer(question)


async def _save(state: ChatState, rest: str) -> None:
    path = _path(rest, "/save chat.json")
    value = {"model": state.model, "messages": write_messages(state.conversation.whole)}
    text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
    try:
        if path.exists() and path.resolve() not in state.own_files:
            state.say(f"{path} exists: name another file.")
            return
        _replace(path, text)
    except OSError as error:
        state.say(f"{path} can't be written: {error.strerror}.")
        return
    state.own_files.add(path.resolve())
    state.say(f"Saved {len(state.conversation.whole)} messages in {path}.")


async def _load(state: ChatState, rest: str) -> None:
    path = _path(rest, "/load chat.json")
    try:
        messages = read_messages(read_file(path).decode("utf-8"))
    except (UnicodeError, ConversationError) as error:
        state.say(f"{path} is no conversation: {error}.")
        return
    state.conversation.replace_all(messages)
    state.unanswered = None
    state.own_files.add(path.resolve())
    state.say(f"Loaded {len(messages)} messages.")
    await state.show_last_answer()


async def _clear(state: ChatState, rest: str) -> None:
    state.conversation.messages.clear()
    state.attachments.clear()
    state.unanswered = None
    state.say("The conversation is empty; the system message and /set stay.")


async def _model(state: ChatState, rest: str) -> None:
    if not rest:
        for name in await state.server.models():
            state.say(f"{'*' if name == state.model else ' '} {visible(name)}")
        return
    await state.use_model(rest)
    state.say(f"Answers come from {visible(state.model)} now.")


async def _bye(state: ChatState, rest: str) -> None:
    state.is_over = True


def _path(text: str, example: str) -> Path:
    """Return the path of a command; quotes and backslashes have the meaning of a shell."""
    try:
        parts = shlex.split(text)
    except ValueError:
        parts = [text]
    if not parts:
        raise AttachmentError(f"A file is missing, such as {example}.")
    try:
        whole, first = Path(text).expanduser(), Path(parts[0]).expanduser()
        return whole if len(parts) > 1 or whole.exists() else first
    except RuntimeError:
        raise AttachmentError(f"{text} names a user without a home directory.") from None
    except OSError as error:
        raise AttachmentError(f"{text} is no path: {error.strerror}.") from None


def _replace(path: Path, text: str) -> None:
    """Write a file. If the disk is full, an older file of this name stays whole. Raises OSError."""
    whole = path.resolve()
    fresh = whole.with_name(f".{whole.name[:50]}.{os.getpid()}")
    try:
        fresh.write_text(text, "utf-8")
        fresh.replace(whole)
    finally:
        fresh.unlink(missing_ok=True)


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _say_attached(state: ChatState) -> None:
    state.say(f"With the next message: {', '.join(map(visible, state.attachments.names))}.")


COMMANDS = {
    "/system": SlashCommand("[TEXT]", 'Set the system message; "none" removes it.', _system),
    "/set": SlashCommand("[NAME VALUE]", "Set temperature, max_tokens …; alone: show all.", _set),
    "/image": SlashCommand("FILE", "Send an image with the next message.", _image, True),
    "/file": SlashCommand("FILE", "Send a text or PDF with the next message.", _file, True),
    "/regenerate": SlashCommand("", "Answer the last message again.", _regenerate),
    "/save": SlashCommand("FILE", "Write the conversation as JSON.", _save, True),
    "/load": SlashCommand("FILE", "Continue a conversation that was saved.", _load, True),
    "/clear": SlashCommand("", "Begin a new conversation.", _clear),
    "/model": SlashCommand("[NAME]", "Use another model; alone: list the models.", _model),
    "/help": SlashCommand("", "Show this list.", _help),
    "/bye": SlashCommand("", "Leave.", _bye),
}
