"""Tests of the metrics that the services expose."""

import json
import os
import re
from pathlib import Path

import httpx
import pytest

from services.engine.kernels.library import instruction_set
from tests.documented_metrics import documented_metrics, exposed_metrics
from tests.services.engine_client import generate, make_request
from tests.stack import Stack, metrics_of, running_service
from tokenwire.channel import connect

_HIDE_KERNELS = """
import ctypes

load = ctypes.CDLL.__init__


def refuse(self, name, *arguments, **options):
    if "tokenwire_kernels" in str(name):
        raise OSError("this test hides the kernels")
    load(self, name, *arguments, **options)


ctypes.CDLL.__init__ = refuse
"""
_ONLY_WITH_REDIS = {"tokenwire_shared_limits"}  # tests/services/test_shared_limits.py
_ONLY_ON_DEMAND = re.compile("tokenwire_models?_")  # tests/services/test_models_on_demand.py


def test_exposed_metrics_are_the_documented_metrics(stack: Stack) -> None:
    targets = (stack.jobs, stack.tokenizer, stack.engine, stack.grammar)
    addresses = [target.split(":") for target in targets]
    urls = [stack.url, *(f"http://{host}:{int(port) + 1000}" for host, port in addresses)]
    served = {name for url in urls for name in exposed_metrics(url)}
    documented = documented_metrics()
    on_demand = set(filter(_ONLY_ON_DEMAND.match, documented))
    assert served == documented - _ONLY_WITH_REDIS - on_demand


async def test_metrics_name_the_model(stack: Stack) -> None:
    """One dashboard shows many models; without the label their numbers mix."""
    label = f'model="{stack.model.name}"'
    body = {"prompt": "def f():", "max_tokens": 2, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.post(f"{stack.url}/v1/completions", json=body)).is_success
        exposition = (await http.get(f"{stack.url}/metrics")).text
        labelled = {line.partition("{")[0] for line in exposition.splitlines() if label in line}
        assert labelled >= {
            "tokenwire_http_requests_total",
            "tokenwire_http_request_seconds_count",
            "tokenwire_http_time_to_first_token_seconds_count",
            "tokenwire_http_inter_token_seconds_count",
            "tokenwire_http_tokens_total",
        }
        for target in (stack.tokenizer, stack.engine, stack.grammar):
            exposition = (await http.get(metrics_url(target))).text
            samples = re.findall(r"^tokenwire_.*", exposition, re.MULTILINE)
            assert samples
            assert not [sample for sample in samples if label not in sample]


async def test_engine_serves_the_names_of_vllm(embedded_model: Path, tmp_path: Path) -> None:
    """Routers balance by them, and dashboards draw them, without a change."""
    arguments = ("--model", str(embedded_model), "--model-id", "m", "--kv-memory", "64MiB")
    log = tmp_path / "engine.log"
    async with running_service("engine", *arguments, "--vllm-metrics", log=log) as engine:
        async with connect(engine.target) as channel:
            await generate(channel, make_request([1, 2, 3], max_tokens=4))
        metrics = await metrics_of(engine.target)
    label = 'engine="0",model_name="m"'
    assert metrics[f"vllm:prompt_tokens_total{{{label}}}"] == 3
    assert metrics[f"vllm:generation_tokens_total{{{label}}}"] == 4
    ended = 'engine="0",finished_reason="length",model_name="m"'
    assert metrics[f"vllm:request_success_total{{{ended}}}"] == 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert metrics[f"vllm:{name}{{{label}}}"] == 0
    assert metrics[f"vllm:inter_token_latency_seconds_count{{{label}}}"] == 3
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert metrics[f"vllm:{name}_seconds_count{{{label}}}"] == 1
        assert f'vllm:{name}_seconds_bucket{{engine="0",le="0.25",model_name="m"}}' in metrics
    [cache] = [name for name in metrics if name.startswith("vllm:cache_config_info")]
    assert 'block_size="32"' in cache


def metrics_url(target: str) -> str:
    """Return the address of a gRPC service's metrics."""
    host, port = target.split(":")
    return f"http://{host}:{int(port) + 1000}/metrics"


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
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    arguments = ("--model", str(embedded_model), "--kv-memory", "64MiB")
    log = tmp_path / "engine.log"
    async with running_service("engine", *arguments, log=log) as engine:
        metrics = await metrics_of(engine.target)
        records = [json.loads(line) for line in log.read_text().splitlines()]
    [warning] = [each["message"] for each in records if each["level"] == "warning"]
    assert "install g++" in warning
    assert [name for name in metrics if 'kernels="none"' in name]
