"""Facts of a checkpoint's files that people know models by: family, parameters, quantization."""

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.gguf.checkpoint_files import PARTS
from services.common.gguf.ggml_types import BLOCK_SIZES, GgmlType
from services.common.gguf.gguf_file import GgufError, GgufFile

__all__ = ["CheckpointFacts", "bytes_by_type", "checkpoint_facts"]

_MOST_HEADER = 100_000_000
"""Bytes of the header of a safetensors file, as the format limits them"""
_GGUF_TYPES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}  # fmt: skip
"""Names of general.file_type (enum llama_ftype in llama.h)"""


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """Facts of the files of a checkpoint; "" and 0 = not known."""

    format: str = ""
    """gguf or safetensors"""
    family: str = ""
    """Name of the architecture: model_type of config.json, or that of llama.cpp"""
    quantization: str = ""
    """Type of most weights, such as Q4_K_M or BF16"""
    parameters: int = 0
    num_bytes: int = 0
    """Size of the files with weights"""
    width: int = 0
    """Numbers of a hidden state"""
    layers: int = 0


def checkpoint_facts(directory: Path) -> CheckpointFacts:
    """Return the facts of a checkpoint in Hugging Face form, which may link to a GGUF file."""
    config = _config(directory)
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    width, layers = (_count(inner.get(name)) for name in ("hidden_size", "num_hidden_layers"))
    parts = sorted((directory / PARTS).glob("*.gguf"))
    try:
        if parts:
            return _of_gguf(GgufFile(parts[0].resolve()), width, layers)
        return _of_safetensors(directory, config, width, layers)
    except (GgufError, OSError, ValueError):
        return CheckpointFacts(family=_family(config), width=width, layers=layers)


def bytes_by_type(directory: Path) -> Mapping[str, int]:
    """Return the bytes of the weights by the type in which they are stored, most bytes first.

    directory: as for `checkpoint_facts`. The result is empty for files that can't be read.
    """
    sizes: Counter[str] = Counter()
    parts = sorted((directory / PARTS).glob("*.gguf"))
    try:
        if parts:
            for tensor in GgufFile(parts[0].resolve()).tensors.values():
                kind = GgmlType(tensor.kind)
                numbers, num_bytes = BLOCK_SIZES[kind]
                sizes[kind.name] += math.prod(tensor.shape) // numbers * num_bytes
        for file in directory.glob("*.safetensors"):
            for dtype, _, num_bytes in _tensors(file):
                sizes[dtype] += num_bytes
    except (GgufError, OSError, ValueError):
        return {}
    return dict(sizes.most_common())


def _of_gguf(file: GgufFile, width: int, layers: int) -> CheckpointFacts:
    kind = file.metadata.get("general.file_type")
    name = _GGUF_TYPES.get(kind) if isinstance(kind, int) else None
    numbers: Counter[int] = Counter()
    for tensor in file.tensors.values():
        numbers[tensor.kind] += math.prod(tensor.shape)
    if name is None:
        [(most, _)] = numbers.most_common(1) or [(-1, 0)]
        name = GgmlType(most).name if most in GgmlType.__members__.values() else ""
    size = sum(file.sizes.values())
    parameters = sum(numbers.values())
    return CheckpointFacts("gguf", file.architecture, name, parameters, size, width, layers)


def _of_safetensors(
    directory: Path, config: Mapping[str, Any], width: int, layers: int
) -> CheckpointFacts:
    numbers: Counter[str] = Counter()
    files = sorted(directory.glob("*.safetensors"))
    for file in files:
        for dtype, shape, _ in _tensors(file):
            numbers[dtype] += math.prod(shape)
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    [(most, _)] = numbers.most_common(1) or [("", 0)]
    return CheckpointFacts(
        "safetensors",
        _family(config),
        method.upper() if isinstance(method, str) else most,
        sum(numbers.values()),
        sum(file.stat().st_size for file in files),
        width,
        layers,
    )


def _tensors(file: Path) -> Iterator[tuple[str, list[int], int]]:
    """Yield type, shape and bytes of each tensor. Raises OSError and ValueError."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\0"))
        if length > _MOST_HEADER:
            raise ValueError("the header is too large")
        header = json.loads(opened.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            yield tensor["dtype"], tensor["shape"], end - begin


def _config(directory: Path) -> Mapping[str, Any]:
    try:
        values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _family(config: Mapping[str, Any]) -> str:
    family = config.get("model_type")
    return family if isinstance(family, str) else ""


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**32 else 0
