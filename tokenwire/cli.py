"""Command line `tokenwire`: serve, complete, chat, tokenize, models, keys, health."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc

from tokenwire.errors import ServiceError, invalid

__all__ = ["main"]

_TARGET = "127.0.0.1:50051"
Command = Callable[[argparse.Namespace], Awaitable[int]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit with 0, 1 (failure), 2 (could not start) or 130 (interrupted)."""
    options = _parser().parse_args(arguments)
    command: Command = options.command
    try:
        code = asyncio.run(_run(command, options))
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


async def _run(command: Command, options: argparse.Namespace) -> int:
    try:
        return await command(options)
    except ServiceError as error:
        if error.code is grpc.StatusCode.UNAVAILABLE and error.reason in _NOT_REACHED:
            _print_error(f"No server answers at {options.target} ({error.message}).")
        else:
            _print_error(error.message)
        return 1
    except UnicodeError as error:  # an argument, standard input, or the terminal's encoding
        _print_error(f"The text can't be read or written: {error}.")
        return 1
    except ModuleNotFoundError as error:  # of an extra
        _print_error(f"{error.name} is not installed; `pip install 'tokenwire[all]'` installs it.")
        return 2
    except BrokenPipeError:  # `tokenwire complete … | head`
        sys.stderr.close()
        return 1


_NOT_REACHED = ("UNREACHABLE", "SESSION_LOST")


async def _serve(options: argparse.Namespace) -> int:
    from tokenwire.serving.stack_layout import ServeError, ServeOptions
    from tokenwire.serving.supervisor import supervise

    if options.catalog is not None and (options.model is not None or options.model_id):
        _print_error("--catalog names the models; leave out --model and --model-id.")
        return 2
    try:
        given = {field.name: getattr(options, field.name) for field in fields(ServeOptions)}
        await supervise(ServeOptions(**given))
    except ServeError as error:
        _print_error(str(error))
        return error.exit_code
    return 0


async def _complete(options: argparse.Namespace) -> int:
    from tokenwire.client import Client
    from tokenwire.requests import with_image_marks

    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    request = _request_options(options, "suffix")
    if images := _read_images(options):
        request["images"] = images
        prompt = with_image_marks(prompt, len(images))
    async with Client(options.target) as client:
        if not options.stream:
            completion = await client.complete(prompt, **request)
            _print_choices([choice.text for choice in completion.choices])
            return 0
        async with client.stream(prompt, **request) as stream:
            async for delta in stream:
                print(delta.text, end="", flush=True)
        print()
    return 0


async def _chat(options: argparse.Namespace) -> int:
    from tokenwire.client import Client, Message

    text = sys.stdin.read() if options.message == "-" else options.message
    messages = [Message("user", text, images=_read_images(options))]
    if options.system is not None:
        messages.insert(0, Message("system", options.system))
    request = _request_options(options)
    async with Client(options.target) as client:
        if not options.stream:
            answer = await client.chat(messages, **request)
            _print_choices([choice.message.content or "" for choice in answer.choices])
            return 0
        async with client.stream_chat(messages, **request) as stream:
            async for delta in stream:
                print(delta.content, end="", flush=True)
        print()
    return 0


def _request_options(options: argparse.Namespace, *names: str) -> Any:
    """Return the request options that the command line sets, `names` among them."""
    shared = ("max_tokens", "temperature", "top_p", "seed", "n", "stop", "ignore_eos", "model")
    given = {name: getattr(options, name) for name in (*shared, *names)}
    return {name: value for name, value in given.items() if value is not None}


def _read_images(options: argparse.Namespace) -> list[bytes]:
    """Return the contents of the image files. Raises ServiceError."""
    images = []
    for path in options.image or ():
        try:
            images.append(path.read_bytes())
        except OSError as error:
            raise invalid("images", f"{path} can't be read: {error.strerror}.") from None
    return images


def _print_choices(texts: Sequence[str]) -> None:
    for index, text in enumerate(texts):
        if len(texts) > 1:
            print(f"--- {index}")
        print(text)


async def _tokenize(options: argparse.Namespace) -> int:
    from tokenwire.client import Client

    text = sys.stdin.read() if options.text == "-" else options.text
    async with Client(options.target) as client:
        encoding = await client.encode(text)
    for identity, token in zip(encoding.ids, encoding.tokens, strict=True):
        print(f"{identity}\t{token}")
    return 0


async def _models(options: argparse.Namespace) -> int:
    from tokenwire.client import Client

    async with Client(options.target) as client:
        for model in await client.models():
            can = [name for name in ("infill", "grammar", "chat") if getattr(model, name)]
            print(f"{model.id}\tcontext {model.context_length}\t{' '.join(can)}")
    return 0


async def _keys(options: argparse.Namespace) -> int:
    from tokenwire.serving.key_file import KeyFileError

    try:
        options.action(options)
    except KeyFileError as error:
        _print_error(str(error))
        return 1
    return 0


def _add_key(options: argparse.Namespace) -> None:
    from tokenwire.serving.key_file import add_key

    print(add_key(options.file, options.tier, options.name))
    print("tokenwire: store this key now; it is not shown again", file=sys.stderr)


def _list_keys(options: argparse.Namespace) -> None:
    from tokenwire.serving.key_file import read_keys

    for key in read_keys(options.file).keys:
        state = "active" if key.revoked is None else f"revoked {_day(key.revoked)}"
        print(f"{key.id}\t{key.tier}\t{_day(key.created)}\t{state}\t{key.name}")


def _revoke_key(options: argparse.Namespace) -> None:
    from tokenwire.serving.key_file import key_id, revoke_key

    key = revoke_key(options.file, key_id(options.key))
    print(f"{key.id} is revoked")


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


