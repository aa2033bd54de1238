"""The commands `complete` and `chat`."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenwire.cli import result_objects
from tokenwire.cli.arguments import (
    Commands,
    add_command,
    add_json,
    add_target,
    connected,
    number,
    read_text,
    whole_number,
)
from tokenwire.cli.output import print_error, print_json, print_text
from tokenwire.errors import invalid
from tokenwire.extras import install_command
from tokenwire.flag_parser import FlagParser

if TYPE_CHECKING:
    from tokenwire.stream import AnswerStream

__all__ = [
    "add_chat_options",
    "add_commands",
    "add_sampling",
    "request_options",
    "require_chat_packages",
]

_MOST_TOKENS = 2**32 - 1
_SEEDS = (-(2**63), 2**63 - 1)
_MOST_CHOICES = 128
_SAMPLING = ("max_tokens", "temperature", "top_p", "seed", "stop", "ignore_eos")
"""Options of `add_sampling`"""
_CHOICE = ("n", "model")


def add_commands(commands: Commands) -> None:
    """Add both commands."""
    complete = add_command(
        commands,
        "complete",
        _complete,
        "Complete a prompt.",
        'complete "def add(a, b):" --max-tokens 32 --stream',
        "complete - --json < prompt.txt",
        'complete "def f(xs):" --suffix "    return total"',
    )
    complete.add_argument("prompt", help="The prompt; - reads standard input.")
    complete.add_argument("--suffix", help="Text after the gap to fill (infill).")
    _add_options(
        complete,
        "Most tokens to generate; the server's default is 16.",
        "Image for an <image> of the prompt; repeatable. A prompt without any gets them in front.",
    )
    chat = add_command(
        commands,
        "chat",
        _chat,
        "Answer a message, or chat in the terminal.",
        "chat",
        'chat "Say hello." --stream',
        'chat "What is this?" --image photo.jpg',
        "chat < question.txt",
    )
    chat.add_argument(
        "message",
        nargs="?",
        help="The message; - reads standard input. Without one, a chat begins, or standard input "
        "is the message if it is no terminal.",
    )
    chat.add_argument("--system", help="System message.")
    _add_options(
        chat,
        "Most tokens to generate; by default as many as fit.",
        "Image before the message; repeatable.",
    )
    add_chat_options(chat)
    chat.add_argument(
        "--jobs",
        default=os.environ.get("TOKENWIRE_JOBS", ""),
        metavar="HOST:PORT",
        help="Jobs service, which reads PDFs for /file; by default port 50054 of the target's "
        "host [TOKENWIRE_JOBS].",
    )


def _add_options(command: FlagParser, max_tokens: str, images: str) -> None:
    one = command.add_mutually_exclusive_group()
    one.add_argument("--stream", action="store_true", help="Print text as it is generated.")
    one.add_argument("--n", type=whole_number(1, _MOST_CHOICES), help="Number of choices.")
    add_sampling(command, max_tokens)
    command.add_argument("--image", type=Path, action="append", metavar="FILE", help=images)
    command.add_argument("--model", help="Model id; required if several models are served.")
    add_json(command, "Print one JSON object; with --stream one a line.")
    add_target(command)


def add_sampling(command: argparse.ArgumentParser, max_tokens: str) -> None:
    """Add the options of sampling and of an answer's end. max_tokens: help of --max-tokens."""
    command.add_argument("--max-tokens", type=whole_number(1, _MOST_TOKENS), help=max_tokens)
    command.add_argument(
        "--temperature", type=number(0, 2), help="0 = always the most likely token."
    )
    command.add_argument("--top-p", type=number(0, 1), help="Nucleus mass.")
    command.add_argument(
        "--seed", type=whole_number(*_SEEDS), help="The same seed gives the same tokens."
    )
    command.add_argument("--stop", action="append", help="Stop string; repeatable.")
    command.add_argument(
        "--ignore-eos",
        action="store_true",
        default=None,
        help="Continue past the end of sequence, up to --max-tokens.",
    )


def add_chat_options(command: argparse.ArgumentParser) -> None:
    """Add the options of a chat in the terminal."""
    command.add_argument(
        "--verbose", action="store_true", help="In a chat, show tokens and speed of each answer."
    )


async def _complete(options: argparse.Namespace) -> int:
    from tokenwire.requests import with_image_marks

    prompt = read_text(options.prompt, "prompt")
    request = request_options(options, *_CHOICE, "suffix")
    if images := _read_images(options):
        request["images"] = images
        prompt = with_image_marks(prompt, len(images))
    async with connected(options) as client:
        if not options.stream:
            completion = await client.generate(prompt, **request)
            if options.json:
                print_json(result_objects.completion(completion))
            else:
                _print_choices([choice.text for choice in completion.choices])
            return 0
        async with client.stream(prompt, **request) as stream:
            async for delta in stream:
                if options.json:
                    print_json(result_objects.delta(delta))
                else:
                    print_text(delta.text, end="")
            _end_stream(options, stream)
    return 0


async def _chat(options: argparse.Namespace) -> int:
    from tokenwire.client import Message

    if options.message is None and sys.stdin.isatty() and sys.stdout.isatty():
        return await _interactive(options)
    text = read_text("-" if options.message is None else options.message, "message")
    options.stream = options.stream or (options.message is None and options.n is None)
    messages = [Message("user", text, images=_read_images(options))]
    if options.system is not None:
        messages.insert(0, Message("system", options.system))
    request = request_options(options, *_CHOICE)
    async with connected(options) as client:
        if not options.stream:
            answer = await client.generate(messages, **request)
            if options.json:
                print_json(result_objects.chat(answer))
            else:
                _print_choices([choice.text for choice in answer.choices])
            return 0
        async with client.stream(messages, **request) as stream:
            async for delta in stream:
                if options.json:
                    print_json(result_objects.chat_delta(delta))
                else:
                    print_text(delta.text, end="")
            _end_stream(options, stream)
    return 0


async def _interactive(options: argparse.Namespace) -> int:
    try:
        from tokenwire.cli.chat.start import chat_at_target
    except ModuleNotFoundError as error:
        return require_chat_packages(error)
    if options.json or options.n is not None or options.image:
        print_error("--json, --n and --image need a message; a chat has /image.")
        return 2
    return await chat_at_target(options, request_options(options, *_CHOICE))


def require_chat_packages(error: ModuleNotFoundError) -> int:
    """Name the packages of a chat that are not installed. Return the exit code."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "tokenwire", "services"):
        raise error
    print_error(
        f"A chat in the terminal needs {package}: `{install_command('cli')}` installs what it uses."
    )
    return 2


def _end_stream(options: argparse.Namespace, stream: "AnswerStream") -> None:
    if options.json:
        print_json(result_objects.end(stream))
    else:
        print()


def request_options(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the request options that the command line sets: those of sampling, and `names`."""
    given = {name: getattr(options, name) for name in (*_SAMPLING, *names)}
    return {name: value for name, value in given.items() if value is not None}


def _read_images(options: argparse.Namespace) -> list[bytes]:
    """Return the contents of the image files. Raises ServiceError."""
    images = []
    for path in options.image or ():
        try:
            images.append(path.read_bytes())
        except OSError as error:
            raise invalid("image", f"{path} can't be read: {error.strerror}.") from None
    return images


def _print_choices(texts: list[str]) -> None:
    for index, text in enumerate(texts):
        if len(texts) > 1:
            print(f"--- {index}")
        print_text(text)
