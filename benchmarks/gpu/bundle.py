"""Packages for a machine with a GPU and without a network, where torch and Triton are.

    python -m benchmarks.gpu.bundle [3.12]

The bundle holds wheels, which are smaller than what is in them. A machine unpacks those that its
Python lacks, and those whose versions have to fit our generated stubs. xformers is kept without its
C++ extensions, which are built for another CUDA and are not used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

__all__ = ["BUNDLE", "use_bundle"]

BUNDLE = Path(__file__).parents[2] / "build" / "gpu-bundle"
"""Where the bundle is made, and where a check looks for it"""
_PYTHON = "3.12"
"""Version of Python that the packages are for, unless another is named"""
_STUBS = "tokenwire-stubs"
"""Folder of the generated gRPC modules, which git ignores"""
_ROOT = Path(__file__).parents[2]
_MOST_BYTES = 64 << 20
"""Size of the checkout with the bundle that a machine takes at most"""
_PLATFORMS = ("manylinux_2_34", "manylinux_2_31", "manylinux_2_28", "manylinux2014")
_ALWAYS = ("grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf")
"""Packages that are used in our version even where others are installed: the stubs need them"""
_PEER = "nano-vllm-fork==20260210"
_WHEELS = (
    *_ALWAYS,
    *("googleapis-common-protos", "msgspec", "prometheus-client", "uvloop", "shtab"),
    *("numpy", "safetensors", "gguf", "psutil", "tokenizers", "xformers"),
    *("pyyaml", "requests", "tqdm", "urllib3", "idna", "certifi", "charset-normalizer"),
    # the services in front of the engine
    *("starlette", "uvicorn", "httptools", "httpcore", "h11", "anyio", "click"),
    *("python-multipart", "jinja2", "markupsafe", "llguidance", "typing-extensions"),
    # a peer, and what it needs beside transformers
    *(_PEER, "xxhash"),
)


def use_bundle(folder: Path) -> None:
    """Let imports, those of started processes too, find the packages that this Python lacks.

    Raises SystemExit if the bundle is for another version of Python.
    """
    if not folder.is_dir():
        return
    python = (folder / "python").read_text()
    if python != sysconfig.get_python_version():
        raise SystemExit(
            f"{folder} is for Python {python}, and this is {sysconfig.get_python_version()}; "
            f"make it anew: python -m benchmarks.gpu.bundle {sysconfig.get_python_version()}"
        )
    site = folder / "site"
    if not site.is_dir():
        _unpack_missing(folder, site)
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    if str(site) not in sys.path:
        sys.path.insert(0, str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if not (_ROOT / "tokenwire" / "pb").is_dir():
        shutil.copytree(folder / _STUBS / "pb", _ROOT / "tokenwire" / "pb")


def main() -> None:
    """Gather the wheels and the generated stubs; print the size."""
    python = sys.argv[1] if len(sys.argv) > 1 else _PYTHON
    shutil.rmtree(BUNDLE, ignore_errors=True)
    BUNDLE.mkdir(parents=True)
    (BUNDLE / "python").write_text(python)
    with tempfile.TemporaryDirectory() as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        options = ["--only-binary", ":all:", "--python-version", python, "--dest", wheels]
        platforms = [f"--platform={name}_x86_64" for name in _PLATFORMS]
        subprocess.run([*command, *options, *platforms, *_WHEELS], check=True)
        for wheel in sorted(Path(wheels).glob("*.whl")):
            _repack(wheel, BUNDLE / wheel.name)
    shutil.copytree(_ROOT / "tokenwire" / "pb", BUNDLE / _STUBS / "pb")
    _describe_package(BUNDLE)
    total = _size(BUNDLE.rglob("*"))
    print(f"{BUNDLE}: {total / 2**20:.0f} MiB for Python {python}")
    command = ["git", "-C", str(_ROOT), "ls-files", "-z"]
    files = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    if (all_bytes := total + _size(_ROOT / file for file in files if file)) > _MOST_BYTES:
        raise SystemExit(
            f"The bundle and the checkout take {all_bytes / 2**20:.0f} MiB, "
            f"more than {_MOST_BYTES >> 20}."
        )


def _unpack_missing(folder: Path, site: Path) -> None:
    """Unpack the wheels of packages that this Python lacks, and of those that it must not choose.

    The folder appears when it is complete, so that a process that is ended leaves no half of it.
    """
    fresh = Path(tempfile.mkdtemp(dir=folder))
    for wheel in sorted(folder.glob("*.whl")):
        name = wheel.name.split("-")[0].replace("_", "-")
        if name in _ALWAYS or not _is_installed(name):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(fresh)
    fresh.rename(site)


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _describe_package(folder: Path) -> None:
    """Write what an installation would: the services tell their version."""
    version = metadata.version("tokenwire")
    name = f"tokenwire-{version}.dist-info/METADATA"
    lines = ["Metadata-Version: 2.4", "Name: tokenwire", f"Version: {version}", ""]
    with zipfile.ZipFile(folder / f"tokenwire-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(name, "\n".join(lines))


def _repack(wheel: Path, target: Path) -> None:
    """Copy a wheel without the symbols of its extensions, as far as binutils are there."""
    is_xformers = wheel.name.startswith("xformers")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        extensions = [file for file in folder.rglob("*.so*") if file.is_file()]
        if is_xformers:
            for file in extensions:
                file.unlink()
        else:
            _strip(extensions)
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for file in sorted(folder.rglob("*")):
                if file.is_file():
                    archive.write(file, file.relative_to(folder))


def _strip(extensions: Sequence[Path]) -> None:
    strip = shutil.which("strip")
    for file in extensions if strip else ():
        # not all: a library whose sections were moved by auditwheel may refuse
        subprocess.run(
            [str(strip), "--strip-unneeded", str(file)], check=False, stderr=subprocess.DEVNULL
        )


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())


if __name__ == "__main__":
    main()
