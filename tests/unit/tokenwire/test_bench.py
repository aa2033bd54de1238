"""Tests of `tokenwire bench` in front of a scripted server."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.unit.benchmarks.scripted_server import event, scripted_server, stream


def chat_stream(tokens: int, *, with_usage: bool = True) -> bytes:
    """Return an answer in the form of /v1/chat/completions."""
    parts = [event({"choices": [{"delta": {"content": f"t{i}"}}]}) for i in range(tokens)]
    end = event({"choices": [{"delta": {}, "finish_reason": "length"}]})
    counts = {"prompt_tokens": 3, "completion_tokens": tokens}
    usage = [event({"choices": [], "usage": counts})] if with_usage else []
    return b"".join([*parts, end, *usage, b"data: [DONE]\n\n"])


async def bench(url: str, *arguments: str, named: Sequence[str] = ("m",)) -> tuple[int, str, str]:
    """Run the command. named: the model. Return its exit code, stdout and stderr."""
    command = [sys.executable, "-m", "tokenwire", "bench", *named, "--url", url, *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_each_level_has_its_requests_and_figures(tmp_path: Path) -> None:
    async def answer(body: dict[str, Any]) -> Sequence[bytes]:
        return [chat_stream(body["max_tokens"])]

    saved = tmp_path / "bench.json"
    async with scripted_server(answer) as (url, seen):
        code, out, err = await bench(
            url, "--streams", "1,2", "--output-tokens", "5", "--save", str(saved)
        )
        assert code == 0, err
        again, compared, _ = await bench(url, "--streams", "2", "--compare", str(saved))
        assert again == 0
    assert [len(body["messages"]) for body in seen.bodies[:8]] == [1] * 8  # 1 + 3 + 4
    assert len({body["messages"][0]["content"] for body in seen.bodies}) == len(seen.bodies)
    assert "first token" in out
    assert "usage" in out
    one, two = json.loads(saved.read_text())["levels"]
    assert (one["streams"], one["requests"], one["output_tokens"]) == (1, 3, 5)
    assert (two["streams"], two["requests"], two["errors"]) == (2, 4, {})
    assert "%" in compared


async def test_server_that_takes_no_foreign_field_is_measured_all_the_same() -> None:
    """OpenAI itself refuses fields that it does not know, such as ignore_eos."""

    async def answer(body: dict[str, Any]) -> Sequence[bytes]:
        return [chat_stream(2, with_usage="stream_options" in body)]

    async with scripted_server(answer) as (url, seen):
        seen.refuses = {"ignore_eos", "stream_options"}
        code, out, err = await bench(url, "--streams", "1", "--requests", "1")
    assert code == 0, err
    assert [len(body) for body in seen.bodies] == sorted(
        [len(b) for b in seen.bodies], reverse=True
    )
    assert "counted by events" in out
    assert "at most" in out


async def test_failed_requests_are_counted_and_shown() -> None:
    asked = 0

    async def answer(body: dict[str, Any]) -> Sequence[bytes]:
        nonlocal asked
        asked += 1
        return [chat_stream(2) if asked != 3 else event({"error": {"message": "out of memory"}})]

    async with scripted_server(answer) as (url, _):
        code, out, _ = await bench(url, "--streams", "1")
    assert code == 1
    assert "2, 1 failed" in out
    assert "out of memory" in out


async def test_completions_have_a_prompt() -> None:
    async def answer(body: dict[str, Any]) -> Sequence[bytes]:
        return [stream(2, 2)]

    async with scripted_server(answer) as (url, seen):
        code, out, _ = await bench(
            url, *("--endpoint", "completions", "--prompt", "Hi", "--streams", "1", "--json")
        )
    assert code == 0
    assert {body["prompt"] for body in seen.bodies} == {"Hi"}
    assert json.loads(out)["levels"][0]["is_usage"]


async def test_model_is_named_as_in_the_other_commands() -> None:
    """`tokenwire complete` and `chat` take --model; `bench` takes the id by itself, too."""

    async def answer(body: dict[str, Any]) -> Sequence[bytes]:
        return [chat_stream(2)]

    async with scripted_server(answer) as (url, seen):
        code, _, err = await bench(url, "--streams", "1", named=("--model", "m"))
        assert code == 0, err
        code, _, err = await bench(url, named=("m", "--model", "n"))
    assert {body["model"] for body in seen.bodies} == {"m"}
    assert code == 2
    assert "named twice" in err


async def test_server_that_is_away_is_one_sentence(tmp_path: Path) -> None:
    async def answer(body: dict[str, Any]) -> Sequence[bytes]:
        return []

    async with scripted_server(answer) as (url, _):
        pass
    code, out, err = await bench(url)
    assert (code, out) == (1, "")
    assert err.startswith("tokenwire: The first request failed: ")
    assert len(err.splitlines()) == 1
    (tmp_path / "x").write_text("{}")
    code, _, err = await bench(url, "--compare", str(tmp_path / "x"))
    assert code == 1
    assert "no file of `tokenwire bench --save`" in err
