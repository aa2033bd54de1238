"""Sizes of a checkpoint's weights, from the headers of its files alone. Free of torch."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, prod
from pathlib import Path

from services.common.gguf.gguf_file import GgufFile
from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["StoredWeights", "count_parameters"]

_FLOATS = {"F64": 4, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 4, "F8_E5M2": 4}
"""Types of safetensors whose numbers are weights, and the bytes that each number takes in memory
as it is, or decoded"""
_GGUF_FLOATS = {0: 4, 1: 2, 30: 2, **dict.fromkeys((16, 17, 18, 19, 21, 22, 29, 34), 4)}
"""Bytes of a weight in memory by the number of its ggml type: float32, float16, bfloat16, and the
types that are decoded at loading"""
_PLAIN = frozenset({0, 1, 30})
"""ggml's numbers of float32, float16 and bfloat16"""
_MAPPABLE = frozenset({*range(2, 4), *range(6, 9), *range(10, 15), 20, 23, 35, 39})
"""ggml's numbers of the types whose blocks products can read where they lie"""
_EMBEDDINGS = (
    *("embed_tokens.weight", "token_embd.weight", "wte.weight", "word_embeddings.weight"),
    "embed.weight",
)
_HEADS = ("lm_head.weight", "output.weight", "embed_out.weight", "head.weight")
_ADAPTERS = (".lora_A", ".lora_B", ".lora_A.weight", ".lora_B.weight")
"""Name endings of tasks' adapters, beside the weights (Jina v3) and in files of their own"""
_MXFP4 = ("_blocks", "_scales")
"""Name endings of experts in MXFP4"""
_BYTES_OF_FORMAT = {"int8": 1.0, "w8a8": 1.0, "fp8": 1.0, "int4": 0.5625}
"""Bytes of a number by the format that rounds it; int4 has a 16-bit scale for 32 numbers"""
_SMALL = 65536
"""Most bytes of a tensor of integers that holds no weights, such as positions"""
_FLOAT32_BYTES = 4
_LENGTH_BYTES = 8
_NUMBER_BYTES = {"bfloat16": 2, "float16": 2}
"""Bytes of a number by the dtype in config.json"""


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    numbers: int
    num_bytes: int
    float_bytes: int
    """Bytes of a number in floating point that stays as it is; 0: the tensor has codes"""
    is_mappable: bool


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Sizes of the weights that products read. The table of the tokens stays in the mapped file."""

    floats: int
    """Count of numbers in floating point"""
    coded: int
    """Count of numbers in codes; in safetensors, where a byte may hold two, count of bytes"""
    coded_bytes: int
    float_bytes: int = 0
    """Bytes of the numbers in floating point that stay as they are"""
    mapped_bytes: int = 0
    """Bytes of codes that products can read where they lie: in blocks, row by row"""
    is_rounded: bool = False
    """True if weights in floating point were rounded before the file was written, so that --weights
    does not round them again"""
    adapters: int = 0
    """Count of numbers in the adapters of tasks, which have --dtype whatever the weights have"""
    table: int = 0
    """Count of numbers in the table of the tokens"""

    @staticmethod
    def of_gguf(file: GgufFile) -> "StoredWeights":
        """Return the sizes of a GGUF file's weights."""
        weights = _total(list(_gguf_tensors(file)))
        return replace(weights, is_rounded=not _kinds(file) <= _PLAIN)

    @staticmethod
    def of_directory(directory: Path, adapters: Iterable[Path] = ()) -> "StoredWeights":
        """Return the sizes of the safetensors files. Raises CheckpointError for damaged ones.

        adapters: directories of the adapters that are loaded with the weights.
        """
        folders = (directory, *adapters)
        files = [file for each in folders for file in sorted(each.glob("*.safetensors"))]
        return _total([tensor for file in files for tensor in _tensors(file)])

    @staticmethod
    def of_sizes(num_bytes: int, config: Config | None) -> "StoredWeights":
        """Return the least sizes for files of so many bytes whose headers are not known yet.

        config: their config.json; None = they are GGUF files.
        """
        if config is None:
            return StoredWeights(0, num_bytes, num_bytes, mapped_bytes=num_bytes)
        if config.has("quantization_config"):
            method = config.values["quantization_config"]
            is_mxfp4 = isinstance(method, dict) and method.get("quant_method") == "mxfp4"
            return StoredWeights(0, num_bytes, num_bytes, mapped_bytes=num_bytes if is_mxfp4 else 0)
        dtype = config.values.get("dtype") or config.values.get("torch_dtype")
        return StoredWeights(num_bytes // _NUMBER_BYTES.get(str(dtype), 4), 0, 0, num_bytes)

    def on_gpu(self, *, packs: bool) -> "StoredWeights":
        """Return the sizes in a GPU's memory, which holds the table of the tokens in --dtype, too.

        packs: True if codes stay as small as in the files; False: they are decoded to --dtype.
        """
        held = replace(self, adapters=self.adapters + self.table)
        if packs or not self.coded:
            return held
        return replace(
            held, floats=self.floats + self.coded, coded=0, coded_bytes=0, is_rounded=True
        )

    def num_bytes(self, weights: str, number_bytes: float | None) -> int:
        """Return the least bytes that the weights take in memory.

        weights: value of --weights. number_bytes: bytes of a number of --dtype; None = numbers stay
        as they are, and decoded ones are float32.
        """
        adapters = self.adapters * ceil(number_bytes or _FLOAT32_BYTES)
        if weights == "decoded":
            return adapters + int((self.floats + self.coded) * (number_bytes or _FLOAT32_BYTES))
        coded_bytes = self.coded_bytes - (self.mapped_bytes if weights == "mapped" else 0)
        each = _BYTES_OF_FORMAT.get(weights, number_bytes)
        floats = self.float_bytes if each is None else int(self.floats * each)
        return adapters + coded_bytes + floats


def count_parameters(model: Path) -> int | None:
    """Return the number of parameters of a directory; None if some are packed, several in a byte.

    Raises CheckpointError for a damaged file.
    """
    tensors = [each for file in sorted(model.glob("*.safetensors")) for each in _tensors(file)]
    if any(each.float_bytes == 0 and each.num_bytes > _SMALL for each in tensors):
        return None
    return sum(each.numbers for each in tensors if each.float_bytes)


def _total(tensors: list[_Tensor]) -> StoredWeights:
    adapters = sum(tensor.numbers for tensor in tensors if tensor.name.endswith(_ADAPTERS))
    tensors = [tensor for tensor in tensors if not tensor.name.endswith(_ADAPTERS)]
    table = sum(tensor.numbers for tensor in tensors if _is_named(tensor, _EMBEDDINGS))
    if any(_is_named(tensor, _HEADS) for tensor in tensors):
        tensors = [tensor for tensor in tensors if not _is_named(tensor, _EMBEDDINGS)]
    coded = [tensor for tensor in tensors if not tensor.float_bytes]
    return StoredWeights(
        sum(tensor.numbers for tensor in tensors if tensor.float_bytes),
        sum(tensor.numbers for tensor in coded),
        sum(tensor.num_bytes for tensor in coded),
        sum(tensor.numbers * tensor.float_bytes for tensor in tensors),
        sum(tensor.num_bytes for tensor in coded if tensor.is_mappable),
        adapters=adapters,
        table=table,
    )


def _is_named(tensor: _Tensor, names: tuple[str, ...]) -> bool:
    return f".{tensor.name}".endswith(tuple(f".{name}" for name in names))


def _kinds(file: GgufFile) -> set[int]:
    return {tensor.kind for tensor in file.tensors.values()}


def _gguf_tensors(file: GgufFile) -> Iterator[_Tensor]:
    """Yield the tensors, each of which ends where the next one of its file starts.

    If one weight has a type that can't be mapped, no weight counts as mappable.
    """
    is_mappable = _kinds(file) <= _PLAIN | _MAPPABLE
    for part, size in file.sizes.items():
        held = sorted((t for t in file.tensors.values() if t.file == part), key=lambda t: t.start)
        ends = [*(after.start for _, after in pairwise(held)), size]
        for tensor, end in zip(held, ends, strict=bool(held)):
            float_bytes = _GGUF_FLOATS.get(tensor.kind, 0)
            numbers = prod(tensor.shape)
            yield _Tensor(tensor.name, numbers, end - tensor.start, float_bytes, is_mappable)


def _tensors(file: Path) -> Iterator[_Tensor]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            header = json.loads(opened.read(min(length, file.stat().st_size)))
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                float_bytes = _FLOATS.get(tensor["dtype"], 0)
                numbers = prod(tensor["shape"]) if float_bytes else end - begin
                is_mappable = name.endswith(_MXFP4)
                yield _Tensor(name, numbers, end - begin, float_bytes, is_mappable)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged or truncated: {error}.") from None
