"""Flags of the services that `tokenwire serve` takes and hands on, by the services' own settings.

The only modules of services that this package imports are settings and checks, which need no torch.
"""

import argparse
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from services.engine.settings import EngineSettings
from services.grammar.settings import GrammarSettings
from services.http_shim.settings import HttpShimSettings
from services.jobs.settings import JobsSettings
from services.tokenizer.settings import TokenizerSettings
from tokenwire.flag_parser import FlagParser, unknown_flag

__all__ = [
    "SETTINGS",
    "FlagError",
    "Settings",
    "add_service_flags",
    "engine_arguments",
    "handed_on",
    "split_flags",
]

Settings: TypeAlias = (
    EngineSettings | GrammarSettings | HttpShimSettings | JobsSettings | TokenizerSettings
)

SETTINGS: Mapping[str, type[Settings]] = {
    "http_shim": HttpShimSettings,
    "jobs": JobsSettings,
    "tokenizer": TokenizerSettings,
    "engine": EngineSettings,
    "grammar": GrammarSettings,
}
_OWN_FLAGS = frozenset(
    {
        *("host", "port", "fd", "grace", "log_format", "model", "model_id", "catalog", "dtype"),
        *("engine", "tokenizer", "grammar", "jobs", "keys", "limits_url", "peer_token_file"),
        *("peer_ca", "peer_cert", "peer_key", "tls_cert", "tls_key", "plaintext", "open"),
    }
)
"""Settings that `tokenwire serve` sets itself, so that services find and trust each other"""
_SHIM_FLAGS = frozenset({"metrics_port", "tls_client_ca"})
"""Settings that only the shim gets; other services have their own ports for them"""


class FlagError(Exception):
    """Flag that can't be handed on. The message is one sentence."""


def split_flags(arguments: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the flags that each service gets: those that it has. Raises FlagError."""
    parser, owners = _parser()
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise FlagError(_complaint(unknown[0], parser))
    flags: dict[str, tuple[str, ...]] = dict.fromkeys(SETTINGS, ())
    for name, value in vars(values).items():
        for service in owners[name]:
            flags[service] += (_written(name, value),)
    return flags


def add_service_flags(parser: FlagParser) -> None:
    """Add the flags that `tokenwire serve` hands on; the option `service_flags` collects them."""
    for settings in SETTINGS.values():
        for field in dataclasses.fields(settings):
            flag = _flag(field.name)
            if flag in parser._option_string_actions:
                continue
            if field.name in _OWN_FLAGS:
                parser.hints[flag] = _set_by_serve(flag)
                continue
            is_switch = isinstance(field.default, bool)
            for name in (flag, f"--no-{flag[2:]}") if is_switch else (flag,):
                parser.add_argument(
                    name,
                    dest="service_flags",
                    action=_HandOn,
                    nargs=0 if is_switch else None,
                    default=argparse.SUPPRESS,
                    help=argparse.SUPPRESS,
                )


def handed_on() -> "Mapping[str, tuple[tuple[str, ...], dataclasses.Field[Any]]]":
    """Return the settings that are handed on by name: the services that have each, and its field.

    The field is that of the first of the services.
    """
    _, owners = _parser()
    return {
        name: (tuple(services), SETTINGS[services[0]].__dataclass_fields__[name])
        for name, services in owners.items()
    }


def engine_arguments(text: str) -> tuple[str, ...]:
    """Split additional engine flags as a shell does. Raises FlagError."""
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise FlagError(f"Can't read the engine's arguments: {error}.") from None
    for argument in arguments:
        if argument.partition("=")[0] in {_flag(name) for name in _OWN_FLAGS}:
            raise FlagError(
                f"The engine's arguments can't have {argument}: `tokenwire serve` sets it itself."
            )
    return tuple(arguments)


def _parser() -> "tuple[_Parser, Mapping[str, list[str]]]":
    """Return the parser of the flags that are handed on, and the services that have each."""
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    owners: dict[str, list[str]] = {}
    for service, settings in SETTINGS.items():
        for field in dataclasses.fields(settings):
            if field.name in _OWN_FLAGS or (field.name in _SHIM_FLAGS and service != "http_shim"):
                continue
            if field.name not in owners:
                is_switch = isinstance(field.default, bool)
                action = argparse.BooleanOptionalAction if is_switch else "store"
                parser.add_argument(_flag(field.name), action=action)
            owners.setdefault(field.name, []).append(service)
    return parser, owners


class _HandOn(argparse.Action):
    """Collects flags as they are handed on."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        written = option_string if self.nargs == 0 else f"{option_string}={values}"
        namespace.service_flags = (*namespace.service_flags, written)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(f"{message}.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _written(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return _flag(name) if value else f"--no-{_flag(name)[2:]}"
    return f"{_flag(name)}={value}"


def _complaint(argument: str, parser: argparse.ArgumentParser) -> str:
    flag = argument.partition("=")[0]
    if flag in {_flag(name) for name in _OWN_FLAGS}:
        return _set_by_serve(flag)
    return unknown_flag(flag, list(parser._option_string_actions))


def _set_by_serve(flag: str) -> str:
    return f"{flag} is set by `tokenwire serve` itself: leave it out."
