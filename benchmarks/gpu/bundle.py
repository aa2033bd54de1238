"""Packages for a machine with a GPU and without a network, where torch and Triton are.

    python -m benchmarks.gpu.bundle [3.12] [--nano-vllm REPOSITORY]

The bundle holds wheels, which are smaller than what is in them. A machine unpacks those that its
Python lacks, and those whose versions have to fit our generated stubs. xformers is kept without its
C++ extensions, which are built for another CUDA and are not used.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from hashlib import sha256
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
_NANO_VLLM = "https://github.com/GeeeekExplorer/nano-vllm"
_NANO_VLLM_COMMIT = "bb823b3e06983d71485a8e1f23715ebd87d98ef8"
"""A peer, which is in no package index"""
_WHEELS = (
    *_ALWAYS,
    *("googleapis-common-protos", "msgspec", "prometheus-client", "uvloop", "shtab"),
    *("numpy", "safetensors", "gguf", "psutil", "tokenizers", "xformers"),
    *("pyyaml", "requests", "tqdm", "urllib3", "idna", "certifi", "charset-normalizer"),
    # the services in front of the engine
    *("starlette", "uvicorn", "httptools", "httpcore", "h11", "anyio", "click"),
    *("python-multipart", "jinja2", "markupsafe", "llguidance", "typing-extensions"),
    "xxhash",  # nano-vllm needs it
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
    wheels = sorted(folder.glob("*.whl"))
    # another Python on this machine, or another bundle, has a folder of its own
    named = "\n".join([sys.prefix, *(wheel.name for wheel in wheels)])
    site = folder.parent / f"gpu-site-{sha256(named.encode()).hexdigest()[:8]}"
    if not site.is_dir():
        _unpack_missing(wheels, site)
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    if str(site) not in sys.path:
        sys.path.insert(0, str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if not (_ROOT / "tokenwire" / "pb").is_dir():
        shutil.copytree(folder / _STUBS / "pb", _ROOT / "tokenwire" / "pb")


def main() -> None:
    """Gather the wheels and the generated stubs; print the size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.bundle")
    parser.add_argument("python", nargs="?", default=_PYTHON, help=f"default: {_PYTHON}")
    parser.add_argument(
        "--nano-vllm", default=_NANO_VLLM, metavar="REPOSITORY", help=f"default: {_NANO_VLLM}"
    )
    options = parser.parse_args()
    python = options.python
    shutil.rmtree(BUNDLE, ignore_errors=True)
    BUNDLE.mkdir(parents=True)
    (BUNDLE / "python").write_text(python)
    with tempfile.TemporaryDirectory() as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--python-version", python, "--dest", wheels]
        command += [f"--platform={name}_x86_64" for name in _PLATFORMS]
        subprocess.run([*command, *_WHEELS], check=True)
        for wheel in sorted(Path(wheels).glob("*.whl")):
            _repack(wheel, BUNDLE / wheel.name)
    shutil.copytree(_ROOT / "tokenwire" / "pb", BUNDLE / _STUBS / "pb")
    _describe_package(BUNDLE)
    _add_nano_vllm(options.nano_vllm)
    total = _size(BUNDLE.rglob("*"))
    print(f"{BUNDLE}: {total / 2**20:.0f} MiB for Python {python}")
    command = ["git", "-C", str(_ROOT), "ls-files", "-z"]
    files = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    if (all_bytes := total + _size(_ROOT / file for file in files if file)) > _MOST_BYTES:
        raise SystemExit(
            f"The bundle and the checkout take {all_bytes / 2**20:.0f} MiB, "
            f"more than {_MOST_BYTES >> 20}."
        )


def _unpack_missing(wheels: Sequence[Path], site: Path) -> None:
    """Unpack the wheels of packages that this Python lacks, and of those that it must not choose.

    The folder appears when it is complete, so that a process that is ended leaves no half of it.
    """
    fresh = Path(tempfile.mkdtemp(dir=site.parent))
    for wheel in wheels:
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


def _add_nano_vllm(repository: str) -> None:
    """Add nano-vllm as git has it at its commit, or print that the bundle goes without it."""
    wheel = BUNDLE / f"nanovllm-{_NANO_VLLM_COMMIT[:12]}-py3-none-any.whl"
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", folder]
        try:
            subprocess.run([*git, "init", "--quiet", "--bare"], check=True)
            subprocess.run([*git, "fetch", "--quiet", repository, "HEAD"], check=True)
            archive = ["archive", "--format=zip", f"--output={wheel}", _NANO_VLLM_COMMIT]
            subprocess.run([*git, *archive, "nanovllm"], check=True)
        except subprocess.CalledProcessError:
            print(f"The bundle has no nano-vllm: {repository} can't be read.")


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
        elif not any(folder.glob("*.libs")):  # strip breaks extensions that auditwheel has changed
            _strip(extensions)
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for file in sorted(folder.rglob("*")):
                if file.is_file():
                    archive.write(file, file.relative_to(folder))


def _strip(extensions: Sequence[Path]) -> None:
    if extensions and (strip := shutil.which("strip")):
        subprocess.run([strip, "--strip-unneeded", *map(str, extensions)], check=True)


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())


if __name__ == "__main__":
    main()
