"""Descriptions of processes' exit statuses."""

import signal

__all__ = ["exit_status"]


def exit_status(code: int | None) -> str:
    """Describe an exit status: "signal SIGKILL" for -9, "exit code 1" for 1."""
    if code is None or code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}"
