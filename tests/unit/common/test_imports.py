"""The processes of the services that load torch, gRPC or numpy."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
forbidden, *names = sys.argv[1:]
for name in names:
    package = importlib.import_module(name.removesuffix(".*"))
    if name.endswith(".*"):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    if forbidden in sys.modules:
        sys.exit(f"{name} loads {forbidden}")
"""
WITHOUT_TORCH = (
    "tokenwire.*",
    "services.common.*",
    "services.http_shim.*",
    "services.jobs.*",
    "services.tokenizer.*",
    "services.grammar.*",
    "services.engine.scheduling.*",  # policy, which the step loop calls
    "services.engine.sequence_memory",  # which `tokenwire show` calls
    "services.engine.application",  # the step loop is another process
)
"""Modules; with ".*", a package and all of its modules"""
WITHOUT_GRPC = (
    "services.engine.__main__",  # which every process that the engine starts imports
    "services.engine.loop.loop_process",
    "services.engine.vision.encoder_process",
)
WITHOUT_NUMPY = ("services.engine.application", "services.tokenizer.application")


def assert_none_loads(forbidden: str, names: tuple[str, ...]) -> None:
    """Import the modules in one process, because each start of one repeats most imports."""
    command = [sys.executable, "-c", PROGRAM, forbidden, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_torch_is_loaded_by_the_step_loop_alone() -> None:
    """In any other process it would cost 300 MB and seconds at the start."""
    assert_none_loads("torch", WITHOUT_TORCH)


def test_processes_that_serve_grpc_load_no_numpy() -> None:
    """They compute nothing with it, and it would lengthen each start by 0.1 s."""
    assert_none_loads("numpy", WITHOUT_NUMPY)


def test_processes_that_compute_load_no_grpc() -> None:
    """gRPC would lengthen each restart of the engine, and nothing in these processes calls it."""
    assert_none_loads("grpc", WITHOUT_GRPC)
