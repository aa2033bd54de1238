"""GGUF files: typed metadata, and the place of each tensor.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. The reader
of the package `gguf` makes an object of each token, which takes seconds for a large vocabulary.
"""

import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

__all__ = ["GgufError", "GgufFile", "GgufTensor", "Value", "first_metadata"]

Value: TypeAlias = "bool | int | float | str | list[bool] | list[int] | list[float] | list[str]"

_MAGIC = b"GGUF"
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Format of each numeric type of metadata, as `struct` names it"""
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
"""Default alignment of tensors, in bytes"""
_LENGTH_BYTES = 8
_MOST_DIMENSIONS = 4
_TOKENIZER = "tokenizer."
"""Beginning of the keys of the vocabulary, which writers put behind all others"""
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufError(Exception):
    """The file is not a GGUF file, or can't be read. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file."""

    name: str
    shape: tuple[int, ...]
    """Sizes of the dimensions, slowest first (the file has them fastest first)"""
    kind: int
    """Number of the tensor's type in ggml"""
    file: Path
    start: int
    """Offset of the tensor in the file, in bytes"""


class GgufFile:
    """A GGUF file, or all parts of a split file."""

    def __init__(self, path: Path) -> None:
        """Read the metadata. Raises GgufError for a file that is damaged, truncated or not GGUF."""
        self.path = path
        self.metadata: Mapping[str, Value] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self.sizes: dict[Path, int] = {}
        """Bytes of each part"""
        for part in _parts(path):
            header = _Header(part)
            self.metadata = self.metadata or header.metadata
            self.tensors |= header.tensors
            self.sizes[part] = header.size

    @property
    def architecture(self) -> str:
        """Name of the architecture in llama.cpp."""
        return self.text("general.architecture")

    def own(self, key: str) -> str:
        """Return the full name of a key, which begins with the name of the architecture."""
        return f"{self.architecture}.{key}"

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string. Raises GgufError if it is missing or of another type."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number. Raises GgufError if it is missing or of another type."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        if not math.isfinite(value):
            raise self._wrong(key, "a finite number")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0. Raises GgufError for any other value."""
        value = self.number(key, default)
        if value <= 0:
            raise self._wrong(key, f"a number above 0, not {value:g}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number; a list must have equal entries. Raises GgufError otherwise."""
        value = self.metadata.get(key, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "a whole number")
        return value

    def count(
        self, key: str, default: int | None = None, *, least: int = 1, most: int | None = None
    ) -> int:
        """Return a whole number from `least` to `most`. Raises GgufError for any other value."""
        value = self.integer(key, default)
        if value < least or (most is not None and value > most):
            bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise self._wrong(key, f"a whole number {bounds}, not {value}")
        return value

    def integers(
        self, key: str, count: int, default: int | None = None, *, least: int = 0
    ) -> list[int]:
        """Return a whole number for each of `count` layers: a list, or one number for all.

        least: bound on one number for all layers; the numbers of a list may be 0. Raises GgufError
        for a smaller number.
        """
        value = self.metadata.get(key, default)
        if not isinstance(value, list):
            return [self.count(key, default, least=least)] * count
        numbers = [each for each in value if isinstance(each, int)]
        if len(numbers) != len(value) or len(numbers) < count:
            raise self._wrong(key, f"a whole number or {count} of them")
        if min(numbers) < 0:
            raise self._wrong(key, f"whole numbers of at least 0, not {min(numbers)}")
        return numbers

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false. Raises GgufError if it is of another type."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of strings, empty if it is missing. Raises GgufError for another type."""
        value = self.metadata.get(key, [])
        if not isinstance(value, list):
            raise self._wrong(key, "a list of strings")
        texts = [each for each in value if isinstance(each, str)]
        if len(texts) != len(value):
            raise self._wrong(key, "a list of strings")
        return texts

    def numbers(self, key: str, *, finite: bool = True) -> list[float]:
        """Return a list of numbers, empty if it is missing. Raises GgufError for another type.

        finite: whether an infinity or NaN raises GgufError, too.
        """
        value = self.metadata.get(key, [])
        if not isinstance(value, list):
            raise self._wrong(key, "a list of numbers")
        numbers = [each for each in value if isinstance(each, int | float)]
        if len(numbers) != len(value):
            raise self._wrong(key, "a list of numbers")
        if finite and not all(map(math.isfinite, numbers)):
            raise self._wrong(key, "a list of finite numbers")
        return numbers

    def floats(self, name: str) -> list[float] | None:
        """Return a float32 tensor; None if there is none. Raises GgufError for another type."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.kind != 0 or len(tensor.shape) != 1:
            raise GgufError(f"{tensor.file}: {name} must be a list of float32 numbers.")
        count = tensor.shape[0]
        if tensor.start + 4 * count > self.sizes[tensor.file]:
            raise GgufError(f"{tensor.file} is truncated: {name} ends beyond it.")
        with tensor.file.open("rb") as opened:
            opened.seek(tensor.start)
            return list(struct.unpack(f"<{count}f", opened.read(4 * count)))

    def _wrong(self, key: str, wanted: str) -> GgufError:
        if key not in self.metadata:
            return GgufError(f"{self.path} lacks {key}.")
        return GgufError(f"{self.path}: {key} must be {wanted}.")


def first_metadata(path: Path) -> Mapping[str, Value]:
    """Return the metadata before the tokenizer's: name, sizes and context. Raises GgufError."""
    return _Header(path, only_first=True).metadata


