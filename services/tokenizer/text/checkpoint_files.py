"""Files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from services.common.settings import StartupError

__all__ = ["read_json", "read_text"]


def read_text(path: Path) -> str | None:
    """None where there is no such file. Raises StartupError for one that is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} can't be read: {error}.") from None


def read_json(path: Path) -> dict[str, Any]:
    """{} where there is no such file. Raises StartupError for one that is no JSON object."""
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object.")
    return value
