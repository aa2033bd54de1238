"""Log lines: their length, and what they show of a failure."""

import json
import logging
import subprocess
import sys
from importlib.metadata import packages_distributions

import grpc
import pytest

from services.common import logging as service_logging
from services.common.failures import failure
from tokenwire.errors import ServiceError, invalid


@pytest.fixture
def log() -> logging.Logger:
    return logging.getLogger("test_logging")


def test_long_values_are_cut(
    log: logging.Logger, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    service_logging.configure("test", "info", "json")
    try:
        raise ValueError("x" * 60_000)
    except ValueError:
        log.exception("m" * 60_000, extra={"path": "p" * 60_000, "status": 400}, exc_info=True)
    service_logging.flush()
    line = json.loads(capfd.readouterr().err)
    assert line["message"].startswith("mmm")
    assert line["path"].endswith("(60,000 characters)")
    assert line["status"] == 400
    assert len(json.dumps(line)) < 20_000


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_failure_quotes_the_client_only_at_level_debug(log: logging.Logger, level: int) -> None:
    log.setLevel(level)
    refused = invalid("logit_bias.secret", "logit_bias.secret: the key must be a token id.")
    told = failure(log, refused)
    assert told["reason"] == "INVALID_FIELD"
    assert told["field"] == "logit_bias"
    assert ("secret" in str(told)) is (level == logging.DEBUG)
    full = ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "The queue is full.")
    assert failure(log, full) == {"reason": "QUEUE_FULL", "error": "The queue is full."}


_LOGGERS_AT_DEBUG = """
import importlib, logging, pkgutil
import services
from services.common import logging as service_logging
for module in pkgutil.walk_packages(services.__path__, "services."):
    if not module.name.endswith(("__main__", "libtokenwire_kernels")):
        importlib.import_module(module.name)
service_logging.configure("test", "debug", "json")
for name, logger in logging.root.manager.loggerDict.items():
    is_shown = isinstance(logger, logging.Logger) and logger.isEnabledFor(logging.DEBUG)
    if is_shown and logger.propagate:
        print(name.partition(".")[0])
"""


def test_level_debug_shows_nothing_of_other_packages() -> None:
    """gRPC's own ten lines for each request would hide those of the services."""
    command = [sys.executable, "-c", _LOGGERS_AT_DEBUG]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    names = set(ran.stdout.split())
    assert {"rpc", "loop", "http"} <= names
    others = packages_distributions().keys() | {"asyncio", "concurrent"}
    assert names & others == set()
