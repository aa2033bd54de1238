"""Builds what is generated: the protobuf stubs."""

import os
import shutil
import sys
from pathlib import Path

from setuptools import find_packages, setup

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


generate_stubs()
setup(packages=find_packages(include=["tokenwire*", "services*"]))
