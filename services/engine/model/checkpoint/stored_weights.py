"""Sizes of a checkpoint's weights, from the headers of its files alone. Free of torch."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, prod
from pathlib import Path

from services.common.gguf.ggml_types import GgmlType
from services.common.gguf.gguf_file import GgufFile
from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["GPU_BITS", "StoredWeights", "count_parameters"]

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
GPU_BITS: dict[int, float] = {
    GgmlType.Q4_0: 4.5,
    GgmlType.Q4_1: 5,
    GgmlType.Q5_0: 5.5,
    GgmlType.Q5_1: 6,
    GgmlType.Q8_0: 8.5,
    GgmlType.Q2_K: 4.875,
    GgmlType.Q3_K: 4.625,
    GgmlType.Q4_K: 4.5,
    GgmlType.Q5_K: 5.5,
    GgmlType.Q6_K: 6.625,
    GgmlType.IQ4_NL: 4.5,
    GgmlType.IQ4_XS: 4.375,
    GgmlType.TQ2_0: 4.125,
    GgmlType.MXFP4: 4.25,
    GgmlType.NVFP4: 5,
}
"""Bits of a weight that a GPU keeps packed, by the number of its ggml type"""
_GPU_FACTORS = {
    ("qzeros", "I32"): 2,
    ("weight_zero_point", "I32"): 2,
    ("absmax", "U8"): 4,
    ("absmax", "F32"): 2,
}
"""Bytes in a GPU's memory for each byte that is counted on a CPU: zero points of 4 bits take a
byte there, and bitsandbytes' scales a float32. By the last part of the name, and the type"""
_NO_CODES = (
    *("qzeros", "g_idx", "zero_point", "weight_shape", "weight_format"),
    *("_scales", "absmax", "quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4"),
)
"""Ends of the names of integers that describe codes"""
_BYTE_BITS = 8
_FP8 = ("F8_E4M3", "F8_E5M2")
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
    gpu_extra: int = 0
    """Bytes that the tensor takes in a GPU's packed weights beside those counted on a CPU"""
    is_fp8: bool = False


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Sizes of the weights that products read. The table of the tokens stays in the mapped file."""

    floats: int
    """Count of numbers in floating point"""
    coded: int
    """Count of numbers in codes"""
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
    gpu_extra: int = 0
    """Bytes that packed weights take in a GPU's memory beside those of their codes in the files"""
    fp8: int = 0
    """Count of numbers in FP8, among those in floating point"""

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
        bits = _word_bits(directory / "config.json")
        return _total([tensor for file in files for tensor in _tensors(file, bits)])

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

    def on_gpu(self, *, packs: bool, keeps_fp8: bool = False) -> "StoredWeights":
        """Return the sizes in a GPU's memory, which holds the table of the tokens in --dtype, too.

        packs: True if codes stay packed; False: they are decoded to --dtype. keeps_fp8: True if
        weights in FP8 stay so.
        """
        held = replace(self, adapters=self.adapters + self.table)
        if not packs and self.coded:
            held = replace(
                held, floats=self.floats + self.coded, coded=0, coded_bytes=0, is_rounded=True
            )
        elif packs:
            held = replace(held, coded_bytes=self.coded_bytes + self.gpu_extra)
        if not keeps_fp8:
            return held
        return replace(
            held,
            floats=held.floats - self.fp8,
            coded=held.coded + self.fp8,
            coded_bytes=held.coded_bytes + self.fp8,
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
        gpu_extra=sum(tensor.gpu_extra for tensor in tensors),
        fp8=sum(tensor.numbers for tensor in tensors if tensor.is_fp8),
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
            numbers, num_bytes = prod(tensor.shape), end - tensor.start
            bits = GPU_BITS.get(tensor.kind, 0)
            extra = max(0, int(numbers * bits / 8) - num_bytes)
            yield _Tensor(tensor.name, numbers, num_bytes, float_bytes, is_mappable, extra)


def _word_bits(file: Path) -> int:
    """Return the bits of a code that a checkpoint packs into words, as its config.json says."""
    config = Config.read(file) if file.is_file() else None
    if config is None or not config.has("quantization_config"):
        return _BYTE_BITS
    method = config.section("quantization_config")
    if not method.has("config_groups"):
        return method.positive(
            "bits", 4 if method.text("quant_method", "") == "awq" else _BYTE_BITS
        )
    groups = method.section("config_groups")
    weights = (groups.section(name).section("weights") for name in groups.values)
    return max((each.positive("num_bits", _BYTE_BITS) for each in weights), default=_BYTE_BITS)


def _count_codes(name: str, dtype: str, num_bytes: int, word_bits: int) -> int:
    """Return the number of weights whose codes a tensor of integers holds."""
    if name.endswith(_NO_CODES):
        return 0
    if dtype == "I32":
        return num_bytes * _BYTE_BITS // word_bits
    return 2 * num_bytes if dtype == "U8" else num_bytes  # an unsigned byte holds two of 4 bits


def _tensors(file: Path, word_bits: int = _BYTE_BITS) -> Iterator[_Tensor]:
    """Yield the tensors of a file. word_bits: bits of a code that is packed into words."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            header = json.loads(opened.read(min(length, file.stat().st_size)))
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                dtype = tensor["dtype"]
                float_bytes = _FLOATS.get(dtype, 0)
                numbers = (
                    prod(tensor["shape"])
                    if float_bytes
                    else _count_codes(name, dtype, end - begin, word_bits)
                )
                is_mappable = name.endswith(_MXFP4)
                factor = _GPU_FACTORS.get((name.rpartition(".")[2], dtype), 1)
                extra = (factor - 1) * (2 * numbers if float_bytes else end - begin)
                is_fp8 = dtype in _FP8
                yield _Tensor(name, numbers, end - begin, float_bytes, is_mappable, extra, is_fp8)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged or truncated: {error}.") from None
