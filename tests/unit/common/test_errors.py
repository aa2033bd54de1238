"""Errors of unexpected exceptions: a defect, or a machine that lacks something."""

import errno

import pytest

from services.common.errors import internal_error


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (OSError(errno.EAGAIN, "no process is left"), "UNAVAILABLE"),
        (OSError(errno.EMFILE, "no file is left"), "UNAVAILABLE"),
        (OSError(-1, "Unknown error -1"), "UNAVAILABLE"),  # uvloop's, for want of a descriptor
        (OSError(errno.ENOSPC, "the disk is full"), "UNAVAILABLE"),
        (MemoryError(), "UNAVAILABLE"),
        (RuntimeError("can't start new thread"), "UNAVAILABLE"),
        (OSError(errno.ENOENT, "a file is gone"), "INTERNAL"),
        (RuntimeError("a defect"), "INTERNAL"),
    ],
    ids=["process", "file", "pipe", "disk", "memory", "thread", "missing", "defect"],
)
def test_lack_of_resources_asks_for_another_try(failure: Exception, expected: str) -> None:
    try:
        raise failure
    except (OSError, MemoryError, RuntimeError):
        error = internal_error()
    assert error.code.name == expected
    assert (error.retry_seconds is not None) == (expected == "UNAVAILABLE")
