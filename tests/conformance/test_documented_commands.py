"""Commands and programs of the documentation, each page run as a reader pastes it.

A page runs in a folder of its own, from its first block to its last, with the variables and the
packages that the page itself sets and installs. Making an environment for each page would take
minutes and a package index. In its place a guard in every Python process hides what a bare one
would not have: all but the packages that `tokenwire[all]` and the page's `pip install` lines bring.
What a program imports itself must moreover be named by one of these, not only brought along.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.stack import Stack, served_stack
from tests.text_models import make_embedder

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = {
    "make serve": "does not end; tests/conformance/test_serve.py has its flags",
    "tokenwire serve": "does not end",
    "python -m services.": "does not end",
    "torchrun ": "does not end",
    "curl http://127.0.0.1:8000/api/pull": "needs the network; tests/services/test_ollama_pull.py",
    'curl http://127.0.0.1:8000/api/generate -d \'{"model": "smollm2"': "needs the model",
    "kubectl ": "needs a cluster; tests/unit/deploy checks the manifests",
    "envoy -c ": "does not end; tests/services/test_envoy.py runs it",
    "curl localhost:8000/v1/models/unload": "tests/services/test_models_on_demand.py unloads",
    "helm ": "needs a cluster; tests/unit/deploy checks the chart",
    "docker build": "tests/container builds the image",
    "docker run": "tests/container starts the image",
    "docker compose build": "tests/container builds the images",
    "docker compose -f ": "needs a GPU; tests/container/gpu.py builds and confines the image",
    "MODEL=$HOME/models": "needs a GPU; tests/container/gpu.py builds and confines the image",
    "for name in engine-gpu": "needs a registry",
    "for service in grammar engine": "tests/container runs compose",
    "tokenwire pull": "needs the network; tests/unit/common/model_files/test_hub.py has a hub",
    'pip install "tokenwire': "tests/conformance/test_wheel.py installs a wheel",
    "python3 -m venv env": "tests/conformance/test_wheel.py makes an environment",
    "env/bin/": "tests/conformance/test_wheel.py installs a wheel and serves from it",
    "uvx ": "needs the network; does not end",
    ".venv/bin/pip install": "needs the network",
    ".venv/bin/python -m benchmarks": "takes long",
    ".venv/bin/python examples/mcp_server.py": "does not end; tests/browser/test_mcp.py runs it",
    "sudo ": "changes the machine; tests/unit/deploy checks the unit of systemd",
    "systemctl ": "needs systemd",
    "journalctl ": "needs systemd; does not end",
    "systemd-run ": "needs systemd and a model that is larger than memory",
    "tokenwire chat --image": "needs a vision-language model",
    "tokenwire keys revoke": "its key is made up",
    "smg launch": "does not end; tests/conformance/test_smg.py runs it",
    "VLLM_ROUTER_TOKENIZER=": "does not end; tests/conformance/test_vllm_router.py runs it",
}
"""Beginnings of lines that are left out, with those that continue them, and the reason"""


GUARD = '''
import json, os, sys

class Guard:
    """Hides the packages that the page does not install."""

    hidden = frozenset(json.loads(os.environ["HIDDEN_MODULES"]))

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Guard())
'''
CONTINUED = re.compile(r"(?:.*\\\n)*.*\n")
"""A line of shell, with the lines that continue it after a backslash"""
INSTALLED = re.compile(r"pip install ([^`\n]+)")
OWN_MODULES = frozenset({"tokenwire", "services", "benchmarks"})


def blocks(page: Path) -> Sequence[tuple[str, str]]:
    """Return language and text of each block of shell or Python."""
    found = re.finditer(r"^```(sh|python)\n(.*?)^```", page.read_text(), re.M | re.S)
    return [(match[1], match[2]) for match in found]


def runnable(text: str) -> str:
    """Return the lines of shell that can be run here."""
    lines = CONTINUED.findall(text)
    return "".join(line for line in lines if not line.startswith(tuple(NOT_RUN)))


def installed_by(page: Path) -> set[str]:
    """Return the requirements of a server, and of the page's `pip install` lines."""
    named = {"tokenwire[all]"}
    for line in INSTALLED.findall(page.read_text()):
        for word in re.findall(r"[\w.\[\],-]+", line.replace("'", " ").replace('"', " ")):
            if word.startswith(".["):
                named.add(f"tokenwire{word[1:]}")
            elif re.fullmatch(r"\w[\w.-]*(\[[\w,-]+\])?", word):
                named.add(word)
    return named


