"""Parser of all commands, and the exit codes of their failures."""

import argparse
import asyncio
import os
import sys
from collections.abc import Coroutine, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from services.common.model_files.hub import HubError
from services.common.model_files.model_name import ModelNameError
from tokenwire.cli import (
    batch,
    bench,
    configuration,
    generation,
    health,
    keys,
    local_models,
    pull,
    run,
    serve,
    servers,
    shell_completion,
    text,
    usage,
)
from tokenwire.cli.arguments import tls_of
from tokenwire.cli.config_file import CLIENT, ConfigError, ConfigFile, read_config
from tokenwire.cli.model_argument import DownloadError
from tokenwire.cli.output import discard_output, print_error
from tokenwire.errors import ServiceError
from tokenwire.extras import install_command
from tokenwire.flag_parser import FlagParser
from tokenwire.tls import TlsError
from tokenwire.token_file import TokenError

__all__ = ["main"]

_SIGPIPE_EXIT = 141
"""Exit code in a shell of a command that was ended by SIGPIPE"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit.

    Exit codes: 0 = success; 1 = failure; 2 = wrong arguments, or the command could not start; 130 =
    interrupted; 141 = the reader of the output left.
    """
    try:
        try:
            code = _run(sys.argv[1:] if arguments is None else arguments)
        finally:  # an error of the last write must not wait for the end of the interpreter
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        code = _SIGPIPE_EXIT
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        discard_output()
        place = f"{error.filename}: " if error.filename else "The output can't be written: "
        print_error(f"{place}{os.strerror(error.errno or 0)}.")
        code = 1
    sys.exit(code)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command. Raises ConfigError if it needs a file that is wrong."""
    file, given = read_config(arguments)
    options: argparse.Namespace = _parser(file).parse_args(given)
    options.given = given[1:]
    if file.error is not None and _needs_file(options):
        raise file.error
    return options


def _needs_file(options: argparse.Namespace) -> bool:
    """Return whether a command takes settings of the file, and does not show them itself."""
    flags = (each.name.rpartition(".")[2] for each in CLIENT)
    return any(hasattr(options, flag) for flag in flags) and not hasattr(options, "config_file")


def _run(arguments: Sequence[str]) -> int:
    try:
        options = _parsed(arguments)
    except ModuleNotFoundError as error:  # of a service whose flags the command takes
        return _name_missing(error)
    except ConfigError as error:
        print_error(str(error))
        return 2
    try:
        return asyncio.run(_interruptible(options.command(options)))
    except ServiceError as error:
        print_error(_sentence(options, error))
        return 1
    except DownloadError:
        return 2
    except (TlsError, TokenError, ModelNameError, HubError) as error:
        print_error(str(error))
        return 2
    except UnicodeError as error:  # from an argument, standard input, or the terminal's encoding
        print_error(f"The text can't be read or written: {error}.")
        return 1
    except ModuleNotFoundError as error:
        return _name_missing(error)


def _name_missing(error: ModuleNotFoundError) -> int:
    """Print how a package of an extra is installed. Return the exit code."""
    print_error(f"{error.name} is not installed. A server needs: {install_command('all')}")
    return 2


async def _interruptible(command: Coroutine[Any, Any, int]) -> int:
    """Run a command. Ctrl-C during its last write counts too."""
    code = await command
    await asyncio.sleep(0)  # the interrupt is raised here
    return code


def _sentence(options: argparse.Namespace, error: ServiceError) -> str:
    """Return the message of an error, with the option at fault as the user typed it."""
    from tokenwire.cli.other_service import explain

    name = error.field.rpartition(".")[2].partition("[")[0]
    option = {"images": "image"}.get(name, name)
    if option in _OPTIONS and option in options:
        return f"--{option.replace('_', '-')}: {error.message}"
    return asyncio.run(explain(options.target, error, tls_of(options)))


_OPTIONS = {
    *("max_tokens", "temperature", "top_p", "seed", "n", "stop", "ignore_eos", "model"),
    *("suffix", "system", "image"),
}
"""Options that have the name of the request's field"""


def _parser(file: ConfigFile) -> FlagParser:
    parser = FlagParser(
        prog="tokenwire",
        description="A language-model server and its client.",
        epilog="`tokenwire COMMAND --help` shows the options of a command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('tokenwire')}")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file of settings; by default tokenwire.toml here or of the user.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve.add_commands(commands, file)
    configuration.add_commands(commands, file)
    groups = (
        *(run, servers, pull, local_models, generation, batch, bench),
        *(text, keys, usage, health),
    )
    for group in groups:
        group.add_commands(commands)
    shell_completion.add_commands(commands, parser)
    return parser
