"""Settings of a chat: the values of /set."""

import argparse
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenwire.cli.arguments import number, whole_number
from tokenwire.flag_parser import suggestion

__all__ = ["NAMES", "ChatSettings", "SettingError"]


class SettingError(Exception):
    """Name or value that /set does not have. The message is one sentence."""


def _stops(text: str) -> list[str]:
    try:
        found = shlex.split(text)
    except ValueError:
        raise argparse.ArgumentTypeError("has a quote that is not closed") from None
    return [each.replace("\\n", "\n").replace("\\t", "\t") for each in found]


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"must be {' or '.join(choices)}, got {text}")
        return text

    return read


_TRUTHS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


def _switch(text: str) -> bool:
    if text not in _TRUTHS:
        raise argparse.ArgumentTypeError(f"must be on or off, got {text}")
    return _TRUTHS[text]


_REQUEST: Mapping[str, Callable[[str], Any]] = {
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": whole_number(-1, 128),
    "min_p": number(0, 1),
    "max_tokens": whole_number(1, 2**32 - 1),
    "seed": whole_number(-(2**63), 2**63 - 1),
    "stop": _stops,
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(0, 2),
    "reasoning_effort": _one_of("none", "minimal", "low", "medium", "high"),
}
"""Types of the values that requests take"""
_SCREEN: Mapping[str, Callable[[str], Any]] = {
    "verbose": _switch,
    "reasoning": _one_of("fold", "show"),
}
"""Types of the values that change what the terminal shows"""
NAMES = (*_REQUEST, *_SCREEN)
_UNSET = "default"


@dataclass(slots=True)
class ChatSettings:
    """Values of /set; an absent one is the server's default."""

    request: dict[str, Any] = field(default_factory=dict)
    """Options of requests by name"""
    verbose: bool = False
    """Show tokens and speed of each answer"""
    reasoning: str = "fold"
    """fold = one row stays of reasoning; show = all of it stays"""

    def set(self, name: str, text: str) -> None:
        """Change a value; "default" takes it back. Raises SettingError."""
        name = name.replace("-", "_")
        if name not in NAMES:
            hint = suggestion(name, NAMES) or f" The names are {', '.join(NAMES)}."
            raise SettingError(f"There is no setting {name}.{hint}")
        if name in _REQUEST and text == _UNSET:
            self.request.pop(name, None)
            return
        try:
            value = (_REQUEST.get(name) or _SCREEN[name])(text)
        except argparse.ArgumentTypeError as error:
            raise SettingError(f"{name} {error}.") from None
        if name in _REQUEST:
            self.request[name] = value
        else:
            setattr(self, name, value)

    def shown(self) -> list[tuple[str, str]]:
        """Return the names and their values as texts."""
        rows = [(name, _shown(self.request.get(name))) for name in _REQUEST]
        screen = [("verbose", "on" if self.verbose else "off"), ("reasoning", self.reasoning)]
        return [*rows, *screen]


def _shown(value: Any) -> str:
    if value is None:
        return "default"
    if isinstance(value, list):
        return " ".join(shlex.quote(each.replace("\n", "\\n")) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
