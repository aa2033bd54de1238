"""The command `run`: chat with a model, which a server in the background serves."""

import argparse
import os
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tokenwire.cli.arguments import Commands, add_command
from tokenwire.cli.generation import (
    add_chat_options,
    add_sampling,
    request_options,
    require_chat_packages,
)
from tokenwire.cli.model_argument import MODEL_HELP, add_download, provide_model
from tokenwire.cli.output import print_error, print_text
from tokenwire.cli.progress_line import ProgressLine
from tokenwire.errors import ServiceError

if TYPE_CHECKING:
    from tokenwire.cli.chat.chat_server import ChatServer
    from tokenwire.cli.chat.demand_server import DemandServer
    from tokenwire.serving.running_servers import RunningServer

__all__ = ["add_commands"]


def add_commands(commands: Commands) -> None:
    """Add the command."""
    run = add_command(
        commands,
        "run",
        _run,
        "Chat with a model. If no server has it, one starts in the background and loads it; "
        "`tokenwire ps` shows that server, and `tokenwire stop` ends it.",
        "run smollm2",
        'run smollm2 "What is a mutex?"',
        'run ./model.gguf "Summarise this." < notes.txt',
    )
    run.add_argument("model", metavar="MODEL", help=f"Model: {MODEL_HELP}.")
    run.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="Message to answer; without one, a chat begins. What comes from a pipe or file on "
        "standard input stands before it.",
    )
    run.add_argument("--system", help="System message.")
    add_download(run)
    add_sampling(run, "Most tokens of an answer; by default as many as fit.")
    add_chat_options(run)


async def _run(options: argparse.Namespace) -> int:
    try:
        from tokenwire.cli.chat import interactive  # noqa: F401 - before a server starts
        from tokenwire.cli.chat.chat_server import ModelError
    except ModuleNotFoundError as error:
        return require_chat_packages(error)
    from tokenwire.serving.background_server import BackgroundError

    text = _prompt(options.prompt)
    if text is None and not sys.stdout.isatty():
        print_error("a chat needs a terminal: add a PROMPT, or pipe one in")
        return 2
    try:
        async with _server_of(options) as (server, name, jobs):
            try:
                if text is None:
                    return await _chat(options, server, name, jobs)
                return await _answer(options, server, name, text)
            except ServiceError as error:
                print_error(await server.why_failed(error))
    except (BackgroundError, ModelError, ServiceError) as error:
        print_error(str(error))
    return 1


def _prompt(argument: str | None) -> str | None:
    """Return the message of the argument and of standard input; None = there is neither."""
    if argument == "-":
        return sys.stdin.read()
    if sys.stdin.isatty():
        return argument
    if argument is None:
        return sys.stdin.read()
    mode = os.fstat(sys.stdin.fileno()).st_mode
    given = sys.stdin.read() if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else ""
    return f"{given.rstrip()}\n\n{argument}" if given.strip() else argument


@asynccontextmanager
async def _server_of(
    options: argparse.Namespace,
) -> AsyncIterator[tuple["ChatServer", str, str]]:
    """Yield a server that has the model, the model's name, and the address of its jobs service.

    Raises ModelError, BackgroundError, and the errors of `provide_model`.
    """
    from tokenwire.cli.chat.chat_server import TargetServer
    from tokenwire.cli.chat.demand_server import DemandServer
    from tokenwire.client import Client

    name = options.model
    running = await _running_with(name)
    is_new = running is None
    if running is None:
        name, running = await _served(options)
    if target := running.targets.get(name):
        async with Client(target) as client:
            yield TargetServer(client, target, None), name, running.jobs
        return
    server = DemandServer(running.manager, running.url)
    try:
        if is_new:
            await _until_known(server, name)
        yield server, await server.find(name), running.jobs
    finally:
        await server.aclose()


async def _until_known(server: "DemandServer", name: str) -> None:
    """Wait until the server has a model that it was given. Raises ModelError."""
    from tokenwire.cli.chat.chat_server import ModelError
    from tokenwire.serving.background_server import drop_model

    try:
        await server.until_known(name)
    except ModelError:
        drop_model(name)  # the server would refuse every later catalog for it
        raise


async def _served(options: argparse.Namespace) -> tuple[str, "RunningServer"]:
    """Provide the model's files. Return its name, and a server that has it or gets it."""
    from services.common.model_files.catalog_file import catalog_id
    from services.common.model_files.checkpoint_folder import (
        CheckpointFolderError,
        require_config,
        require_readable,
        served_name,
    )
    from tokenwire.serving.background_server import BackgroundError, serve_in_background

    provided = await provide_model(options.model, may_download=options.download)
    try:
        require_readable(provided.path)
        require_config(provided.path)
    except CheckpointFolderError as error:
        raise BackgroundError(str(error)) from None
    name = provided.model_id or served_name(provided.path)
    if (running := await _running_with(name)) is not None and not running.is_background:
        return name, running
    name = catalog_id(name)
    with ProgressLine() as line:
        return name, await serve_in_background(name, provided.path, line.show)


async def _running_with(name: str) -> "RunningServer | None":
    """Return a server of this user that has the model; one that requires keys is passed over."""
    from tokenwire.cli.chat.chat_server import ModelError
    from tokenwire.cli.chat.demand_server import DemandServer
    from tokenwire.serving.running_servers import running_servers

    for server in running_servers():
        if server.has_keys:
            continue
        if name in server.targets:
            return server
        if server.manager:
            models = DemandServer(server.manager, server.url)
            try:
                await models.find(name)
            except (ModelError, ServiceError):
                continue
            finally:
                await models.aclose()
            return server
    return None


async def _chat(options: argparse.Namespace, server: "ChatServer", name: str, jobs: str) -> int:
    from tokenwire.cli.chat.chat_settings import ChatSettings
    from tokenwire.cli.chat.interactive import open_state, run_chat
    from tokenwire.cli.chat.pdf_reader import PdfReader

    with ProgressLine() as line:
        async with server.lease(name, line.show):
            pass  # the first answer then comes at once
    settings = ChatSettings(request_options(options), options.verbose)
    state = await open_state(server, name, PdfReader(jobs, None, ""), settings)
    state.conversation.system = options.system or ""
    await run_chat(state)
    return 0


async def _answer(options: argparse.Namespace, server: "ChatServer", name: str, text: str) -> int:
    """Answer one message as plain text."""
    from tokenwire.client import Message

    messages = [Message("system", options.system)] if options.system else []
    messages.append(Message("user", text))
    request = request_options(options)
    with ProgressLine() as line:
        async with server.lease(name, line.show) as client:
            line.clear()
            async with client.stream(messages, model=name, **request) as stream:
                async for delta in stream:
                    print_text(delta.text, end="")
    print()
    return 0
