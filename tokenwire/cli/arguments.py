"""Arguments that several commands share: numbers in range, the target, --json."""

import argparse
import os
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from services.common.model_files.keep_alive import parse_keep_alive
from tokenwire.errors import invalid
from tokenwire.flag_parser import FlagParser
from tokenwire.loopback import is_loopback
from tokenwire.tls import ClientTls, TlsError
from tokenwire.token_file import TokenError, TokenFile

if TYPE_CHECKING:
    from tokenwire.client import Client

__all__ = [
    "DEFAULT_TARGET",
    "DEFAULT_URL",
    "KEY_VARIABLE",
    "Command",
    "Commands",
    "add_command",
    "add_json",
    "add_key",
    "add_target",
    "add_tls",
    "add_url",
    "amount_of_memory",
    "connected",
    "keep_alive",
    "key_for",
    "key_of",
    "number",
    "read_text",
    "tls_of",
    "url_of",
    "whole_number",
]

Command: TypeAlias = Callable[[argparse.Namespace], Awaitable[int]]
Commands: TypeAlias = "argparse._SubParsersAction[FlagParser]"
_VARIABLE = "TOKENWIRE_TARGET"
DEFAULT_TARGET = "127.0.0.1:50051"
_URL_VARIABLE = "TOKENWIRE_URL"
DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "TOKENWIRE_API_KEY"
_KEY_FILE_VARIABLE = "TOKENWIRE_KEY_FILE"
_KEY_PREFIX = "tw-"
_KEY_PLACES = (
    f"write the API key to a file and name it with --key-file, or set {KEY_VARIABLE}. The key of "
    "a TLS certificate goes in --tls-key."
)
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_AMOUNT = re.compile(r"([0-9]{1,12})(|KiB|MiB|GiB)")


def add_command(
    commands: Commands, name: str, command: Command, description: str, *examples: str
) -> FlagParser:
    """Add a command with its description and examples; return its parser."""
    lines = "".join(f"\n  tokenwire {example}" for example in examples)
    parser = commands.add_parser(
        name,
        help=description,
        description=description,
        epilog=f"examples:{lines}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=command)
    return parser


def add_target(parser: FlagParser) -> None:
    """Add --target, whose default may come from the environment."""
    parser.add_argument(
        "--target",
        type=_target,
        default=os.environ.get(_VARIABLE) or DEFAULT_TARGET,
        metavar="HOST:PORT",
        help=f"Tokenizer service; the variable {_VARIABLE} sets it too (default: %(default)s).",
    )
    add_tls(parser)
    add_key(parser)


def add_key(parser: FlagParser) -> None:
    """Add --key-file, which a variable of the environment may replace, and --plaintext."""
    parser.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help=f"File with the API key; the variable {KEY_VARIABLE} may hold the key itself.",
    )
    parser.add_argument(
        "--plaintext",
        action="store_true",
        help="Send the API key to another machine without TLS, in clear text.",
    )
    for flag in ("--key", "--api-key"):
        parser.hints[flag] = f"{flag} is no flag: {_KEY_PLACES}"


def connected(options: argparse.Namespace) -> "Client":
    """Return a client of the target. Raises TlsError, and TokenError for an unusable key."""
    from tokenwire.client import Client

    return Client(options.target, tls_of(options), key_of(options), plaintext=options.plaintext)


def key_of(options: argparse.Namespace) -> str:
    """Return the API key of the options or the environment; "" without one. Raises TokenError."""
    if options.key_file is not None:
        return TokenFile(options.key_file).first
    if key := os.environ.get(KEY_VARIABLE, ""):
        return key
    file = os.environ.get(_KEY_FILE_VARIABLE)
    return TokenFile(Path(file)).first if file else ""


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add --url, whose default may come from the environment."""
    parser.add_argument(
        "--url",
        type=url_of,
        default=os.environ.get(_URL_VARIABLE) or DEFAULT_URL,
        help=f"HTTP server; the variable {_URL_VARIABLE} sets it too (default: %(default)s).",
    )


def key_for(url: str, options: argparse.Namespace) -> str:
    """Return the API key for a URL; "" without one.

    Raises TokenError, also if the key would go to another machine in clear text.
    """
    key, parts = key_of(options), urlsplit(url)
    is_safe = options.plaintext or parts.scheme == "https" or is_loopback(parts.hostname or "")
    if key and not is_safe:
        raise TokenError(f"{url} would get the API key in clear text: use https, or --plaintext.")
    return key


def add_tls(parser: argparse.ArgumentParser) -> None:
    """Add --tls-ca, --tls-cert and --tls-key, whose defaults may come from the environment."""
    for flag, meaning in (
        (
            "--tls-ca",
            "Authorities (PEM) that sign the server's certificate; without them, plaintext.",
        ),
        ("--tls-cert", "Certificate (PEM) to show the server."),
        ("--tls-key", "Key of --tls-cert (PEM)."),
    ):
        variable = f"TOKENWIRE_{flag[2:].upper().replace('-', '_')}"
        default = os.environ.get(variable)
        parser.add_argument(
            flag, type=_pem_file, metavar="FILE", default=default, help=f"{meaning} [{variable}]"
        )


def tls_of(options: argparse.Namespace) -> ClientTls | None:
    """Return the certificates of the options; None for plaintext. Raises TlsError."""
    if not options.tls_ca:
        return None
    if bool(options.tls_cert) != bool(options.tls_key):
        raise TlsError("--tls-cert and --tls-key need each other.")
    own = (Path(options.tls_cert), Path(options.tls_key)) if options.tls_cert else (None, None)
    return ClientTls(Path(options.tls_ca), *own)


def add_json(parser: argparse.ArgumentParser, meaning: str = "Print one JSON object.") -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help=meaning)


def number(least: float, most: float) -> Callable[[str], float]:
    """Return the argparse type of a number within bounds."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not least <= value <= most:  # true for NaN, too
            raise argparse.ArgumentTypeError(f"must be between {least:g} and {most:g}, got {text}")
        return value

    return read


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return the argparse type of a whole number within bounds."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be between {least} and {most}, got {text}")
        return value

    return read


def amount_of_memory(text: str) -> int:
    """Read a number of bytes, such as "64MiB", as the argparse type."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 64MiB or 1GiB, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def keep_alive(text: str) -> float:
    """Read the time that a model stays in memory, as the argparse type."""
    try:
        return parse_keep_alive(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_text(argument: str, field: str) -> str:
    """Return an argument, or standard input for "-". Raises ServiceError or UnicodeError."""
    if argument != "-":
        return argument
    try:
        return sys.stdin.read()
    except OSError as error:
        raise invalid(field, f"Standard input can't be read: {error.strerror}.") from None


def _pem_file(text: str) -> str:
    """Return the name of a file. A key in the place of one must not appear in a message."""
    if text.startswith(_KEY_PREFIX):
        raise argparse.ArgumentTypeError(f"this is an API key and no file: {_KEY_PLACES}")
    return text


def _target(text: str) -> str:
    if "://" in text or ":" not in text:
        raise argparse.ArgumentTypeError(f"must be host:port, got {text!r}")
    return text


def url_of(text: str) -> str:
    """Read the URL of an HTTP server, as the argparse type."""
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise argparse.ArgumentTypeError(f"must be an http(s):// URL, got {text!r}")
    return text
