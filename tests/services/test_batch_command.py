"""`tokenwire batch` on a running stack: a line for each request, also after an interruption."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.services.shim import running_shim
from tests.stack import Stack, free_ports


def command(source: Path, target: Path, url: str, *options: str) -> Sequence[str]:
    files = (str(source), str(target))
    return [sys.executable, "-m", "tokenwire", "batch", *files, "--url", url, *options]


def run(
    source: Path, target: Path, url: str, *options: str
) -> tuple[int, str, Mapping[str | None, Any]]:
    """Return exit code, summary, and the answers by custom_id."""
    done = subprocess.run(
        command(source, target, url, *options),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == ""
    lines = map(json.loads, target.read_text().splitlines())
    return done.returncode, done.stderr, {line["custom_id"]: line for line in lines}


def write(path: Path, lines: Sequence[object]) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def completion(stack: Stack, custom_id: str, **fields: object) -> Mapping[str, Any]:
    body = {"model": stack.model_id, "prompt": custom_id, "max_tokens": 3, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def test_every_line_gets_an_answer_and_bad_ones_an_error(stack: Stack, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"model": stack.model_id, "messages": messages, "max_tokens": 3}
    response = {"model": stack.model_id, "input": "Hi", "max_output_tokens": 3, "store": False}
    lines = [
        completion(stack, "a"),
        {"custom_id": "b", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "c", "url": "/v1/messages", "body": chat},
        {"custom_id": "d", "url": "/v1/responses", "body": response},
        "",
        "no JSON",
        completion(stack, "unknown", model="nope"),
        completion(stack, "streams", stream=True),
        {"custom_id": "later", "url": "/v1/responses", "body": response | {"background": True}},
        completion(stack, "a"),
        {"custom_id": "elsewhere", "url": "/v1/models", "body": {}},
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    code, summary, answers = run(source, target, stack.url)
    assert code == 1
    assert "4 of 10 requests answered" in summary
    assert "6 failed" in summary
    assert "line 6: The line is not JSON" in summary
    for custom_id in "bcd":
        answer = answers[custom_id]["response"]
        assert answer["status_code"] == 200
        assert answer["request_id"].startswith("req_")
    assert answers["b"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert answers["unknown"]["response"]["status_code"] == 404
    assert answers["unknown"]["response"]["body"]["error"]["param"] == "model"
    for faulty, why in (
        (None, "The line is not JSON: Expecting value at character 1."),
        ("streams", "body.stream"),
        ("later", "body.background"),
        ("a", "an earlier line"),
        ("elsewhere", "url must be one of"),
    ):
        found = [
            line["error"]
            for line in map(json.loads, target.read_text().splitlines())
            if line["custom_id"] == faulty and line["error"]
        ]
        assert len(found) == 1
        assert why in found[0]["message"]


def test_next_run_asks_only_for_what_is_missing(stack: Stack, tmp_path: Path) -> None:
    lines = [completion(stack, f"{number}") for number in range(8)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    code, _, first = run(source, target, stack.url)
    assert code == 0
    kept = target.read_text().splitlines(keepends=True)
    target.write_text("".join(kept[:5]) + kept[5][:20])  # as if it had been killed
    code, summary, second = run(source, target, stack.url)
    assert code == 0
    assert "3 of 8 requests answered, 5 answered before" in summary
    ids = {custom_id: answer["response"]["body"]["id"] for custom_id, answer in second.items()}
    for line in map(json.loads, kept[:5]):
        assert ids[line["custom_id"]] == line["response"]["body"]["id"]
    assert second.keys() == first.keys()


def test_interrupted_run_leaves_whole_lines(stack: Stack, tmp_path: Path) -> None:
    lines = [completion(stack, f"{number}", max_tokens=200) for number in range(400)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    batch = subprocess.Popen(command(source, target, stack.url, "--concurrency", "4"))
    while not target.exists() or target.stat().st_size == 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"the batch ended with {batch.wait(0.02)}")
    batch.send_signal(signal.SIGINT)
    assert batch.wait(60) == 130
    answers = target.read_text()
    assert answers.endswith("\n")
    assert 0 < len(list(map(json.loads, answers.splitlines()))) < 400


async def test_server_that_is_away_is_awaited(stack: Stack, tmp_path: Path) -> None:
    """A batch of hours must not fail because the server is started again."""
    [port] = free_ports(1)
    source = write(tmp_path / "in.jsonl", [completion(stack, "a")])
    target, url = tmp_path / "out.jsonl", f"http://127.0.0.1:{port}"
    code, _, answers = await asyncio.to_thread(run, source, target, url, "--patience", "0")
    assert code == 1
    assert answers["a"]["error"]["code"] == "not_reached"
    options = ("--patience", "100")
    waiting = await asyncio.create_subprocess_exec(*command(source, target, url, *options))
    async with running_shim("--tokenizer", stack.tokenizer, "--port", str(port)):
        assert await asyncio.wait_for(waiting.wait(), 100) == 0
    assert json.loads(target.read_text())["response"]["status_code"] == 200


def test_output_that_is_something_else_stays(stack: Stack, tmp_path: Path) -> None:
    """Notes, or the requests of a user who exchanges the two files, or names one twice."""
    source = write(tmp_path / "in.jsonl", [completion(stack, "a")])
    notes = write(tmp_path / "notes.txt", ["my notes"])
    whole = {file: file.read_text() for file in (source, notes)}
    for first, second in ((source, notes), (notes, source), (source, source)):
        done = subprocess.run(
            command(first, second, stack.url), capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert {file: file.read_text() for file in tmp_path.iterdir()} == whole


def test_missing_input_is_one_sentence(tmp_path: Path) -> None:
    files = tmp_path / "no-such.jsonl", tmp_path / "out.jsonl"
    done = subprocess.run(
        command(*files, "http://127.0.0.1:1"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == f"tokenwire: {files[0]}: No such file or directory.\n"


def test_text_that_utf8_can_not_express_stops_no_other_line(stack: Stack, tmp_path: Path) -> None:
    half = r'{"custom_id": "\ud800", "url": "/v1/completions", "body": {"prompt": "\ud800"}}'
    source = write(tmp_path / "in.jsonl", [half, completion(stack, "a")])
    code, _, answers = run(source, tmp_path / "out.jsonl", stack.url)
    assert code == 1
    assert answers["\ud800"]["response"]["status_code"] == 400
    assert answers["a"]["response"]["status_code"] == 200


def test_key_is_not_sent_in_clear_text(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [])
    key = tmp_path / "key"
    key.write_text("secret-key-of-a-user\n")
    key.chmod(0o600)
    done = subprocess.run(
        command(source, tmp_path / "out", "http://192.0.2.1", "--key-file", str(key)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "clear text" in done.stderr


def test_file_of_wrong_lines_is_answered_with_its_first_reasons(tmp_path: Path) -> None:
    """No server is needed: nothing could be sent."""
    lines = ["a;b", *["1;2"] * 138, '{"custom_id": ""}']
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    code, summary, _ = run(source, target, "http://127.0.0.1:9")
    assert code == 1
    assert "140 failed" in summary
    assert "line 1: The line is not JSON: Expecting value at character 1." in summary
    assert "line 2 (and 137 other lines): The line is not JSON: Extra data" in summary
    assert "line 140: custom_id must be a string that is not empty." in summary


@pytest.mark.parametrize(
    ("begin", "why"),
    [("%PDF-1.4", "the file is a PDF"), ("[", "a JSON array"), ("{", "goes over several lines")],
)
def test_file_of_another_format_is_refused_by_its_name(
    tmp_path: Path, begin: str, why: str
) -> None:
    source = write(tmp_path / "in.jsonl", [begin, "x"])
    done = subprocess.run(
        command(source, tmp_path / "out.jsonl", "http://127.0.0.1:9"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert why in done.stderr
