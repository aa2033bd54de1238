"""Build steps beyond those of setuptools: protobuf stubs, CPU kernels, the packages of a wheel.

Reading the metadata runs none of them. An editable install writes stubs and kernels into the
checkout, where `services` is a top-level package. In a wheel it is `tokenwire.services`.
"""

import importlib.resources
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent
STUBS = ROOT / "tokenwire" / "pb"
KERNELS = ROOT / "services" / "engine" / "kernels"
IN_CHECKOUT = find_packages(include=["tokenwire*", "services*"], exclude=["tokenwire.pb*"])
IN_WHEEL = [re.sub("^services", "tokenwire.services", name) for name in IN_CHECKOUT]
FOLDERS = {"tokenwire.services": "services"}
if (ROOT / "models").is_dir():  # the build of a container image leaves it out
    IN_WHEEL.append("tokenwire.models")
    FOLDERS["tokenwire.models"] = "models"

_STUB_IMPORT = re.compile(r"^from (?:tokenwire\.(?=\w+\.v1 import)|(?=vllm import))", re.MULTILINE)
_SERVICE = re.compile(
    r"(?<![\w.])services\."
    r"(?=(?:common|engine|grammar|http_shim|jobs|tokenizer)\b|\{)"  # { of an f-string
)


def generate_stubs() -> None:
    """Write *_pb2.py, *_pb2_grpc.py and their .pyi below tokenwire/pb, from protos."""
    with tempfile.TemporaryDirectory() as output:
        _run_protoc(output)
        shutil.rmtree(STUBS, ignore_errors=True)
        for source in sorted(Path(output).rglob("*.py*")):
            parts = source.relative_to(output).parts
            target = STUBS.joinpath(*(parts[1:] if parts[0] == "tokenwire" else parts))
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
    google_protobuf = importlib.resources.files("grpc_tools") / "_proto"
    files = sorted(str(path) for path in (ROOT / "protos").rglob("*.proto"))
    arguments = [
        "protoc",
        *(f"--proto_path={path}" for path in (ROOT / "protos", google_protobuf, _google_rpc())),
        *(f"--plugin={plugin}" for plugin in plugins),
        *(f"--{kind}_out={output}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
        *files,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")


def _google_rpc() -> Path:
    """Return the folder that holds google/rpc/*.proto, of googleapis-common-protos."""
    module = importlib.util.find_spec("google.rpc.status_pb2")
    if module is None or module.origin is None:
        raise SystemExit("googleapis-common-protos is not installed")
    return Path(module.origin).parents[2]


def build_kernels() -> None:
    """Compile the kernels if there is a compiler and they are out of date."""
    command = [sys.executable, "-m", "services.engine.kernels.build"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        (KERNELS / "libtokenwire_kernels.so").unlink(missing_ok=True)
        print(
            "The CPU kernels were not built: no C++17 compiler with OpenMP. torch does their work."
        )


def name_services(package: Path) -> None:
    """Rewrite `services.NAME` to `tokenwire.services.NAME` in the modules of a built package.

    The names stand in imports, in commands (`python -m services.engine`) and in usage texts.
    """
    for module in package.rglob("*.py"):
        text = module.read_text(encoding="utf-8")
        module.write_text(_SERVICE.sub("tokenwire.services.", text), encoding="utf-8")


class BuildPy(build_py):
    """Generates what the packages lack, then copies them with the names of a wheel."""

    def run(self) -> None:
        if self.editable_mode:
            return
        generate_stubs()
        build_kernels()
        stubs = ["tokenwire.pb", *(f"tokenwire.pb.{name}" for name in find_packages(str(STUBS)))]
        self.distribution.packages = [*self.distribution.packages, *stubs]
        self.finalize_options()  # reads the packages and their data files again
        self.force = True  # what an earlier build rewrote looks newer than its source
        super().run()
        name_services(Path(self.build_lib, "tokenwire"))


class EditableWheel(editable_wheel):
    """Generates into the checkout, and installs its packages under their names there."""

    def finalize_options(self) -> None:
        self.distribution.packages = IN_CHECKOUT
        self.distribution.package_dir = {}
        super().finalize_options()

    def run(self) -> None:
        generate_stubs()
        build_kernels()
        super().run()


class BdistWheel(bdist_wheel):
    """Tags the wheel for every Python: ctypes loads the kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    """The kernels are machine code, though no extension modules."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    packages=IN_WHEEL,
    package_dir=FOLDERS,
    cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel, "bdist_wheel": BdistWheel},
    distclass=PlatformDistribution,
)
