"""Command line: python -m services.engine, or torchrun -m services.engine."""

import sys

from services.common.server import main
from services.common.settings import StartupError, parse
from services.engine.application import EngineApplication
from services.engine.frontend.child_process import limit_thread_spinning
from services.engine.ranks.rank import Rank
from services.engine.settings import EngineSettings


def _follow() -> None:
    settings = parse(EngineSettings, "python -m services.engine", "TOKENWIRE_ENGINE")
    limit_thread_spinning()
    # imported here only: the gRPC process of rank 0 must stay free of torch
    from services.engine.loop.follower_process import run

    run(settings)


if __name__ == "__main__":
    try:
        leads = Rank.from_environment().leads
    except StartupError as error:
        print(f"engine: {error}", file=sys.stderr)
        sys.exit(2)
    if leads:
        main("engine", EngineSettings, EngineApplication)
    else:
        _follow()
