"""Launch of a service's process, whose output comes through a pipe or a terminal."""

import asyncio
import os
import signal
import sys
import tty
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.hangup import block_hangup
from tokenwire.serving.serve_options import ServeError

__all__ = ["LaunchedProcess", "launch"]


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """A process, and the descriptor from which its output is read."""

    process: asyncio.subprocess.Process
    source: int


async def launch(
    name: str,
    arguments: Sequence[str],
    *,
    is_seen: bool,
    fds: Sequence[int] = (),
    environment: Sequence[tuple[str, str]] = (),
    has_input: bool = False,
) -> LaunchedProcess:
    """Start `python -m services.NAME ARGUMENTS`. Raises ServeError.

    is_seen: whether its output is a terminal: it then shows its progress. fds: descriptors that it
    inherits. environment: variables besides those of this process. has_input: whether it gets
    standard input.
    """
    source, output = os.openpty() if is_seen else os.pipe()
    if is_seen:
        tty.setraw(output)  # the terminal behind the supervisor is the one that ends lines
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", f"services.{name}", *arguments,
            stdin=asyncio.subprocess.PIPE if has_input else asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=fds,
            env=os.environ | dict(environment),
            process_group=0,  # Ctrl-C reaches only the supervisor, which stops them in order
            preexec_fn=_prepare_child,
        )  # fmt: skip
    except OSError as error:
        os.close(source)
        raise ServeError(f"The service {name} can't be started: {error.strerror}.") from None
    except BaseException:
        os.close(source)
        raise
    finally:
        os.close(output)
    return LaunchedProcess(process, source)


def _prepare_child() -> None:
    """Hold SIGHUP back; let the kernel send SIGTERM when the supervisor ends (Linux)."""
    block_hangup()
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
