"""Parts of a check that end in every way."""

import os
import threading

from benchmarks.gpu.context import Context, Row, Rows, UnavailableError


def count(context: Context, to: int) -> Rows:
    for number in range(to):
        yield {"number": number, "process": os.getpid()}


def fail(context: Context) -> Rows:
    yield {"number": 0}
    raise ArithmeticError("no such product")


def hang(context: Context) -> Rows:
    yield {"number": 0}
    wait_for_ever()


def wait_for_ever() -> None:
    threading.Event().wait()


def die(context: Context) -> Rows:
    yield {"number": 0}
    print("out of memory", flush=True)
    os._exit(7)


def lack(context: Context) -> Rows:
    raise UnavailableError("there is no second card")


def exceed(context: Context) -> Rows:
    row: Row = {"error": 0.5, "ok": False}
    yield row
