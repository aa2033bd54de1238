"""Fixtures: SDKs for Python and Node.js, and what tests of any requests share."""

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from openai import OpenAI

from tests.conformance.any_request import HANG_SECONDS, Neighbour
from tests.conformance.sdk import Answer, Fields, Node
from tests.stack import Stack

NODE = Path(__file__).parent / "node"
TIE = 1e-3  # nats between the two best tokens; below it, rounding may decide


@pytest.fixture(scope="session")
def client(stack: Stack) -> OpenAI:
    """OpenAI's Python client of the stack."""
    return OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the programs for Node.js and the SDKs that they need."""
    if shutil.which("npm") is None:
        pytest.skip("this machine has no Node.js")
    folder = tmp_path_factory.mktemp("node")
    shutil.copytree(NODE, folder, dirs_exist_ok=True)
    install = ["npm", "install", "--no-audit", "--no-fund"]
    subprocess.run(install, cwd=folder, check=True, capture_output=True, timeout=300)
    return folder


@pytest.fixture(scope="session")
def node(stack: Stack, node_folder: Path) -> Node:
    """Return a function that makes calls through OpenAI's SDK for Node.js."""

    def run(endpoint: str, calls: Mapping[str, Fields]) -> dict[str, Answer]:
        done = subprocess.run(
            ["node", "calls.mjs", f"{stack.url}/v1", endpoint],
            cwd=node_folder,
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


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def neighbour(stack: Stack) -> AsyncIterator[Neighbour]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=HANG_SECONDS) as http:
        body = {"prompt": "class Stack:\n    def push(", "temperature": 0, "max_tokens": 24}
        response = await http.post("/v1/completions", json=body | {"logprobs": 2})
        certain = 0
        for top in response.json()["choices"][0]["logprobs"]["top_logprobs"]:
            scores = sorted(top.values(), reverse=True)
            if len(scores) > 1 and scores[0] - scores[1] < TIE:
                break
            certain += 1
        body["max_tokens"] = max(1, certain)
        response = await http.post("/v1/completions", json=body)
        yield Neighbour(http, body, response.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def answered() -> Counter[str]:
    """Number of requests that were not refused, by kind."""
    return Counter()