async def _health(options: argparse.Namespace) -> int:
    from tokenwire.serving.health import is_ready, is_serving

    probe: Any = is_ready if options.target.startswith("http://") else is_serving
    try:
        healthy = await probe(options.target)
    except ValueError as error:
        _print_error(f"{options.target} is not a valid target: {error}.")
        return 1
    print("serving" if healthy else "not serving")
    return 0 if healthy else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenwire", description="A language-model server and its client.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=version("tokenwire"))
    add = partial(_add, parser.add_subparsers(metavar="COMMAND", required=True))

    _add_serve(add("serve", _serve, "Start the services and run them until Ctrl-C."))

    complete = add("complete", _complete, "Complete a prompt.")
    complete.add_argument("prompt", help="The prompt; - reads standard input.")
    complete.add_argument("--suffix", help="Text after the gap to fill (infill).")
    _add_generation(
        complete,
        "Most tokens to generate; the server's default is 16.",
        "Image for an <image> of the prompt; repeatable. A prompt without any gets them in front.",
    )

    chat = add("chat", _chat, "Answer a message.")
    chat.add_argument("message", help="The message; - reads standard input.")
    chat.add_argument("--system", help="System message.")
    _add_generation(
        chat,
        "Most tokens to generate; by default as many as fit.",
        "Image before the message; repeatable.",
    )

    tokenize = add("tokenize", _tokenize, "Print the token ids of a text, one per line.")
    tokenize.add_argument("text", help="The text; - reads standard input.")

    models = add("models", _models, "List the served models.")
    for sub in (complete, chat, tokenize, models):
        sub.add_argument("--target", default=_TARGET, help="host:port of the tokenizer service.")

    _add_keys(add("keys", _keys, "Make, list and revoke API keys."))

    health = add("health", _health, "Exit with 0 if a service is ready, else with 1.")
    health.add_argument("target", help="host:port of a gRPC service, or an http:// URL.")
    return parser


def _add_generation(command: argparse.ArgumentParser, max_tokens: str, images: str) -> None:
    one = command.add_mutually_exclusive_group()
    one.add_argument("--stream", action="store_true", help="Print text as it is generated.")
    one.add_argument("--n", type=int, help="Number of choices.")
    command.add_argument("--max-tokens", type=int, help=max_tokens)
    command.add_argument("--temperature", type=float, help="0 = always the most likely token.")
    command.add_argument("--top-p", type=float, help="Nucleus mass.")
    command.add_argument("--seed", type=int, help="The same seed gives the same tokens.")
    command.add_argument("--stop", action="append", help="Stop string; repeatable.")
    command.add_argument(
        "--ignore-eos",
        action="store_true",
        default=None,
        help="Continue past the end of sequence, up to --max-tokens.",
    )
    command.add_argument(
        "--image",
        type=Path,
        action="append",
        metavar="FILE",
        help=images,
    )
    command.add_argument("--model", help="Model id; required if several models are served.")


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    command: Command,
    description: str,
) -> argparse.ArgumentParser:
    sub = commands.add_parser(
        name,
        help=description,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    sub.set_defaults(command=command)
    return sub


def _add_keys(keys: argparse.ArgumentParser) -> None:
    add = partial(_add, keys.add_subparsers(metavar="ACTION", required=True))
    new = add("add", _keys, "Make a key and print it once; create the file if it is missing.")
    new.add_argument("--tier", default="default", help="One of the file's tiers.")
    new.add_argument("--name", default="", help="Owner, shown by `list`.")
    listing = add("list", _keys, "Print id, tier, creation date, state and name of each key.")
    revoke = add("revoke", _keys, "Revoke a key; servers notice within a second.")
    revoke.add_argument("key", help="Id of the key, or the key itself.")
    for sub, action in ((new, _add_key), (listing, _list_keys), (revoke, _revoke_key)):
        sub.add_argument("--file", type=Path, default=Path("keys.json"), help="The keys file.")
        sub.set_defaults(action=action)


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--host", default="127.0.0.1", help="Address that HTTP, tokenizer and engine listen on."
    )
    serve.add_argument("--port", type=int, default=8000, help="HTTP port.")
    serve.add_argument(
        "--model", type=Path, help="Directory of a checkpoint; default: the embedded one."
    )
    serve.add_argument(
        "--model-id", default="", help="Name to serve the model under; empty = the directory's."
    )
    serve.add_argument(
        "--catalog", type=Path, help="TOML file of models to serve instead; SIGHUP reloads it."
    )
    serve.add_argument("--keys", type=Path, help="File of API keys; default: no keys required.")
    serve.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16.")
    serve.add_argument("--tokenizer-port", type=int, default=50051, help="gRPC port, text level.")
    serve.add_argument("--engine-port", type=int, default=50052, help="gRPC port, token level.")
    serve.add_argument("--grammar-port", type=int, default=50053, help="gRPC port, loopback only.")
    serve.add_argument("--engine-args", default="", help="Additional engine flags, in one string.")
    serve.add_argument(
        "--open", action="store_true", help="Allow a host beyond loopback without keys."
    )
    serve.add_argument(
        "--cors-origins",
        default="",
        help="Origins whose web pages may use the API, separated by commas; * = all.",
    )
    serve.add_argument(
        "--allowed-hosts",
        default="",
        help="Host names that HTTP requests may use besides those of loopback; * = any.",
    )
    serve.add_argument(
        "--grace", type=float, default=30.0, help="Seconds that running requests get at shutdown."
    )
    serve.add_argument("--log-dir", type=Path, help="Directory of a log file per service.")


def _print_error(message: str) -> None:
    print(f"tokenwire: {message}", file=sys.stderr)
