"""A rank of a tensor-parallel engine other than the first: computes along, and serves nobody."""

import logging
import os
import signal
import sys
from typing import NoReturn

from services.common import logging as service_logging
from services.common.settings import StartupError
from services.engine.execution.loaded_model import load
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.lockstep import follow
from services.engine.settings import EngineSettings

__all__ = ["run"]

_LOG = logging.getLogger("worker")


def run(settings: EngineSettings) -> NoReturn:
    """The life of the process: 0 once rank 0 disbands the team, 1 if a rank is lost, 2 if it
    could not start.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback
    service_logging.configure("engine", "warning")  # the rest rank 0 says for all
    try:
        model = load(settings)
    except (CheckpointError, StartupError) as error:
        print(f"engine: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when to stop
    model.team.watch()
    try:
        follow(model.decoder, model.cache, model.team)
    except Exception:
        model.team.look_around()
        _LOG.exception("a step failed")
        os._exit(1)
    os._exit(0)  # skips torch's slow teardown; nothing is left to save
