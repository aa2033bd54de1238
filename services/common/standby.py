"""Prepared process of a service: it has imported its modules, and waits for its arguments."""

import json
import sys

__all__ = ["STANDBY", "awaited_arguments"]

STANDBY = "--standby"
"""The only argument of a prepared process, which gets the others on standard input"""


def awaited_arguments() -> list[str] | None:
    """Return the arguments of a prepared process; None for one that has them already.

    They come as a line of JSON, a list of texts. A process that gets none ends.
    """
    if sys.argv[1:] != [STANDBY]:
        return None
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(0)
    arguments = json.loads(line)
    return [str(argument) for argument in arguments]
