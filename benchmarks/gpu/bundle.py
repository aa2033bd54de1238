"""Packages for a machine with a GPU and without a network: torch and numpy are there already.

    python -m benchmarks.gpu.bundle [3.12]

xformers is kept without its C++ extensions, which are built for another CUDA and are not used.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
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
_MOST_BYTES = 45 << 20
_WHEELS = (
    *("grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf"),
    *("googleapis-common-protos", "msgspec", "prometheus-client", "uvloop"),
    *("safetensors", "gguf", "psutil", "tokenizers", "xformers==0.0.35"),
    *("pyyaml", "requests", "tqdm", "urllib3", "idna", "certifi", "charset-normalizer"),
)


def use_bundle(folder: Path) -> None:
    """Let imports find the packages of the bundle before older ones of this Python."""
    if not folder.is_dir():
        return
    sys.path.insert(0, str(folder))
    if not (_ROOT / "tokenwire" / "pb").is_dir():  # processes that the check starts need them too
        shutil.copytree(folder / _STUBS / "pb", _ROOT / "tokenwire" / "pb")


def main() -> None:
    """Gather the packages and the generated stubs; print the size."""
    python = sys.argv[1] if len(sys.argv) > 1 else _PYTHON
    shutil.rmtree(BUNDLE, ignore_errors=True)
    BUNDLE.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        options = ["--only-binary", ":all:", "--python-version", python, "--dest", wheels]
        platforms = ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"]
        subprocess.run([*command, *options, *platforms, *_WHEELS], check=True)
        for wheel in sorted(Path(wheels).glob("*.whl")):
            _unpack(wheel)
    _strip()
    shutil.copytree(_ROOT / "tokenwire" / "pb", BUNDLE / _STUBS / "pb")
    _describe_package()
    total = sum(file.stat().st_size for file in BUNDLE.rglob("*") if file.is_file())
    print(f"{BUNDLE}: {total / 2**20:.0f} MiB for Python {python}")
    if total > _MOST_BYTES:
        raise SystemExit(f"The bundle exceeds {_MOST_BYTES >> 20} MiB.")


def _describe_package() -> None:
    """Write what an installation would: the services tell their version."""
    version = metadata.version("tokenwire")
    folder = BUNDLE / f"tokenwire-{version}.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.4", "Name: tokenwire", f"Version: {version}", ""]
    (folder / "METADATA").write_text("\n".join(lines))


def _strip() -> None:
    """Take the symbols out of the extensions, a third of the bundle, where binutils are there."""
    if strip := shutil.which("strip"):
        extensions = map(str, BUNDLE.rglob("*.so"))
        subprocess.run([strip, "--strip-unneeded", *extensions], check=True)


def _unpack(wheel: Path) -> None:
    is_xformers = wheel.name.startswith("xformers")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if is_xformers and name.endswith(".so"):
                continue
            archive.extract(name, BUNDLE)


if __name__ == "__main__":
    main()
