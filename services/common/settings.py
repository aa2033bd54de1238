"""Settings of a service: a frozen dataclass whose fields are flags and environment variables.

    @dataclass(frozen=True, kw_only=True)
    class EngineSettings(ServerSettings):
        model: Path = setting("models/x", "Directory of the checkpoint.")

`parse` turns it into a command line: the field `kv_memory` is the flag --kv-memory and, for the
prefix TOKENWIRE_ENGINE, the variable TOKENWIRE_ENGINE_KV_MEMORY. The flag wins over the variable.
"""

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "ServerSettings",
    "StartupError",
    "StreamSettings",
    "parse",
    "require_directory",
    "setting",
]

S = TypeVar("S")


class StartupError(Exception):
    """A service can't start. The message is one sentence for the person who started it."""


def setting(default: Any, meaning: str, *, choices: Sequence[str] = ()) -> Any:
    """A field of a settings dataclass."""
    return dataclasses.field(
        default=default, metadata={"help": meaning, "choices": tuple(choices) or None}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What every service that speaks gRPC can be told."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(0, "Port of the gRPC server; 0 = any free one.")
    metrics_port: int = setting(0, "Port of /metrics; 0 = the gRPC port + 1000, -1 = none.")
    grace: float = setting(30.0, "Seconds that running requests get after SIGTERM.")
    log_level: str = setting(
        "info", "Least severe log lines.", choices=("debug", "info", "warning", "error")
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamSettings(ServerSettings):
    """What every service that streams to clients can be told besides."""

    heartbeat_seconds: float = setting(
        10.0, "Seconds of silence after which a stream says that it is alive."
    )
    stall_seconds: float = setting(
        30.0, "Seconds without being read, or without credit, after which a client is cut."
    )

    def __post_init__(self) -> None:
        if not (self.heartbeat_seconds > 0 and self.stall_seconds > 0):
            raise StartupError("--heartbeat-seconds and --stall-seconds must be above 0.")


def parse(settings: type[S], prog: str, prefix: str, arguments: Sequence[str] | None = None) -> S:
    """Read flags and environment; exits with 2 and one sentence on bad input."""
    hints = typing.get_type_hints(settings)
    parser = argparse.ArgumentParser(
        prog=prog,
        description=(settings.__doc__ or "").strip(),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for field in dataclasses.fields(typing.cast(Any, settings)):
        flag, variable = "--" + field.name.replace("_", "-"), f"{prefix}_{field.name.upper()}"
        kind, default = _base_type(hints[field.name]), field.default
        meaning = f"{field.metadata['help']} [{variable}]"
        if kind is bool:
            if variable in os.environ:
                default = _boolean(variable, os.environ[variable])
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=default, help=meaning
            )
            continue
        # argparse converts and checks string defaults like arguments
        default = os.environ.get(variable, default)
        parser.add_argument(
            flag, type=kind, default=default, help=meaning, choices=field.metadata["choices"]
        )
    values = vars(parser.parse_args(arguments))
    for field in dataclasses.fields(typing.cast(Any, settings)):
        choices = field.metadata["choices"]
        if choices and values[field.name] not in choices:
            parser.error(f"--{field.name}: {values[field.name]!r} is none of {', '.join(choices)}")
    return settings(**values)


def _base_type(hint: Any) -> Any:
    """int for `int | None`."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _boolean(variable: str, text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    raise StartupError(f"{variable} must be true or false, not {text!r}.")


def require_directory(path: Path, what: str) -> Path:
    """The path, if it is a directory; StartupError otherwise."""
    if not path.is_dir():
        raise StartupError(f"{what} {path} is not a directory.")
    return path
