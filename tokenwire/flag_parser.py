"""Parser of flags and commands that names the nearest valid ones for those that don't exist."""

import argparse
import difflib
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

__all__ = ["FlagParser", "nearest", "suggestion", "unknown_flag"]

_MOST_NAMES = 3
_LEAST_LIKENESS = 0.7


class FlagParser(argparse.ArgumentParser):
    """argparse's parser with sentences for unknown flags and commands.

    A complaint is the usage of the command at fault and one sentence, and the process ends with 2.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(*arguments, **options)
        self.hints: dict[str, str] = {}
        """Sentences about flags that people try but that do not exist, by flag"""
        self.add_further: Callable[[FlagParser], None] | None = None
        """Function that adds flags before arguments are read: their definition takes time"""

    def parse_known_args(  # type: ignore[override]  # typeshed's overloads differ in `namespace`
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse arguments; leave none over."""
        given = sys.argv[1:] if args is None else list(args)
        self.complete()
        if (flag := self._unknown_flag(given)) is not None:
            self.error(self._complaint(flag))
        found, rest = super().parse_known_args(given, namespace)
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return found, []

    def complete(self) -> None:
        """Add the further flags, once."""
        if (add := self.add_further) is not None:
            self.add_further = None
            add(self)

    def error(self, message: str) -> NoReturn:
        """Print the usage and one sentence, and end the process with exit code 2."""
        end = "" if message.endswith(("?", ".")) else "."
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}{end}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(each) for each in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            self.error(
                f"there is no command {value!r}.{suggestion(str(value), names)} "
                f"The commands are {', '.join(names)}"
            )
        complaint = f"must be one of {', '.join(names)}, got {value!r}."
        raise argparse.ArgumentError(action, complaint + suggestion(str(value), names))

    @property
    def _has_commands(self) -> bool:
        return any(isinstance(each, argparse._SubParsersAction) for each in self._actions)

    def _unknown_flag(self, arguments: Sequence[str]) -> str | None:
        """Return the first flag that this parser does not have, before the name of a command."""
        for argument in arguments:
            is_flag = argument.startswith("--") and " " not in argument
            if argument == "--" or (self._has_commands and not argument.startswith("-")):
                return None
            if is_flag and argument.partition("=")[0] not in self._option_string_actions:
                return argument.partition("=")[0]
        return None

    def _complaint(self, flag: str) -> str:
        if flag in self.hints:
            return self.hints[flag]
        known = [each for each in self._option_string_actions if each.startswith("--")]
        place = " Flags of a command follow its name." if self._has_commands else ""
        return unknown_flag(flag, known) + place


def unknown_flag(flag: str, known: Collection[str]) -> str:
    """Return the sentence about a flag that `known` does not have."""
    return f"unknown flag {flag}.{suggestion(flag, known) or ' See --help.'}"


def suggestion(name: str, known: Collection[str]) -> str:
    """Return a question that names the nearest valid names, after a space; empty if none is."""
    near = nearest(name, known)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def nearest(name: str, known: Collection[str]) -> Sequence[str]:
    """Return the valid names that are likely meant, the likeliest first."""
    by_word = {each.lstrip("-"): each for each in known if not _is_negation(each) or "no-" in name}
    word = name.lstrip("-")
    prefixed = sorted(each for each in by_word if len(word) > 1 and each.startswith(word))
    close = difflib.get_close_matches(word, by_word, _MOST_NAMES, _LEAST_LIKENESS)
    return [by_word[each] for each in dict.fromkeys([*prefixed, *close])][:_MOST_NAMES]


def _is_negation(flag: str) -> bool:
    return flag.startswith("--no-")
