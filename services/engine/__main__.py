"""Command line: python -m services.engine, or torchrun -m services.engine."""

import sys
from typing import NoReturn

from services.common.process import collector_paused
from services.common.server import main
from services.common.settings import StartupError, parse
from services.engine.application import EngineApplication
from services.engine.frontend.child_process import limit_thread_spinning
from services.engine.ranks.rank import Rank
from services.engine.settings import EngineSettings


def _follow() -> NoReturn:
    settings = parse(EngineSettings, "python -m services.engine", "TOKENWIRE_ENGINE")
    limit_thread_spinning()
    # imported here only: the gRPC process of rank 0 must stay free of torch
    with collector_paused():
        from services.engine.loop.follower_process import run

    run(settings)


if __name__ == "__main__":
    try:
        if not Rank.from_environment().leads:
            _follow()
    except StartupError as error:
        print(f"engine: {error}", file=sys.stderr)
        sys.exit(2)
    main("engine", EngineSettings, EngineApplication)
