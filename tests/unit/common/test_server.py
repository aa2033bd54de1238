"""The frame of a gRPC service: a failed start, and the health of its parts."""

import socket
import subprocess
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.network.health import LIVENESS
from services.common.server import _Health


def test_a_port_in_use_is_reported_with_the_reason(embedded_model: Path) -> None:
    """gRPC itself gives no reason."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = subprocess.run(
            [sys.executable, "-m", "services.grammar", "--model", str(embedded_model),
             "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )  # fmt: skip
    assert ended.returncode == 2
    said = f"grammar: Can't listen on 127.0.0.1:{port}: address already in use."
    assert said in ended.stderr.splitlines()


async def test_health_names_a_part_that_does_not_work_and_the_service_still_serves() -> None:
    server = grpc.aio.server()
    health = _Health(["some.Service"])
    health.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    health.set_serving(True)
    health.set_part("keys", works=False)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            return int(answer.status)

        assert await status("some.Service") == health_pb2.HealthCheckResponse.SERVING
        assert await status("tokenwire.part.keys") == health_pb2.HealthCheckResponse.NOT_SERVING
        health.set_part("keys", works=True)
        assert await status("tokenwire.part.keys") == health_pb2.HealthCheckResponse.SERVING
    await server.stop(None)


async def test_process_that_drains_lives() -> None:
    """A liveness probe would otherwise end it before its requests have ended."""
    server = grpc.aio.server()
    health = _Health(["some.Service"])
    health.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    health.set_serving(True)
    await health.shut_down()
    health.set_serving(True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        statuses = {
            service: (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status
            for service in ("", "some.Service", LIVENESS)
        }
    status = health_pb2.HealthCheckResponse.ServingStatus
    assert statuses == {
        "": status.NOT_SERVING,
        "some.Service": status.NOT_SERVING,
        LIVENESS: status.SERVING,
    }
    await server.stop(None)
