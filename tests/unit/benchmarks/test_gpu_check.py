"""The check of GPUs, with a CPU in place of one: all parts run, and a cut keeps what was found."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


def check(folder: Path, *further: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick"]
    places = ["--checkpoints", str(folder / "models"), "--out", str(folder)]
    return subprocess.Popen(
        [*command, *places, *further],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def report_in(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("gpu-*.json")
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def test_each_part_runs_and_is_reported(tmp_path: Path) -> None:
    output, _ = check(tmp_path).communicate(timeout=300)
    report = report_in(tmp_path)
    parts = {part["name"]: part for part in report["parts"]}
    assert list(parts) == [
        *("attention", "families", "graphs", "vectors", "memory"),
        *("speed, tiny", "service, tiny", "peers, tiny"),
    ]
    assert not [part["failure"] for part in parts.values() if part["failure"]]
    compared = [row for name in ("attention", "families", "vectors") for row in parts[name]["rows"]]
    assert all(row["ok"] for row in compared)
    loads = {row["what"]: row for row in parts["speed, tiny"]["rows"]}
    assert loads["a mask on all rows"]["tokens/s"] > 0
    assert loads["a prompt of 64"]["tokens/s"] > 0
    assert parts["service, tiny"]["rows"][-1]["tokens/s"] > 0
    assert any("TTFT p95" in row for row in loads.values())
    (page,) = tmp_path.glob("gpu-*.md")
    assert page.read_text().strip() in output


def test_check_that_is_cut_keeps_what_it_found(tmp_path: Path) -> None:
    process = check(tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("attention")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    report = report_in(tmp_path)
    (part,) = report["parts"]
    assert part["failure"] == "cut"
    assert part["rows"]
    assert report["left_out"][0] == "attention"


def test_check_ends_within_its_time(tmp_path: Path) -> None:
    check(tmp_path, "--minutes", "0.1").communicate(timeout=120)
    report = report_in(tmp_path)
    assert report["parts"] == []
    assert "speed, tiny" in report["left_out"]
