"""Parts of the process that do not work now: named by /ready, gRPC health and a metric."""

from collections import Counter
from collections.abc import Callable, Sequence

from prometheus_client import Gauge

__all__ = ["begin_fault", "end_fault", "faulty_parts", "follow_faults"]

_FAULT = Gauge("tokenwire_fault", "1 while this part of the service does not work.", ["part"])
_faults: Counter[str] = Counter()
_followers: list[Callable[[str, bool], None]] = []


def begin_fault(part: str) -> None:
    """Note that a part does not work. It works again after as many calls of `end_fault`."""
    _faults[part] += 1
    _notify(part)


def end_fault(part: str) -> None:
    """Take back one call of `begin_fault` for a part."""
    _faults[part] -= 1
    _notify(part)


def faulty_parts() -> Sequence[str]:
    """Return the names of the parts that do not work."""
    return sorted(part for part, count in _faults.items() if count > 0)


def follow_faults(on_change: Callable[[str, bool], None]) -> None:
    """Call `on_change` at each change with a part's name and whether the part works."""
    _followers.append(on_change)


def _notify(part: str) -> None:
    works = _faults[part] <= 0
    _FAULT.labels(part).set(not works)
    for follower in _followers:
        follower(part, works)
