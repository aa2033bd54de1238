"""The command `completion`: scripts that complete commands in a shell."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from tokenwire.cli.arguments import Commands, add_command

__all__ = ["add_commands"]


def add_commands(commands: Commands, parser: argparse.ArgumentParser) -> None:
    """Add the command; its scripts complete the commands of `parser`."""
    completion = add_command(
        commands,
        "completion",
        _completion,
        "Print the script that completes commands in a shell.",
        "completion bash > ~/.local/share/bash-completion/completions/tokenwire",
        'completion zsh > "${fpath[1]}/_tokenwire"',
        "completion fish > ~/.config/fish/completions/tokenwire.fish",
    )
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])
    completion.set_defaults(whole=parser)


async def _completion(options: argparse.Namespace) -> int:
    import shtab

    for action in _actions(options.whole):
        if action.type is Path:
            kind = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
            setattr(action, "complete", kind)  # noqa: B010 - shtab's attribute, unknown to argparse
    print(shtab.complete(options.whole, shell=options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _actions(sub)
