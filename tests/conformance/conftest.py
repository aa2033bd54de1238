"""Fixtures of OpenAI's SDKs for Python and Node.js."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from openai import OpenAI

from tests.conformance.sdk import Answer, Fields, Node
from tests.stack import Stack

NODE = Path(__file__).parent / "node"


@pytest.fixture(scope="session")
def client(stack: Stack) -> OpenAI:
    """OpenAI's Python client of the stack."""
    return OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def node(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Node:
    """Install OpenAI's SDK for Node.js once. Return a function that makes calls through it."""
    if shutil.which("npm") is None:
        pytest.skip("this machine has no Node.js")
    folder = tmp_path_factory.mktemp("node")
    for file in ("package.json", "calls.mjs"):
        shutil.copy(NODE / file, folder)
    install = ["npm", "install", "--no-audit", "--no-fund"]
    subprocess.run(install, cwd=folder, check=True, capture_output=True, timeout=300)

    def run(endpoint: str, calls: Mapping[str, Fields]) -> dict[str, Answer]:
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
        answers: dict[str, Answer] = json.loads(done.stdout)
        return answers

    return run