def closure(requirements: set[str]) -> set[str]:
    """Return the names of all packages that requirements bring, in lower case with hyphens."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = list(requirements)
    while waiting:
        text = waiting.pop()
        if text in seen:
            continue
        seen.add(text)
        found.add(plain(Requirement(text).name))
        waiting += direct(text)
    return found


@cache
def direct(requirement: str) -> Sequence[str]:
    """Return the requirements of a package with the extras that are wanted of it."""
    return tuple(_direct(Requirement(requirement)))


def _direct(wanted: Requirement) -> Iterator[str]:
    try:
        lines = requires(wanted.name) or ()
    except PackageNotFoundError:  # not in this environment: what needs it fails below
        return
    for line in lines:
        needed = Requirement(line)
        marker = needed.marker
        extras = {"", *wanted.extras}
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            needed.marker = None
            needed.url = None
            yield str(needed)


def named(requirements: set[str]) -> set[str]:
    """Return the packages that requirements name, and those that extras of Tokenwire name."""
    found: set[str] = set()
    waiting = list(requirements)
    while waiting:
        text = waiting.pop()
        wanted = Requirement(text)
        found.add(plain(wanted.name))
        if wanted.name == "tokenwire":
            waiting += direct(text)
    return found


@cache
def owners_of_modules() -> Mapping[str, set[str]]:
    """Return the packages of each top-level module. It takes a second: it reads all their files."""
    return {
        module: {plain(each) for each in owners}
        for module, owners in packages_distributions().items()
    }


def modules_of(packages: set[str]) -> set[str]:
    """Return the top-level modules of packages."""
    return {module for module, owners in owners_of_modules().items() if owners & packages}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


EMBEDS = "embeddings.md"
"""Page whose commands need a model that embeds"""


def runs(language: str, text: str) -> bool:
    return language == "python" or bool(runnable(text).strip())


RUN = [page for page in PAGES if any(runs(*block) for block in blocks(page))]
PROGRAMS = [page for page in PAGES if any(language == "python" for language, _ in blocks(page))]


@pytest.fixture(scope="module")
def embedding_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = make_embedder(tmp_path_factory.mktemp("embedder"))
    logs = tmp_path_factory.mktemp("logs")
    with served_stack(model, logs, "--model", str(model)) as stack:
        yield stack


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_programs_import_only_what_their_page_installs(page: Path) -> None:
    """A package that comes along with another is gone with the other's next version."""
    known = OWN_MODULES | sys.stdlib_module_names | modules_of(named(installed_by(page)))
    for language, text in blocks(page):
        if language != "python":
            continue
        imported = {
            name.partition(".")[0] for node in ast.walk(ast.parse(text)) for name in names_of(node)
        }
        assert sorted(imported - known) == [], text


def names_of(node: ast.AST) -> Sequence[str]:
    """Return the modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_page_runs_as_pasted(request: pytest.FixtureRequest, tmp_path: Path, page: Path) -> None:
    embeds = page.name == EMBEDS
    stack: Stack = request.getfixturevalue("embedding_stack" if embeds else "stack")
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "models").symlink_to(ROOT / "models")
    environment = environment_of(page, tmp_path, stack)
    for language, text in blocks(page):
        if not runs(language, text):
            continue
        for documented, actual in (
            ("http://127.0.0.1:8000", stack.url),
            ("127.0.0.1:50051", stack.tokenizer),
            ("127.0.0.1:50052", stack.engine),
        ):
            text = text.replace(documented, actual)
        shell = ["bash", "-euo", "pipefail", "-c", runnable(text)]
        ran = subprocess.run(
            shell if language == "sh" else [sys.executable, "-c", text],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, f"{text}\n{ran.stdout}{ran.stderr}"
        assert ran.stdout.strip() or " > " in text, f"the reader sees nothing of\n{text}"


def environment_of(page: Path, folder: Path, stack: Stack) -> dict[str, str]:
    """Return the variables of a reader who has read this page alone."""
    allowed = modules_of(closure(installed_by(page))) | OWN_MODULES
    hidden = sorted(owners_of_modules().keys() - allowed)
    guard, home = folder / "guard", folder / "home"
    guard.mkdir()
    home.mkdir()
    (guard / "sitecustomize.py").write_text(GUARD)
    (home / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    known = ("LANG", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "TMPDIR")
    modules = [str(guard), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **{name: os.environ[name] for name in known if name in os.environ},
        "HOME": str(home),
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(modules),
        "HIDDEN_MODULES": json.dumps(hidden),
        "TOKENWIRE_TARGET": stack.tokenizer,
        "TOKENWIRE_URL": stack.url,
    }


def test_guard_hides_what_a_page_does_not_install(tmp_path: Path) -> None:
    """Without it, any package of this environment would pass."""
    page = tmp_path / "page.md"
    page.write_text("```sh\n.venv/bin/pip install openai\n```\n")
    assert {"openai", "grpc", "numpy"} <= modules_of(closure(installed_by(page)))
    hidden = owners_of_modules().keys() - modules_of(closure(installed_by(page)))
    assert {"pytest", "anthropic", "hypothesis"} <= hidden


def test_lines_that_are_left_out_are_documented() -> None:
    """Whoever removes a command removes its line here, so that no new one hides behind it."""
    lines = [
        line
        for page in PAGES
        for language, text in blocks(page)
        if language == "sh"
        for line in text.split("\n")
    ]
    assert [start for start in NOT_RUN if not any(each.startswith(start) for each in lines)] == []
