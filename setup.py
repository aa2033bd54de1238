"""Build of generated files: the protobuf stubs in tokenwire/pb, and the engine's CPU kernels."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Distribution, find_packages, setup

ROOT = Path(__file__).parent
STUBS = ROOT / "tokenwire" / "pb"
_STUB_IMPORT = re.compile(r"^from tokenwire\.(?=\w+\.v1 import)", re.MULTILINE)


def generate_stubs() -> None:
    """Write *_pb2.py, *_pb2_grpc.py and their .pyi below tokenwire/pb, from protos/tokenwire."""
    with tempfile.TemporaryDirectory() as output:
        _run_protoc(output)
        generated = sorted(Path(output, "tokenwire").rglob("*.py*"))
        shutil.rmtree(STUBS, ignore_errors=True)
        for source in generated:
            target = STUBS / source.relative_to(Path(output, "tokenwire"))
            target.parent.mkdir(parents=True, exist_ok=True)
            # protoc derives module names from the files' places below protos/
            target.write_text(_STUB_IMPORT.sub("from tokenwire.pb.", source.read_text()))
            for package in (target.parent, target.parent.parent, STUBS):
                (package / "__init__.py").touch()


def _run_protoc(output: str) -> None:
    from grpc_tools import protoc

    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    plugins = [
        shutil.which(name, path=scripts) for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]
    if None in plugins:
        raise SystemExit("mypy-protobuf is not installed: pip install mypy-protobuf")
    include = Path(protoc.__file__).parent / "_proto"
    files = sorted(str(path) for path in (ROOT / "protos" / "tokenwire").rglob("*.proto"))
    arguments = [
        "protoc",
        f"--proto_path={ROOT / 'protos'}",
        f"--proto_path={include}",
        *(f"--plugin={plugin}" for plugin in plugins),
        *(f"--{kind}_out={output}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
        *files,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")


def build_kernels() -> None:
    """Compile the kernels where there is a compiler and they are out of date."""
    folder = ROOT / "services" / "engine" / "kernels"
    library = folder / "libtokenwire_kernels.so"
    sources = [folder / "build.py", *(folder / "src").iterdir()]
    newest = max(source.stat().st_mtime for source in sources)
    if library.exists() and library.stat().st_mtime > newest:
        return
    command = [sys.executable, "-m", "services.engine.kernels.build"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        library.unlink(missing_ok=True)
        print(
            "The CPU kernels were not built: no C++17 compiler with OpenMP. torch does their work."
        )


class PlatformDistribution(Distribution):
    """The kernels are machine code, though no extension modules."""

    def has_ext_modules(self) -> bool:
        return True


generate_stubs()
build_kernels()
setup(
    packages=find_packages(include=["tokenwire*", "services*"]),
    package_data={
        "services.engine.kernels": ["*.so"],
        "services.http_shim.documentation": ["web/*"],
        "": ["py.typed", "*.pyi"],
    },
    distclass=PlatformDistribution,
)
