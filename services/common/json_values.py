"""JSON values, as Python has them after parsing."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

__all__ = ["Json"]

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | int | float | bool | None"
