"""Shared library of the kernels, in this process."""

import ctypes

import torch  # noqa: F401  loads libgomp.so.1, which the library needs

from services.engine.kernels.build import LIBRARY
from services.engine.kernels.freshness import require_current

__all__ = ["header", "loaded"]


def _load() -> ctypes.CDLL | None:
    if not LIBRARY.exists():
        return None
    require_current()
    # With torch's libgomp, both have one thread pool, which torch.set_num_threads sizes.
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None  # compiled for another system


loaded: ctypes.CDLL | None = _load()
"""The loaded library; None if the package was built without a compiler"""


def header() -> str:
    """Return the text of src/kernels.h at the compilation; empty without a library."""
    if loaded is None:
        return ""
    text = ctypes.c_char.in_dll(loaded, "tw_header")
    return ctypes.string_at(ctypes.addressof(text)).decode()
