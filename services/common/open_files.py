"""How many files a service may have open: every connection is one."""

import contextlib
import resource

__all__ = ["allow_many"]


def allow_many() -> None:
    """Raise the soft limit to the hard one. At the limit, new connections are reset unseen."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # where "unlimited" is more than the system has
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
