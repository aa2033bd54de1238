"""Settings of `tokenwire serve` and its services: flags, variables, and keys of tokenwire.toml."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.settings import StartupError, read_switch
from tokenwire.cli.config_file import ConfigError, ConfigFile, Setting
from tokenwire.flag_parser import FlagParser
from tokenwire.serving.service_flags import handed_on

__all__ = [
    "WHAT_IS_SERVED",
    "ServeSetting",
    "apply_settings",
    "serve_settings",
    "variable_of",
]

WHAT_IS_SERVED: Mapping[str, Callable[[str], object]] = {
    "model": str,
    "model_id": str,
    "chat_template": Path,
    "catalog": Path,
    "models": lambda text: {"true": [""], "false": None}.get(text, [text]),
}
"""Settings that belong together, with the form that their flags have: one flag replaces all"""
_OTHER_VARIABLES = {"limits_url": "TOKENWIRE_LIMITS_URL"}
"""Variables of `tokenwire serve` that are not named TOKENWIRE_SERVE_<FLAG>"""
_SECRETS = frozenset({"limits_url"})
_MEANINGS: Mapping[object, str] = {int: "must be a whole number", float: "must be a number"}
_NO_SETTINGS = frozenset({"help", "json", "named_model"})


@dataclass(frozen=True, slots=True)
class ServeSetting:
    """A setting, and the flag that has it."""

    setting: Setting
    flags: tuple[str, ...]
    action: argparse.Action | None = None
    """Flag of `tokenwire serve` itself; None = it is handed on to services"""
    services: tuple[str, ...] = ()
    """Services that it is handed on to, in the order of the setting's variables"""


def serve_settings(serve: FlagParser) -> Sequence[ServeSetting]:
    """Return all settings, by name. serve: parser that has the command's own flags alone."""
    own = [_own(action) for action in serve._actions if action.dest not in _NO_SETTINGS]
    names = {each.setting.name for each in own}
    others = []
    for name, (services, field) in handed_on().items():
        if name in names:
            continue
        variables = tuple(f"TOKENWIRE_{service.upper()}_{name.upper()}" for service in services)
        is_switch = isinstance(field.default, bool)
        setting = Setting(name, variables, str(field.default), is_switch)
        flag = f"--{name.replace('_', '-')}"
        flags = (flag, f"--no-{flag[2:]}") if is_switch else (flag,)
        others.append(ServeSetting(setting, flags, services=services))
    return sorted([*own, *others], key=lambda each: each.setting.name)


def apply_settings(file: ConfigFile, settings: Sequence[ServeSetting]) -> None:
    """Set variables to the file's values, and defaults of flags to those of variables.

    Raises ConfigError for a key that is no setting, and a value that a flag can't have.
    """
    file.require_known([each.setting for each in settings])
    file.apply([each.setting for each in settings])
    for each in settings:
        if each.action is not None:
            _set_default(each.action, each.setting, file)


def variable_of(name: str) -> str:
    """Return the variable of a flag of `tokenwire serve` itself."""
    return _OTHER_VARIABLES.get(name, f"TOKENWIRE_SERVE_{name.upper()}")


def _own(action: argparse.Action) -> ServeSetting:
    name = action.dest
    is_list = isinstance(action, argparse._AppendAction)
    setting = Setting(
        name,
        (variable_of(name),),
        "" if action.default is None else str(action.default),
        is_switch=isinstance(action.default, bool),
        may_be_bare=action.nargs == "?" and bool(action.option_strings),
        separator=os.pathsep if is_list else ",",
        is_secret=name in _SECRETS,
    )
    return ServeSetting(setting, tuple(action.option_strings), action)


def _set_default(action: argparse.Action, setting: Setting, file: ConfigFile) -> None:
    (variable,) = setting.variables
    text = os.environ.get(variable)
    if text is None or setting.name in WHAT_IS_SERVED:
        return
    entry = file.applied.get(variable)
    place = variable if entry is None else f"{file.place(entry)}: {setting.name}"
    try:
        if setting.is_switch:
            action.default = read_switch(place, text)
        else:
            action.default = action.type(text) if callable(action.type) else text
    except StartupError as error:
        raise ConfigError(str(error)) from None
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        why = _MEANINGS.get(action.type, str(error))
        raise ConfigError(f"{place} can't be {text!r}: it {why}.") from None
    if action.choices is not None and text not in action.choices:
        names = ", ".join(map(str, action.choices))
        raise ConfigError(f"{place} must be one of {names}, not {text!r}.")
