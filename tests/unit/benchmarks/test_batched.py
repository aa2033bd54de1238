"""A shape that llama.cpp can't run must not lose the figures of the others."""

from pathlib import Path

import pytest

from benchmarks.batched import BatchedBench, Cases

SCRIPT = """#!/bin/sh
case "$*" in
  *"-npl 8 "*) echo "no memory" >&2; exit 3 ;;
  *"-npl 32 "*--repack) exit 139 ;;
  *--no-repack) echo '{"speed_pp": 20.0, "speed_tg": 2.0}' ;;
  *) echo '{"speed_pp": 30.0, "speed_tg": 3.0}' ;;
esac
"""


@pytest.fixture
def bench(tmp_path: Path) -> BatchedBench:
    tool = tmp_path / "build" / "bin" / "llama-batched-bench"
    tool.parent.mkdir(parents=True)
    tool.write_text(SCRIPT)
    tool.chmod(0o755)
    return BatchedBench(tmp_path, tmp_path / "model.gguf")


def test_each_case_has_the_faster_variant_and_failures_are_told(bench: BatchedBench) -> None:
    for _ in range(2):
        speeds = bench.measure(Cases(streams=(1, 8, 32), context=128, prompts=(512,)))
        assert speeds == {"prompt of 512": 30, "decode, 1 streams": 3, "decode, 32 streams": 2}
        assert bench.failures == {"decode, 8 streams": "exit code 3: no memory"}