class _Header:
    """Everything before the tensors of one file."""

    def __init__(self, path: Path, *, only_first: bool = False) -> None:
        """Read a file. only_first: stop before the tokenizer, which is most of the metadata."""
        self._path = path
        self._at = 0
        self._only_first = only_first
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as opened:
                self.size = os.fstat(opened.fileno()).st_size
                if self.size < len(_MAGIC) or opened.read(len(_MAGIC)) != _MAGIC:
                    raise GgufError(f"{path} is not a GGUF file.")
                with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as self._bytes:
                    self._read()
        except OSError as error:
            raise GgufError(f"{path} can't be read: {error.strerror}.") from None

    def _read(self) -> None:
        self._at = len(_MAGIC)
        version = self._number("I")
        if version not in (2, 3):
            raise GgufError(
                f"{self._path} has version {version} of GGUF; versions 2 and 3 are read."
            )
        num_tensors, num_values = int(self._number("Q")), int(self._number("Q"))
        for _ in range(num_values):
            key = self._string()
            if self._only_first and key.startswith(_TOKENIZER):
                return
            self.metadata[key] = self._value(int(self._number("I")))
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(f"{self._path}: general.alignment must be a positive whole number.")
        first = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in found:
            if first + offset > self.size:
                raise self._truncated()
            self.tensors[name] = GgufTensor(name, shape, kind, self._path, first + offset)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, count = self._string(), int(self._number("I"))
        if not 1 <= count <= _MOST_DIMENSIONS:
            raise GgufError(f"{self._path}: the tensor {name} has {count} dimensions.")
        shape = self._unpack(f"{count}Q")
        kind, offset = self._unpack("IQ")
        return name, tuple(int(size) for size in reversed(shape)), int(kind), int(offset)

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._number(self._format(kind))

    def _array(self) -> Value:
        kind, count = self._unpack("IQ")
        if count > self.size:
            raise self._truncated()
        if kind == _STRING:
            return self._strings(int(count))
        return list(self._unpack(f"{int(count)}{self._format(int(kind))}"))

    def _format(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise GgufError(f"{self._path} is damaged: it has a value of the unknown type {kind}.")
        return _NUMBERS[kind]

    def _number(self, layout: str) -> int | float | bool:
        (number,) = self._unpack(layout)
        return number

    def _string(self) -> str:
        (string,) = self._strings(1)
        return string

    def _strings(self, count: int) -> list[str]:
        """Read strings. A vocabulary has hundreds of thousands."""
        content, at, size, found = self._bytes, self._at, self.size, []
        for _ in range(count):
            start = at + _LENGTH_BYTES
            at = start + int.from_bytes(content[at:start], "little")
            if at > size:
                raise self._truncated()
            found.append(content[start:at])
        self._at = at
        try:
            return [string.decode() for string in found]
        except UnicodeDecodeError:
            raise GgufError(f"{self._path} is damaged: a string in it is not UTF-8.") from None

    def _unpack(self, layout: str) -> tuple[int | float | bool, ...]:
        try:
            values = struct.unpack_from(f"<{layout}", self._bytes, self._at)
        except struct.error:
            raise self._truncated() from None
        self._at += struct.calcsize(f"<{layout}")
        return values

    def _truncated(self) -> GgufError:
        return GgufError(f"{self._path} is damaged or truncated; download it again.")


def _parts(path: Path) -> list[Path]:
    """Return all parts of a split file, in order. Raises GgufError if one is missing."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    parts = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [part for part in parts if not part.is_file()]
    if missing:
        raise GgufError(f"{path} is a part of a split file, and {missing[0].name} is missing.")
    return parts
