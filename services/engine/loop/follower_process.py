"""Process of a rank other than 0 in a tensor-parallel engine: it computes, and serves no client."""

import logging
import os
import signal
import sys
from functools import partial
from typing import NoReturn

from services.common import logging as service_logging
from services.common.model_files.checkpoint import opened
from services.common.process import end_process
from services.common.settings import StartupError
from services.engine.execution.adapter_files import convert_adapter
from services.engine.execution.loaded_model import LoadedModel, load
from services.engine.execution.model_runner import GraphExtent
from services.engine.execution.step_graphs import StepGraphs
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.lockstep import Follower
from services.engine.settings import EngineSettings

__all__ = ["run"]

_LOG = logging.getLogger("follower")


def run(settings: EngineSettings) -> NoReturn:
    """Compute the steps of rank 0 until it dissolves the group.

    Then exit with 0; exit with 1 if a rank is lost or a step fails, with 2 if the start fails.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end without a traceback
    # rank 0 logs everything else
    service_logging.configure("engine", "warning", settings.log_format)
    try:
        with opened(settings) as opened_settings:
            model = load(opened_settings)
    except (CheckpointError, StartupError) as error:
        service_logging.flush()
        print(f"engine: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        end_process(2)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when to stop
    model.ranks.watch()
    try:
        _follower(model).run()
    except Exception:
        model.ranks.exit_if_rank_lost()
        _LOG.exception("a step failed")
        end_process(1)
    end_process(0)


def _follower(model: LoadedModel) -> Follower:
    """Return a follower that runs steps as CUDA graphs if rank 0 does."""
    decoder, cache, ranks = model.decoder, model.cache, model.ranks
    capacity = model.capacity
    read_adapter = partial(convert_adapter, decoder)
    if capacity is None:
        return Follower(decoder, cache, ranks, read_adapter=read_adapter)
    extent = GraphExtent.of(capacity)
    decoder.reserve(extent.tokens, extent.sequences)
    graphs = StepGraphs(decoder, cache)
    follower = Follower(decoder, cache, ranks, graphs.run, graphs.capture, read_adapter)
    follower.reserve(extent.tokens, extent.rows, extent.blocks)
    return follower
