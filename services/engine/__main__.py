"""Command line: python -m services.engine, or torchrun -m services.engine."""

import sys
from functools import partial
from typing import NoReturn

from services.common.process import collector_paused, open_standard_files, raise_file_limit
from services.common.settings import StartupError, parse, print_startup_error
from services.common.standby import STANDBY, awaited_arguments
from services.engine.deferred_modules import defer_torch_modules
from services.engine.frontend.child_process import Child, limit_thread_spinning
from services.engine.frontend.loop_client import spawn_loop
from services.engine.ranks.rank import Rank
from services.engine.settings import EngineSettings

_PROGRAM, _PREFIX = "python -m services.engine", "TOKENWIRE_ENGINE"


def _follow(settings: EngineSettings) -> NoReturn:
    limit_thread_spinning()
    defer_torch_modules()
    # imported only here, because the gRPC process of rank 0 must stay free of torch
    with collector_paused():
        from services.engine.loop.follower_process import run

    run(settings)


def _lead(settings: EngineSettings, loop: Child) -> None:
    # imported only here, because the loop process imports this module and needs no gRPC server
    with collector_paused():
        from services.common.server import run
        from services.engine.application import EngineApplication

    run("engine", settings, partial(EngineApplication, loop), loop.link)


def _start_as_spare() -> None:
    """Import everything, and start the loop process, before the arguments come."""
    raise_file_limit()
    loop = spawn_loop()
    with collector_paused():
        import services.common.server
        import services.engine.application  # noqa: F401

    settings = parse(EngineSettings, _PROGRAM, _PREFIX, awaited_arguments())
    _lead(settings, loop)


def _start() -> None:
    settings = parse(EngineSettings, _PROGRAM, _PREFIX)
    if not Rank.from_environment().leads:
        _follow(settings)
    raise_file_limit()  # the loop process inherits the limit
    _lead(settings, spawn_loop())  # at first, because importing torch is the longest part


if __name__ == "__main__":
    open_standard_files()
    try:
        _start_as_spare() if sys.argv[1:] == [STANDBY] else _start()
    except StartupError as error:
        print_startup_error("engine", error)
        sys.exit(2)
