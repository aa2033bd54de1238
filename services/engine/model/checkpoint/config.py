"""Typed access to a checkpoint's JSON files, with errors that name the file and the key."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from services.common.gguf.gguf_config import MARK
from services.common.json_values import Json

__all__ = ["CheckpointError", "Config", "JsonObject"]

JsonObject: TypeAlias = dict[str, Json]


class CheckpointError(Exception):
    """A checkpoint cannot be served; the message names the file and the cause in one line."""


_UNBOUNDED = {"Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON lacks, as transformers names them under the key __float__"""
_INTEGERS = 1 << 63
"""Least integer that is refused: neither tensors' shapes nor floats could hold larger ones"""


def _as_number(item: Json) -> float | None:
    """Return a number; None if `item` is another value."""
    if isinstance(item, dict):
        name = item.get("__float__")
        return _UNBOUNDED.get(name) if isinstance(name, str) else None
    if isinstance(item, float):
        return item
    return None if (number := _as_integer(item)) is None else float(number)


def _as_integer(item: Json) -> int | None:
    """Return an integer of 64 bits; None if `item` is another value."""
    if isinstance(item, bool) or not isinstance(item, int) or abs(item) >= _INTEGERS:
        return None
    return item


@dataclass(frozen=True, slots=True)
class Config:
    """A JSON object from a checkpoint. A null value counts as an absent key."""

    file: str
    """File name in errors"""
    values: JsonObject
    keys: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys in the file, such as n_embd for hidden_size in GPT-2"""

    @staticmethod
    def read(path: Path) -> "Config":
        """Read `path`. Raises CheckpointError if it is missing, unreadable or not a JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist.") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} does not hold a JSON object.")
        described = values.get(MARK)
        original = described.get("file") if isinstance(described, dict) else None
        return Config(original if isinstance(original, str) else str(path), values)

    def has(self, key: str) -> bool:
        return self._find(key) is not None

    def file_key(self, key: str) -> str:
        """Return the file's own name for `key`."""
        own = self.keys.get(key, key)
        return key if own not in self.values and key in self.values else own

    def without(self, key: str) -> "Config":
        """Return a config that looks `key` up under this name instead of the file's own."""
        return replace(self, keys={each: name for each, name in self.keys.items() if each != key})

    def integer(self, key: str, default: int | None = None) -> int:
        value = _as_integer(self._value(key, default))
        if value is None:
            raise self._wrong(key, "an integer of 64 bits")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value <= 0:
            raise self._wrong(key, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        number = value if isinstance(value, float) else _as_integer(value)
        if number is None:
            raise self._wrong(key, "a number")
        return float(number)

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
        items = self._value(key, None)
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise self._wrong(key, "a list of strings")
        return tuple(map(str, items))

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._value(key, None)
        items = value if isinstance(value, list) else []
        numbers = [found for item in items if (found := _as_number(item)) is not None]
        if not isinstance(value, list) or len(numbers) != len(items):
            raise self._wrong(key, "a list of numbers")
        return tuple(numbers)

    def ids(self, key: str) -> tuple[int, ...]:
        """Return the token ids under `key`, which holds an integer or a list; none if absent."""
        value = self._find(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        ids = [number for item in items if (number := _as_integer(item)) is not None]
        if len(ids) != len(items):
            raise self._wrong(key, "a token id or a list of them")
        return tuple(ids)

    def integers(self, key: str) -> tuple[int, ...]:
        """Return the list of integers under `key`."""
        items = self._value(key, None)
        if not isinstance(items, list):
            raise self._wrong(key, "a list of integers")
        numbers = [number for item in items if (number := _as_integer(item)) is not None]
        if len(numbers) != len(items):
            raise self._wrong(key, "a list of integers")
        return tuple(numbers)

    def per_layer(self, key: str, num_layers: int, default: int | None = None) -> tuple[int, ...]:
        """Return each layer's positive integer from `key`, which holds a list or one for all."""
        items = self._find(key)
        if not isinstance(items, list):
            return (self.positive(key, default),) * num_layers
        numbers = [number for item in items if (number := _as_integer(item)) and number > 0]
        if len(numbers) != len(items) or len(numbers) != num_layers:
            raise self._wrong(key, f"a positive integer or {num_layers} of them")
        return tuple(numbers)

    def kind_per_layer(
        self, key: str, num_layers: int, known: tuple[str, ...], *, cuts: bool = False
    ) -> tuple[str, ...]:
        """Return the kind of each layer under `key`, a list of names among `known`.

        cuts: leave out the kinds of layers after the last one, which predict further tokens.
        """
        kinds = self.texts(key)[: num_layers if cuts else None]
        if len(kinds) != num_layers:
            raise CheckpointError(
                f"{self.file}: {key} names {len(kinds)} layers, num_hidden_layers {num_layers}."
            )
        for layer, kind in enumerate(kinds):
            if kind not in known:
                raise CheckpointError(
                    f"{self.file}: {key} gives layer {layer} the type {kind}, which is not "
                    f"supported here. Supported: {', '.join(known)}."
                )
        return kinds

    def section(self, key: str) -> "Config":
        """Return the object under `key`, empty if absent."""
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
            raise CheckpointError(f"{self.file} lacks {self.file_key(key)}.")
        return value

    def _find(self, key: str) -> Json:
        return self.values.get(self.file_key(key))

    def _wrong(self, key: str, wanted: str) -> CheckpointError:
        value = json.dumps(self._find(key))
        return CheckpointError(
            f"{self.file}: {self.file_key(key)} must be {wanted}, not {value[:80]}."
        )
