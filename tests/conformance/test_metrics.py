"""Tests of the metrics that the services expose."""

import json
import re
from pathlib import Path

import httpx
import pytest

from services.engine.kernels.library import instruction_set
from tests.stack import Stack, metrics_of, running_service

_HIDE_KERNELS = """
import ctypes

load = ctypes.CDLL.__init__


def refuse(self, name, *arguments, **options):
    if "tokenwire_kernels" in str(name):
        raise OSError("this test hides the kernels")
    load(self, name, *arguments, **options)


ctypes.CDLL.__init__ = refuse
"""
_DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"


def test_exposed_metrics_are_the_documented_metrics(stack: Stack) -> None:
    others = [target.split(":") for target in (stack.tokenizer, stack.engine, stack.grammar)]
    urls = [stack.url, *(f"http://{host}:{int(port) + 1000}" for host, port in others)]
    served = {name for url in urls for name in names(httpx.get(f"{url}/metrics", timeout=60).text)}
    assert served == set(re.findall(r"`(tokenwire_\w+)`", _DOCUMENT.read_text()))


def test_engine_names_its_kernels(stack: Stack) -> None:
    """Without them it is several times slower, and an operator wants to know."""
    host, port = stack.engine.split(":")
    exposition = httpx.get(f"http://{host}:{int(port) + 1000}/metrics", timeout=60).text
    [build] = re.findall(r"^tokenwire_build_info\{(.*)\} 1.0$", exposition, re.MULTILINE)
    kernels = instruction_set()
    assert kernels is not None
    assert f'kernels="{kernels.name.lower()}"' in build
    assert 'service="engine"' in build


async def test_engine_without_kernels_warns_and_serves(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_HIDE_KERNELS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arguments = ("--model", str(embedded_model), "--kv-memory", "64MiB")
    log = tmp_path / "engine.log"
    async with running_service("engine", *arguments, log=log) as engine:
        metrics = await metrics_of(engine.target)
        records = [json.loads(line) for line in log.read_text().splitlines()]
    [warning] = [each["message"] for each in records if each["level"] == "warning"]
    assert "Install g++" in warning
    assert [name for name in metrics if 'kernels="none"' in name]


def names(exposition: str) -> set[str]:
    """Return the names of Tokenwire's metrics, without the counters' times of creation."""
    found = set(re.findall(r"^# TYPE (tokenwire_\w+)", exposition, re.MULTILINE))
    return {name for name in found if not name.endswith("_created")}
