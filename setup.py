"""Builds what is generated: the protobuf stubs, and the engine's CPU kernels."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup

ROOT = Path(__file__).parent


def generate_stubs() -> None:
    """Write *_pb2.py, *_pb2_grpc.py and their .pyi below tokenwire/, from protos/tokenwire/."""
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
        *(f"--{output}_out={ROOT}" for output in ("python", "grpc_python", "mypy", "mypy_grpc")),
        *files,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    for proto in files:
        package = (ROOT / Path(proto).relative_to(ROOT / "protos")).parent
        for folder in (package, package.parent):
            (folder / "__init__.py").touch()


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
