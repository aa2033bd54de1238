"""The wheel, built from the sdist and installed away from the checkout."""

import platform
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from tests.stack import free_ports

ROOT = Path(__file__).resolve().parents[2]
KERNELS = Path("services", "engine", "kernels", "libtokenwire_kernels.so")
OF_THE_EXTRAS = (
    *("PIL", "gguf", "grpc_health", "grpc_reflection", "httpcore", "httptools", "jinja2"),
    *("huggingface_hub", "llguidance", "msgspec", "multipart", "numpy", "prompt_toolkit", "pypdf"),
    *(
        "rich",
        "prometheus_client",
        "safetensors",
        "starlette",
        "tokenizers",
        "torch",
        "transformers",
    ),
    *("uvicorn", "uvloop"),
)
"""Modules that a client alone is installed without"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed; return its stdout."""
    done = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def backend(call: str, *arguments: str | Path, cwd: Path) -> str:
    """Call a hook of the build backend, as pip does; return what it returned."""
    program = f"import sys; from setuptools import build_meta; result = build_meta.{call}"
    program += "; print(); print(result)"
    return run(sys.executable, "-c", program, *arguments, cwd=cwd).splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean checkout, with the changes that are not committed yet."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    target = tmp_path_factory.mktemp("source")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/")):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    name = backend("build_sdist(sys.argv[1])", folder, cwd=source)
    with tarfile.open(folder / name) as archive:
        archive.extractall(folder, filter="data")
    return folder / name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist, with the kernels of this checkout: compiling them takes a minute."""
    folder = tmp_path_factory.mktemp("wheel")
    if (ROOT / KERNELS).exists():
        shutil.copy2(ROOT / KERNELS, sdist / KERNELS)
    metadata = backend("prepare_metadata_for_build_wheel(sys.argv[1])", folder, cwd=sdist)
    assert not (sdist / "tokenwire" / "pb").exists(), "reading the metadata ran protoc"
    call = "build_wheel(sys.argv[1], metadata_directory=sys.argv[2])"
    return folder / backend(call, folder, folder / metadata, cwd=sdist)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and with the packages of this one but for tokenwire."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", wheel)
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=folder)
    here = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    # .pth files of a folder that a .pth file names are not read: no editable install gets in
    packages = [path for path in sys.path if Path(path).name == "site-packages"]
    Path(here.strip(), "packages.pth").write_text("\n".join(packages))
    return folder


def test_sdist_has_no_generated_files(source: Path, sdist: Path) -> None:
    names = {path.name for path in sdist.rglob("*")}
    assert {"engine.proto", "kernels.h", "playground.html", "py.typed", "config.json"} <= names
    assert not any(name.endswith(("_pb2.py", ".so", ".pyc")) for name in names)
    assert not (source / "tokenwire" / "pb").exists()


def test_wheel_has_one_package_with_all_its_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    assert folders == {"tokenwire", f"tokenwire-{version('tokenwire')}.dist-info"}
    for name in (
        "models/tokenwire-code-6m/model.safetensors",
        "pb/engine/v1/engine_pb2.pyi",
        "py.typed",
        "services/http_shim/web/playground.html",
        "services/http_shim/web/vendor/markdown-it/LICENSE",
        "services/http_shim/web/vendor/markdown-it/markdown-it.umd.min.js",
    ):
        assert f"tokenwire/{name}" in names
    if (ROOT / KERNELS).exists():
        assert f"tokenwire/{KERNELS}" in names


@pytest.mark.skipif(not (ROOT / KERNELS).exists(), reason="the kernels were not built")
def test_wheel_can_be_uploaded_to_an_index(wheel: Path, tmp_path: Path) -> None:
    """An index takes wheels that need no newer system than their label says."""
    labelled = runpy.run_path(str(ROOT / "deploy" / "wheel" / "build.py"))["labelled"]
    made = labelled(wheel, platform.machine(), tmp_path)
    assert made.name.endswith(f"-manylinux_2_28_{platform.machine()}.whl")
    assert made.exists()


def test_services_is_no_package_of_its_own(environment: Path, tmp_path: Path) -> None:
    found = "import importlib.util as u; print(u.find_spec('services'), u.find_spec('tokenwire'))"
    services, tokenwire = run(environment / "bin" / "python", "-c", found, cwd=tmp_path).split(
        " ", 1
    )
    assert services == "None"
    assert str(environment) in tokenwire


def test_no_module_of_the_wheel_names_services(environment: Path, tmp_path: Path) -> None:
    """An import that the build failed to rewrite would fail where nobody looks."""
    every = (
        "import importlib, pkgutil, tokenwire\n"
        "for module in pkgutil.walk_packages(tokenwire.__path__, 'tokenwire.'):\n"
        "    if not module.name.endswith(('__main__', 'kernels', 'xformers_backend')):\n"
        "        importlib.import_module(module.name)\n"
    )
    run(environment / "bin" / "python", "-c", every, cwd=tmp_path)


def test_installed_command_serves_the_embedded_model(environment: Path, tmp_path: Path) -> None:
    command = environment / "bin" / "tokenwire"
    assert "--model" in run(command, "serve", "--help", cwd=tmp_path)
    http, tokenizer, engine, grammar, jobs = map(str, free_ports(5))
    process = subprocess.Popen(
        [
            command, "serve", "--port", http, "--tokenizer-port", tokenizer, "--engine-port",
            engine, "--grammar-port", grammar, "--jobs-port", jobs,
            "--engine-args", "--kv-memory 64MiB",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = process.stdout.readline()
    try:
        assert re.match(rf"Tokenwire serves http://127\.0\.0\.1:{http} ", said)
        # a schema and a chat, so that the processes for grammars and templates start too
        body = {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 8,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": {"type": "integer"}},
            },
        }
        url = f"http://127.0.0.1:{http}/v1/chat/completions"
        answer = httpx.post(url, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
    finally:
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints


def test_client_needs_none_of_the_extras(environment: Path, tmp_path: Path) -> None:
    """And the command says in one sentence what a server needs."""
    without = f"import sys; sys.modules.update(dict.fromkeys({OF_THE_EXTRAS!r}))"
    python = environment / "bin" / "python"
    run(python, "-c", f"{without}; import tokenwire.client, tokenwire.cli", cwd=tmp_path)
    serve = f"{without}; from tokenwire.cli import main; main(['serve'])"
    done = subprocess.run(
        [python, "-c", serve], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"{python} -m pip install " in done.stderr
