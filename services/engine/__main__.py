"""Command line: python -m services.engine, or torchrun -m services.engine."""

import sys
from functools import partial
from typing import NoReturn

from services.common.process import collector_paused, open_standard_files, raise_file_limit
from services.common.settings import StartupError, parse, print_startup_error
from services.engine.frontend.child_process import Child, limit_thread_spinning
from services.engine.frontend.loop_client import spawn_loop
from services.engine.ranks.rank import Rank
from services.engine.settings import EngineSettings


def _follow(settings: EngineSettings) -> NoReturn:
    limit_thread_spinning()
    # imported only here, because the gRPC process of rank 0 must stay free of torch
    with collector_paused():
        from services.engine.loop.follower_process import run

    run(settings)


def _lead(settings: EngineSettings, loop: Child) -> None:
    # imported only here, because the loop process imports this module and needs no gRPC server
    from services.common.server import run
    from services.engine.application import EngineApplication

    run("engine", settings, partial(EngineApplication, loop), loop.link)


if __name__ == "__main__":
    open_standard_files()
    try:
        settings = parse(EngineSettings, "python -m services.engine", "TOKENWIRE_ENGINE")
        leads = Rank.from_environment().leads
        if leads:
            raise_file_limit()  # the loop process inherits the limit
            loop = spawn_loop()  # at first, because importing torch is the longest part
    except StartupError as error:
        print_startup_error("engine", error)
        sys.exit(2)
    _lead(settings, loop) if leads else _follow(settings)
