"""Answers through Vercel's AI SDK, whose schemas refuse fields that other clients pass over."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.stack import Stack

CITIES = ({"city": "Oslo"}, {"city": "Rome"})


@pytest.mark.parametrize("provider", ["anthropic", "chat", "responses"])
def test_ai_sdk_reads_texts_streams_calls_and_objects(
    stack: Stack, node_folder: Path, provider: str
) -> None:
    done = subprocess.run(
        ["node", "ai_sdk.mjs", f"{stack.url}/v1", provider],
        cwd=node_folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert answers["text"]
    assert answers["streamed"]
    assert min(answers["tokens"], answers["streamedTokens"]) > 0
    assert answers["call"] in CITIES
    assert answers["result"] == f"Sunny in {answers['call']['city']}"
    assert answers["streamedCall"] in CITIES
    assert answers["steps"] == 2
    assert answers["object"] in CITIES
