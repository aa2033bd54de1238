"""Check that the compiled kernels are those of the sources beside them."""

from pathlib import Path

from services.common.settings import StartupError
from services.engine.kernels.build import LIBRARY, is_current

__all__ = ["require_current"]


def require_current(library: Path = LIBRARY) -> None:
    """Raise StartupError for a library that was compiled from other sources.

    Its structures may have other fields: it would compute wrong results, or crash. A wheel has no
    sources: its build compiles the library that it packs.
    """
    if library.exists() and not is_current(library):
        raise StartupError(
            f"The kernels in {library} were compiled from other sources than those beside them. "
            "Rebuild them with python -m services.engine.kernels.build."
        )
