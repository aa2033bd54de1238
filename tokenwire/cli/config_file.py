"""tokenwire.toml: a file for what flags say. Flags and variables take precedence over it.

    model = "smollm2"            # flags of `tokenwire serve`, without the dashes in front
    kv_memory = "4GiB"

    [client]                     # flags of the commands that call a server
    target = "10.0.0.7:50051"

The values become variables of the environment, which the commands and the services read.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenwire.cli.arguments import DEFAULT_TARGET, DEFAULT_URL
from tokenwire.flag_parser import suggestion
from tokenwire.user_folder import user_folder

__all__ = ["CLIENT", "ConfigError", "ConfigFile", "Entry", "Setting", "read_config"]

_VARIABLE = "TOKENWIRE_CONFIG"
_NAME = "tokenwire.toml"
_FLAG = "--config"
_CLIENT = "client"


class ConfigError(Exception):
    """The file can't be used. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that flags, variables and the file may have."""

    name: str
    """Key in the file, with client. in front for one of the table `client`"""
    variables: tuple[str, ...]
    """Variables that hold it: one, or one for each service that has it"""
    default: str = ""
    is_switch: bool = False
    may_be_bare: bool = False
    """True for a flag that may stand without a value, which is `true` in the file"""
    separator: str = ","
    """Text between the items of a list"""
    is_secret: bool = False
    """True for a value that is not shown"""


CLIENT = tuple(
    Setting(f"{_CLIENT}.{name}", (f"TOKENWIRE_{name.upper()}",), default)
    for name, default in (
        ("target", DEFAULT_TARGET),
        ("url", DEFAULT_URL),
        ("jobs", ""),
        ("key_file", ""),
        ("tls_ca", ""),
        ("tls_cert", ""),
        ("tls_key", ""),
    )
)
"""Settings of the commands that call a server"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value in the file."""

    value: Any
    line: int


@dataclass(slots=True)
class ConfigFile:
    """The file's content, and the variables that have its values."""

    path: Path | None
    """None = there is no file"""
    entries: Mapping[str, Entry] = field(default_factory=dict)
    applied: dict[str, Entry] = field(default_factory=dict)
    """Entries by the variable that has the value"""
    error: ConfigError | None = None
    """Why the file can't be used; a command that needs no settings works all the same"""

    def apply(self, settings: Iterable[Setting]) -> None:
        """Set the variables that the environment does not have. Raises ConfigError."""
        for setting in settings:
            entry = self.entries.get(setting.name)
            if entry is None:
                continue
            text = self._text(setting, entry)
            for variable in setting.variables:
                if variable not in os.environ:
                    os.environ[variable] = text
                    self.applied[variable] = entry

    def require_known(self, settings: Iterable[Setting], table: str = "") -> None:
        """Raise ConfigError for a key of a table that is no setting. table: "" = the top."""
        known = [setting.name for setting in settings]
        for name, entry in self.entries.items():
            if name.rpartition(".")[0] == table and name not in known:
                near = suggestion(name, known) or " `tokenwire config` lists all settings."
                raise ConfigError(f"{self.place(entry)}: there is no setting {name}.{near}")

    def place(self, entry: Entry) -> str:
        """Return file and line of an entry."""
        return f"{self.path}:{entry.line}"

    def _text(self, setting: Setting, entry: Entry) -> str:
        """Return the value as a variable has it."""
        value = entry.value
        if setting.is_switch != isinstance(value, bool) and not setting.may_be_bare:
            wanted = "true or false" if setting.is_switch else "a text or a number"
            raise ConfigError(f"{self.place(entry)}: {setting.name} must be {wanted}.")
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return setting.separator.join(value)
        if isinstance(value, str | int | float):
            return str(value)
        raise ConfigError(f"{self.place(entry)}: {setting.name} must be a text or a number.")


def read_config(arguments: Sequence[str]) -> tuple[ConfigFile, list[str]]:
    """Return the file that applies, and the arguments without --config.

    The table `client` is applied already. Raises ConfigError for --config without a file's name.
    """
    named, others = _taken(arguments)
    file = ConfigFile(_find(named))
    try:
        if file.path is not None:
            file.entries = _entries(file.path)
        file.require_known(CLIENT, _CLIENT)
        file.apply(CLIENT)
    except ConfigError as error:
        file.error = error
    return file, others


def _taken(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of --config, and the other arguments."""
    named: str | None = None
    others: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return named, [*others, argument, *rest]
        if argument == _FLAG:
            if not rest:
                raise ConfigError(f"{_FLAG} needs the name of a file.")
            named = rest.pop(0)
        elif argument.startswith(f"{_FLAG}="):
            named = argument.partition("=")[2]
        else:
            others.append(argument)
    return named, others


def _find(named: str | None) -> Path | None:
    """Return the file: that of --config, of the variable, here, or the user's. Empty = none."""
    stated = os.environ.get(_VARIABLE) if named is None else named
    if stated is not None:
        return Path(stated).expanduser() if stated else None
    places = (Path(_NAME).absolute(), user_folder("XDG_CONFIG_HOME", ".config") / _NAME)
    return next((place for place in places if place.is_file()), None)


def _entries(path: Path) -> dict[str, Entry]:
    try:
        data = path.read_bytes()
        text = data.decode()
        content = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: the text is not UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_complaint(path, text, str(error))) from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply.") from None
    entries = {}
    client = content.pop(_CLIENT, {})
    if not isinstance(client, dict):
        raise ConfigError(f"{path}: {_CLIENT} must be a table: [{_CLIENT}].")
    for prefix, table in (("", content), (f"{_CLIENT}.", client)):
        for key, value in table.items():
            if isinstance(value, dict):
                raise ConfigError(
                    f"{path}: there is no table [{key}]. The only one is [{_CLIENT}]."
                )
            name = f"{prefix}{key.replace('-', '_')}"
            entries[name] = Entry(value, _line(text, key, within=bool(prefix)))
    return entries


def _complaint(path: Path, text: str, why: str) -> str:
    """Return the parser's complaint with the place in front. why: it ends with the place."""
    match = re.fullmatch(
        r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", why, re.DOTALL
    )
    if match is None:
        return f"{path} is wrong: {why.rstrip('.')}."
    lines = text.splitlines()
    line = match[2] or len(lines)
    column = match[3] or len(lines[-1]) + 1
    return f"{path}:{line}:{column}: this is no TOML: {match[1]}."


def _line(text: str, key: str, *, within: bool) -> int:
    """Return the number of the line that sets a key. within: whether that is in [client]."""
    pattern = re.compile(rf"""\s*["']?{re.escape(key)}["']?\s*=""")
    is_within = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("["):
            is_within = line.strip().startswith(f"[{_CLIENT}]")
        elif pattern.match(line) and is_within == within:
            return number
    return 1
