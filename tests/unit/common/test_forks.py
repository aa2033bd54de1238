"""Tests of processes that start others while gRPC runs in them."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import {module}
import asyncio
import grpc
import uvloop

async def start_another():
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()

uvloop.run(start_another())
"""


@pytest.mark.parametrize(
    "module",
    [
        *("services.http_shim", "services.jobs", "services.tokenizer", "services.grammar"),
        "tokenwire.cli",
    ],
)
def test_grpc_does_not_handle_forks(module: str) -> None:
    """Its handlers wait for locks in the child: a service froze for ever as it started one."""
    environment = {key: value for key, value in os.environ.items() if "FORK" not in key}
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(module=module)],
        env=environment | {"GRPC_TRACE": "fork", "GRPC_VERBOSITY": "debug"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "gRPC Tracers: fork" in ended.stderr
    assert "fork() handlers" not in ended.stderr
