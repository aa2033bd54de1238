"""Ollama's API through its client for JavaScript."""

import json
import subprocess
from pathlib import Path

from tests.stack import Stack


def test_client_for_javascript_reads_answers_streams_calls_and_models(
    stack: Stack, node_folder: Path
) -> None:
    done = subprocess.run(
        ["node", "ollama.mjs", stack.url, stack.model_id],
        cwd=node_folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    name = f"{stack.model_id}:latest"
    assert answers["streamed"] == answers["whole"]["message"]["content"] == answers["generated"]
    assert answers["last"]["done_reason"] == answers["whole"]["done_reason"] == "stop"
    assert answers["last"]["eval_count"] > 0
    [call] = answers["calls"]
    assert call["function"]["name"] == "get_weather"
    assert isinstance(call["function"]["arguments"]["city"], str)
    assert answers["told"]
    assert json.loads(answers["object"])["colour"] in ("red", "green")
    assert answers["listed"] == answers["running"] == [name]
    assert "tools" in answers["shown"]
    assert answers["refusal"] == {"message": "model 'no-such' not found", "status": 404}
