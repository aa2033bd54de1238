"""Typed reading of a checkpoint's JSON files, with errors that name the file and the key."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from services.common.json_values import Json
from services.engine.model.checkpoint.errors import CheckpointError

__all__ = ["Config", "JsonObject"]

JsonObject: TypeAlias = dict[str, Json]


@dataclass(frozen=True, slots=True)
class Config:
    """A JSON object from a checkpoint. A key that is absent and one that is null are the same."""

    file: str
    """Named in every error"""
    values: JsonObject
    keys: Mapping[str, str] = field(default_factory=dict)
    """What the file calls some keys: GPT-2 says n_embd for hidden_size"""

    @staticmethod
    def read(path: Path) -> "Config":
        """Raises CheckpointError when `path` is missing, unreadable or not a JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist.") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} does not hold a JSON object.")
        return Config(str(path), values)

    def has(self, key: str) -> bool:
        return self._find(key) is not None

    def called(self, key: str) -> str:
        """What the file calls a key, for errors."""
        return self.keys.get(key, key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value <= 0:
            raise self._wrong(key, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        return float(value)

    def positive_number(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if not 0 < value < math.inf:
            raise self._wrong(key, "a positive number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._value(key, None)
        texts = [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
        if not isinstance(value, list) or len(texts) != len(value):
            raise self._wrong(key, "a list of strings")
        return tuple(texts)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._value(key, None)
        items = value if isinstance(value, list) else []
        numbers = [
            float(item)
            for item in items
            if isinstance(item, int | float) and not isinstance(item, bool)
        ]
        if not isinstance(value, list) or len(numbers) != len(items):
            raise self._wrong(key, "a list of numbers")
        return tuple(numbers)

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as one integer, as a list of them, or not at all."""
        value = self._find(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        ids = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if len(ids) != len(items):
            raise self._wrong(key, "a token id or a list of them")
        return tuple(ids)

    def section(self, key: str) -> "Config":
        """The object under `key`, empty when it is absent."""
        value = self._find(key)
        if value is None:
            return Config(self.file, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return Config(self.file, value)

    def _value(self, key: str, default: Json) -> Json:
        value = self._find(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.file} lacks {self.called(key)}.")
        return value

    def _find(self, key: str) -> Json:
        return self.values.get(self.called(key))

    def _wrong(self, key: str, wanted: str) -> CheckpointError:
        value = json.dumps(self._find(key))
        return CheckpointError(
            f"{self.file}: {self.called(key)} must be {wanted}, not {value[:80]}."
        )
