"""The check of GPUs: its time, its order, its report, and parts that fail, hang or end the process.

The parts run in real worker processes, on the CPU.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.plan import PARTS, Part, choose
from benchmarks.gpu.report import Outcome, PartResult, Report, settled_parts
from benchmarks.gpu.session import Limits, Session

HERE = "tests.unit.benchmarks.gpu_example_parts"


def part(function: str, seconds: float = 1.0, name: str = "", **options: int) -> Part:
    return Part(name or function, f"{HERE}:{function}", seconds, "Why?", options)


def session(
    folder: Path,
    parts: Sequence[Part],
    *,
    total: float = 300.0,
    least: float = 120.0,
    has_estimates: bool = False,
) -> Session:
    arguments = ["--dry", "--checkpoints", str(folder), "--bundle", str(folder / "none")]
    limits = Limits(total, start=120.0, factor=1.0, least=least)
    return Session(parts, folder, arguments, limits, has_estimates=has_estimates)


def saved(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("gpu-*.json")
    content: dict[str, Any] = json.loads(file.read_text())
    return content


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """Report of a check in which parts end in every way, and its folder.

    One check has them all, because each of its processes imports torch.
    """
    folder = tmp_path_factory.mktemp("check")
    quick = 60.0  # seconds that no part takes, however slow the machine
    parts = [
        part("fail", quick),
        part("die", quick),
        part("lack", quick),
        part("exceed", quick),
        part("count", quick, name="before", to=2),
        part("hang"),
        part("count", quick, name="after", to=1),
        part("count", quick, name="beside", to=1),
        Part("alone", f"{HERE}:count", quick, "Why?", {"to": 1}, is_alone=True),
        part("count", 1e6, name="long", to=1),
        part("count", quick, name="last", to=1),
    ]
    return session(folder, parts, least=1.0, total=600.0, has_estimates=True).run(), folder


@pytest.fixture(scope="module")
def parts(checked: tuple[Report, Path]) -> dict[str, PartResult]:
    """Results of the check's parts by name."""
    return {each.name: each for each in checked[0].parts}


def process_of(result: PartResult) -> object:
    return result.rows[0]["process"]


def test_part_that_fails_or_ends_its_process_does_not_end_the_check(
    checked: tuple[Report, Path], parts: dict[str, PartResult]
) -> None:
    report, folder = checked
    failed, died = parts["fail"], parts["die"]
    assert failed.outcome is Outcome.FAILED
    assert 'ArithmeticError("no such product")' in failed.failure
    assert failed.rows == [{"number": 0}]
    assert died.outcome is Outcome.DIED
    assert died.failure.startswith("exit code 7")
    assert "out of memory" in died.failure
    assert parts["lack"].outcome is Outcome.LEFT_OUT
    assert parts["lack"].failure == "there is no second card"
    exceeding, counted = parts["exceed"], parts["before"]
    assert [exceeding.outcome, counted.outcome] == [Outcome.RAN, Outcome.RAN]
    assert [exceeding.is_good, counted.is_good, report.is_good] == [False, True, False]
    assert [row["number"] for row in counted.rows] == [0, 1]
    assert [each["outcome"] for each in saved(folder)["parts"]] == [
        *("failed", "died", "left out", "ran", "ran", "hung", "ran", "ran", "ran"),
        *("left out", "ran"),
    ]


def test_part_that_hangs_is_ended_and_the_report_says_where_it_was(
    parts: dict[str, PartResult],
) -> None:
    hung, after = parts["hang"], parts["after"]
    assert hung.outcome is Outcome.HUNG
    assert "wait_for_ever" in hung.failure
    assert hung.rows == [{"number": 0}]
    assert after.outcome is Outcome.RAN
    assert process_of(after) != process_of(parts["before"])


def test_parts_share_a_process_unless_one_is_alone(parts: dict[str, PartResult]) -> None:
    """The import of torch takes seconds; a peer changes what other parts rely on."""
    after, beside, alone, last = (
        process_of(parts[name]) for name in ("after", "beside", "alone", "last")
    )
    assert after == beside
    assert len({after, alone, last}) == 3


def test_part_without_enough_time_is_left_out_and_a_shorter_one_runs(
    parts: dict[str, PartResult],
) -> None:
    assert [parts[name].outcome for name in ("long", "last")] == [Outcome.LEFT_OUT, Outcome.RAN]
    assert parts["long"].failure.startswith("takes about 1000000 s; ")


def test_what_passed_is_known_from_a_report(checked: tuple[Report, Path]) -> None:
    """A second loan goes on where the first one ended."""
    (file,) = checked[1].glob("gpu-*.json")
    assert settled_parts(file) == {"before", "after", "beside", "alone", "last"}


def test_report_names_the_machine_and_the_commit(checked: tuple[Report, Path]) -> None:
    report, _ = checked
    assert report.machine["device"] == "CPU"
    assert {"python", "torch", "triton"} <= set(report.machine)
    assert report.commit


def test_check_without_time_leaves_all_parts_out(tmp_path: Path) -> None:
    report = session(tmp_path, [part("count", to=1)], total=0.0).run()
    assert [each.outcome for each in report.parts] == [Outcome.LEFT_OUT]
    assert "count: takes about 1 s; 0 s were left" in report.text()


def test_end_of_the_time_cuts_the_running_part(tmp_path: Path) -> None:
    session_ = session(tmp_path, [part("hang"), part("count", to=1)], total=25.0)
    report = session_.run()
    assert [each.outcome for each in report.parts] == [Outcome.CUT, Outcome.LEFT_OUT]


def test_signal_keeps_what_was_found_and_names_the_rest(tmp_path: Path) -> None:
    """A machine that is taken back sends SIGTERM."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--only", "attention,graphs"]
    places = ["--checkpoints", str(tmp_path / "models"), "--out", str(tmp_path)]
    process = subprocess.Popen(
        [*command, *places],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("attention:")
    assert process.stdout.readline().strip().startswith("{'attention': ")
    running = saved(tmp_path)["parts"]
    assert [each["outcome"] for each in running] == ["running"]
    assert running[0]["rows"]
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    cut, left_out = saved(tmp_path)["parts"]
    assert [cut["outcome"], left_out["outcome"]] == ["cut", "left out"]
    assert cut["rows"]
    (page,) = tmp_path.glob("gpu-*.md")
    assert page.read_text().strip() in output


def test_check_on_a_machine_without_a_card_says_so(tmp_path: Path) -> None:
    arguments = ["--checkpoints", str(tmp_path), "--bundle", str(tmp_path / "none")]
    session_ = Session([part("count", to=1)], tmp_path, arguments, Limits(300))
    with pytest.raises(SystemExit, match="torch finds no CUDA device"):
        session_.run()
    (left_out,) = saved(tmp_path)["parts"]
    assert left_out["failure"] == "torch finds no CUDA device; --dry needs none"


def test_parts_are_chosen_by_name() -> None:
    names = [each.name for each in choose(PARTS, "logits, streams*")]
    assert names[0] == "logits"
    assert {name.split()[0] for name in names[1:]} == {"streams"}
    assert choose(PARTS, "") == list(PARTS)
    with pytest.raises(ValueError, match=r"no part has the name 'logit'; there are: "):
        choose(PARTS, "logit")


def test_names_of_the_parts_differ() -> None:
    assert len({each.name for each in PARTS}) == len(PARTS)
