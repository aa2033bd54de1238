"""The command `config`: every setting, its value, and where the value comes from."""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenwire.cli.arguments import KEY_VARIABLE, Commands, add_command, add_json
from tokenwire.cli.config_file import CLIENT, ConfigFile, Setting
from tokenwire.cli.output import print_error, print_json
from tokenwire.cli.serve import add_flags
from tokenwire.cli.table import print_table
from tokenwire.flag_parser import FlagParser

__all__ = ["add_commands"]

_HIDDEN = "(not shown)"


def add_commands(commands: Commands, file: ConfigFile) -> None:
    """Add the command."""
    config = add_command(
        commands,
        "config",
        _config,
        "Show every setting, its value, and where it comes from: a flag, a variable, a line of "
        "tokenwire.toml, or the default. Takes the flags of `serve`.",
        "config",
        "config --port 9000 --json",
        "config --config production.toml",
    )
    add_flags(config, file)
    add_json(config)
    config.set_defaults(config_file=file)


@dataclass(frozen=True, slots=True)
class _Shown:
    name: str
    value: str
    source: str


async def _config(options: argparse.Namespace) -> int:
    file: ConfigFile = options.config_file
    rows = [*_of_serve(options, file), *_of_client(file)]
    if options.json:
        settings = {row.name: {"value": row.value, "source": row.source} for row in rows}
        error = {} if file.error is None else {"error": str(file.error)}
        path = None if file.path is None else str(file.path)
        print_json({"file": path, **error, "settings": settings})
    else:
        print(f"file: {file.path or 'none (see docs/running.md)'}\n")
        print_table(
            ("SETTING", "VALUE", "SOURCE"),
            [(row.name, row.value or "-", row.source) for row in rows],
        )
    if file.error is None:
        return 0
    if not options.json:
        print()
    print_error(f"{file.error} Commands that need settings refuse to run until this is mended.")
    return 2


def _of_serve(options: argparse.Namespace, file: ConfigFile) -> Iterator[_Shown]:
    from tokenwire.cli.serve_settings import WHAT_IS_SERVED, serve_settings

    given: Sequence[str] = options.given
    plain = FlagParser(add_help=False)
    add_flags(plain, file)
    model_flags = _given(given, ("--model", "--catalog", "--models"))
    is_named = options.named_model is not None or model_flags is not None
    for each in serve_settings(plain):
        setting, flag = each.setting, _given(given, each.flags)
        if setting.name == "model" and options.named_model is not None:
            yield _Shown("model", options.named_model, "argument MODEL")
        elif flag is not None:
            shown = _value_of_flag(options, setting, given, flag, is_own=each.action is not None)
            yield _Shown(setting.name, _HIDDEN if setting.is_secret else shown, f"flag {flag}")
        elif is_named and setting.name in WHAT_IS_SERVED:
            yield _Shown(setting.name, setting.default, "default")
        else:
            yield from _elsewhere(setting, each.services, file)


def _of_client(file: ConfigFile) -> Iterator[_Shown]:
    for setting in CLIENT:
        yield from _elsewhere(setting, (), file)
    is_set = bool(os.environ.get(KEY_VARIABLE))
    source = f"variable {KEY_VARIABLE}" if is_set else "default"
    yield _Shown("client.api_key", _HIDDEN if is_set else "", source)


def _elsewhere(setting: Setting, services: Sequence[str], file: ConfigFile) -> Iterator[_Shown]:
    """Yield the value that no flag has; one for each service if they differ."""
    found = [_of_variable(setting, variable, file) for variable in setting.variables]
    if len({each.value for each in found}) == 1:
        stated = (each for each in found if each.source != "default")
        yield next(stated, found[0])
        return
    for service, each in zip(services, found, strict=True):
        yield _Shown(f"{setting.name} ({service})", each.value, each.source)


def _of_variable(setting: Setting, variable: str, file: ConfigFile) -> _Shown:
    text = os.environ.get(variable)
    if text is None:
        default = setting.default.lower() if setting.is_switch else setting.default
        return _Shown(setting.name, default, "default")
    entry = file.applied.get(variable)
    source = f"variable {variable}" if entry is None else file.place(entry)
    return _Shown(setting.name, _HIDDEN if setting.is_secret and text else text, source)


def _given(arguments: Sequence[str], flags: Sequence[str]) -> str | None:
    """Return the last of the flags among arguments."""
    names = [argument.partition("=")[0] for argument in arguments]
    return next((name for name in reversed(names) if name in flags), None)


def _value_of_flag(
    options: argparse.Namespace, setting: Setting, given: Sequence[str], flag: str, *, is_own: bool
) -> str:
    if is_own:
        return _written(setting, getattr(options, setting.name))
    if setting.is_switch:
        return "false" if flag.startswith("--no-") else "true"
    written = [each for each in options.service_flags if each.startswith(f"{flag}=")]
    return str(written[-1].partition("=")[2])


def _written(setting: Setting, value: object) -> str:
    """Return the value of a flag as the file and variables have it."""
    if isinstance(value, list):
        return setting.separator.join(value) or "true"
    return str(value).lower() if isinstance(value, bool) else str(value)
