"""Pytest plugin of `make test`: a line that says what runs, instead of a dot for each test."""

import time
from collections.abc import Sequence

import pytest
from _pytest.terminal import TerminalReporter

_SECONDS = 20
"""Between two lines where there is no terminal to rewrite one"""


class Progress:
    """Share of the tests that ended, the time, and the file of the last one."""

    def __init__(self, terminal: TerminalReporter) -> None:
        self._terminal = terminal
        self._total = self._ended = 0
        self._began = self._written = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Sequence[str]) -> None:
        """Learn the number of tests, which is the same in each process."""
        self._total = len(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items) or self._total

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(
        self, report: pytest.TestReport | pytest.CollectReport
    ) -> tuple[str, str, str] | None:
        """Count what passes or is skipped without a letter."""
        if hasattr(report, "wasxfail"):
            return None
        if report.skipped:
            return "skipped", "", ""
        if report.passed and report.when == "call":
            return "passed", "", ""
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line(f"\nFAILED in {report.when}: {report.nodeid}", red=True)
        if report.when == "teardown":
            self._ended += 1
            self._write(report.nodeid.partition("::")[0])

    def _write(self, file: str) -> None:
        now = time.monotonic()
        is_last = self._ended == self._total
        if now - self._written < (0.1 if self._terminal.isatty else _SECONDS) and not is_last:
            return
        self._written = now
        minutes, seconds = divmod(round(now - self._began), 60)
        share = 100 * self._ended // max(1, self._total)
        line = f"{share:3} %  {self._ended} of {self._total} tests, {minutes}:{seconds:02}  {file}"
        if self._terminal.isatty:
            self._terminal.rewrite(line, erase=True)
        else:
            self._terminal.write_line(line)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Replace the dots in the process that has the terminal."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(terminal), "tokenwire-progress")
