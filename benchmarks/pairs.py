"""Speed of this checkout beside that of another commit, in alternating runs.

    python -m benchmarks.pairs --before main~20 --model M --scenarios S1,S8,S32 --rounds 5

Both servers are up all the time, and the one that waits uses no CPU time. Hours of a machine
differ by 30 %, so only the ratios within the pairs mean anything.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks import CACHE
from benchmarks.load import Measurement, measure, warm_up
from benchmarks.peers import Tokenwire
from benchmarks.processes import Launch, ProcessTree, free_port, running
from benchmarks.prompts import Prompts, vocabulary_size
from benchmarks.run import chosen_scenarios
from benchmarks.scenarios import Scenario
from benchmarks.tables import markdown
from tokenwire.load.load_run import Target

ROOT = Path(__file__).resolve().parents[1]
_BUILD = """
import sys
sys.argv[1:] = ["--name"]
import setup
setup.generate_stubs()
setup.build_kernels()
"""


class _Checkout(Tokenwire):
    """Tokenwire of one folder, in this environment."""

    def __init__(self, folder: Path, engine_args: str) -> None:
        super().__init__(engine_args)
        self._folder = folder

    def launch(self, python: Path, model: Path, port: int) -> Launch:
        launch = super().launch(python, model, port)
        # the services are started as modules, which Python would find in the working directory
        found = {"PYTHONPATH": str(self._folder), "PYTHONSAFEPATH": "1"}
        command = list(launch.command)
        if not Path(self._folder, "services", "jobs").exists():
            command.remove("--no-jobs")  # a commit from before this service and its option
        return replace(launch, command=command, environment={**launch.environment, **found})


@contextmanager
def _checkout_of(commit: str) -> Iterator[Path]:
    """Check a commit out, and make its stubs and kernels."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "before")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
        try:
            environment = os.environ | {"PYTHONPATH": str(folder)}
            command = [sys.executable, "-c", _BUILD]
            subprocess.run(
                command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL
            )
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


@contextmanager
def _started(
    folder: Path, arguments: argparse.Namespace, log: Path
) -> Iterator[tuple[Target, ProcessTree]]:
    server = _Checkout(folder, arguments.engine_args)
    launch = server.launch(Path(sys.executable), arguments.model, free_port())
    with running(launch, log) as tree:
        yield Target(launch.url, server.served_name(arguments.model)), tree


async def _pair(
    servers: Sequence[tuple[Target, ProcessTree]], scenario: Scenario, prompts: Prompts
) -> list[Measurement]:
    return [await measure(target, scenario, prompts, tree) for target, tree in servers]


async def _compare(
    before: tuple[Target, ProcessTree], after: tuple[Target, ProcessTree], args: argparse.Namespace
) -> list[list[str]]:
    """Return a row for each scenario: the medians of the ratios, of its figure and of CPU time."""
    rows = [["scenario", "figure", "before", "after", "after ÷ before", "CPU time, after ÷ before"]]
    vocabulary = vocabulary_size(args.model)
    for scenario in chosen_scenarios(args.scenarios):
        for target, _ in (before, after):
            await warm_up(target, scenario, Prompts(vocabulary, f"{args.seed} warm-up"))
        old, new = [], []
        for number in range(args.rounds):
            prompts = Prompts(vocabulary, f"{args.seed} {number}")  # none is cached
            if number % 2:  # neither is always the first
                pair = (await _pair((after, before), scenario, prompts))[::-1]
            else:
                pair = await _pair((before, after), scenario, prompts)
            old.append(pair[0])
            new.append(pair[1])
        rows.append(_row(scenario, old, new))
        print(rows[-1], flush=True)
    return rows


def _row(scenario: Scenario, old: Sequence[Measurement], new: Sequence[Measurement]) -> list[str]:
    def figures(measurements: Sequence[Measurement]) -> list[float]:
        return [each.figure(scenario.figure) or float("nan") for each in measurements]

    def ratio(pairs: Iterator[tuple[float, float]]) -> str:
        return f"{statistics.median(b / a for a, b in pairs):.3f}"

    cpu = zip((m.server_cpu or 0 for m in old), (m.server_cpu or 0 for m in new), strict=True)
    return [
        scenario.name,
        scenario.figure.value,
        f"{statistics.median(figures(old)):.1f}",
        f"{statistics.median(figures(new)):.1f}",
        ratio(zip(figures(old), figures(new), strict=True)),
        ratio(cpu),
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", required=True, help="commit to compare with")
    parser.add_argument("--model", type=Path, default=CACHE / "models" / "bench-350m")
    parser.add_argument("--scenarios", default="S1,S8,S32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine-args", default="")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Run the command."""
    arguments = _arguments()
    arguments.model = arguments.model.resolve()
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = stack.enter_context(_checkout_of(arguments.before))
        before = stack.enter_context(_started(folder, arguments, logs / "before.log"))
        after = stack.enter_context(_started(ROOT, arguments, logs / "after.log"))
        rows = asyncio.run(_compare(before, after, arguments))
    print(markdown(rows))


if __name__ == "__main__":
    main()
