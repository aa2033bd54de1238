"""OpenAI's SDK for Node.js, installed once."""

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.stack import Stack

NODE = Path(__file__).parent / "node"


@pytest.fixture(scope="session")
def node(
    stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Mapping[str, Any]], dict[str, Any]]:
    """Makes calls of "completions" or "chat", by name: the answer, its chunks, or the error."""
    if shutil.which("npm") is None:
        pytest.skip("this machine has no Node.js")
    folder = tmp_path_factory.mktemp("node")
    for file in ("package.json", "calls.mjs"):
        shutil.copy(NODE / file, folder)
    install = ["npm", "install", "--no-audit", "--no-fund"]
    subprocess.run(install, cwd=folder, check=True, capture_output=True, timeout=300)

    def run(endpoint: str, calls: Mapping[str, Any]) -> dict[str, Any]:
        done = subprocess.run(
            ["node", "calls.mjs", f"{stack.url}/v1", endpoint],
            cwd=folder,
            input=json.dumps(calls),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answers: dict[str, Any] = json.loads(done.stdout)
        return answers

    return run
