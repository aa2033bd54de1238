"""The processes of the services that load torch."""

import subprocess
import sys

import pytest

EVERY_MODULE = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
ITS_START = "import importlib, sys; importlib.import_module(sys.argv[1])"


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (EVERY_MODULE, "tokenwire"),
        (EVERY_MODULE, "services.common"),
        (EVERY_MODULE, "services.http_shim"),
        (EVERY_MODULE, "services.jobs"),
        (EVERY_MODULE, "services.tokenizer"),
        (EVERY_MODULE, "services.grammar"),
        (EVERY_MODULE, "services.engine.scheduling"),  # policy, which the step loop calls
        (ITS_START, "services.engine.sequence_memory"),  # which `tokenwire show` calls
        (ITS_START, "services.engine.application"),  # the step loop is another process
    ],
)
def test_torch_is_loaded_by_the_step_loop_alone(program: str, name: str) -> None:
    """In any other process it would cost 300 MB and seconds at the start."""
    loads = f"{program}\nsys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", loads, name], check=True, timeout=60)


@pytest.mark.parametrize(
    "name",
    [
        "services.engine.__main__",  # which every process that the engine starts imports
        "services.engine.loop.loop_process",
        "services.engine.vision.encoder_process",
    ],
)
def test_processes_that_compute_load_no_grpc(name: str) -> None:
    """gRPC would lengthen each restart of the engine, and nothing in these processes calls it."""
    loads = f"{ITS_START}\nsys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", loads, name], check=True, timeout=60)
