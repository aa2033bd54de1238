"""ggml's block formats as codes in groups, without loss.

Source: ggml's dequantization (ggml-quants.c). A block has 32 weights, and 256 in the formats whose
names end in K or XS.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from services.engine.kernels.library import native
from services.engine.model.checkpoint.quantized import QuantizedWeight

__all__ = ["read_groups"]

_KIND = GGMLQuantizationType
_Bytes = npt.NDArray[Any]  # of uint8, which the operations of numpy keep
_Floats = npt.NDArray[Any]  # of float32
_Parts = tuple[_Bytes, _Floats, _Floats]
"""Codes [blocks, weights of a block], scales and offsets [blocks, groups of a block]"""

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def read_groups(rows: _Bytes, kind: GGMLQuantizationType) -> QuantizedWeight | None:
    """Return the weights of rows [outputs, bytes of a row]; None if `kind` has no codes."""
    if kind not in _READERS:
        return None
    bits, read = _READERS[kind]
    blocks = rows.reshape(-1, GGML_QUANT_SIZES[kind][1])
    codes, scales, offsets = read(blocks)
    count = len(rows)
    return QuantizedWeight(
        torch.from_numpy(codes.reshape(count, -1)),
        bits,
        torch.from_numpy(scales.reshape(count, -1)),
        torch.from_numpy(offsets.reshape(count, -1)),
    )


def _halves(blocks: _Bytes, at: int) -> _Floats:
    """Return a half-precision number of each block: [blocks, 1]."""
    numbers: _Floats = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)
    return numbers.astype(np.float32)


def _nibbles(blocks: _Bytes, first: int, run: int) -> _Bytes:
    """Return the low halves of each `run` bytes from `first` on, then their high halves."""
    if native is not None and blocks.flags.c_contiguous:
        count, size = blocks.shape
        halves = np.empty((count, 2 * (size - first)), np.uint8)
        native.split_bytes(blocks.ctypes.data, count, size, first, run, halves.ctypes.data)
        return halves
    packed = blocks[:, first:]
    runs = packed.reshape(len(packed), -1, 1, run)
    both: _Bytes = np.concatenate((runs & 15, runs >> 4), axis=2)
    return both.reshape(len(packed), -1)


def _q4_0(blocks: _Bytes) -> _Parts:
    scales = _halves(blocks, 0)
    return _nibbles(blocks, 2, 16), scales, -8 * scales


def _q4_1(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks, 4, 16), _halves(blocks, 0), _halves(blocks, 2)


def _fifth_bits(packed: _Bytes) -> _Bytes:
    """Return 16 for each bit that is set, in order."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _q5_0(blocks: _Bytes) -> _Parts:
    scales = _halves(blocks, 0)
    codes = _nibbles(blocks, 6, 16) | _fifth_bits(blocks[:, 2:6])
    return codes, scales, -16 * scales


def _q5_1(blocks: _Bytes) -> _Parts:
    codes = _nibbles(blocks, 8, 16) | _fifth_bits(blocks[:, 4:8])
    return codes, _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: _Bytes) -> _Parts:
    scales = _halves(blocks, 0)
    return blocks[:, 2:] ^ 128, scales, -128 * scales


def _q2_k(blocks: _Bytes) -> _Parts:
    both = blocks[:, :16]
    scales = _halves(blocks, 80) * (both & 15).astype(np.float32)
    offsets = -_halves(blocks, 82) * (both >> 4).astype(np.float32)
    return _pairs(blocks[:, 16:80]), scales, offsets


def _pairs(packed: _Bytes) -> _Bytes:
    """Return the first two bits of each 32 bytes, then their second two, and so on."""
    runs = packed.reshape(len(packed), -1, 1, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (runs >> shifts & 3).reshape(len(packed), -1)


def _q3_k(blocks: _Bytes) -> _Parts:
    packed = blocks[:, 96:108]
    high = np.concatenate([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    levels = (_nibbles(packed[:, :8], 0, 8) | high << 4).astype(np.float32) - 32
    scales = _halves(blocks, 108) * levels
    bits = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _pairs(blocks[:, 32:96]) | bits.reshape(len(blocks), -1) << 2
    return codes, scales, -4 * scales


def _levels(packed: _Bytes) -> tuple[_Floats, _Floats]:
    """Return the 6-bit scales and offsets of a block's 8 groups."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1)
    offsets = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1)
    return scales.astype(np.float32), offsets.astype(np.float32)


def _q4_k(blocks: _Bytes) -> _Parts:
    scales, offsets = _levels(blocks[:, 4:16])
    codes = _nibbles(blocks, 16, 32)
    return codes, _halves(blocks, 0) * scales, -_halves(blocks, 2) * offsets


def _q5_k(blocks: _Bytes) -> _Parts:
    scales, offsets = _levels(blocks[:, 4:16])
    bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _nibbles(blocks, 48, 32) | bits.reshape(len(blocks), -1) << 4
    return codes, _halves(blocks, 0) * scales, -_halves(blocks, 2) * offsets


def _q6_k(blocks: _Bytes) -> _Parts:
    low = _nibbles(blocks[:, :128], 0, 64)
    codes = low | _pairs(blocks[:, 128:192]) << 4
    levels = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    scales = _halves(blocks, 208) * levels
    return codes, scales, -32 * scales


def _values(codes: _Bytes, table: tuple[int, ...]) -> _Bytes:
    """Return 128 more than each code's value."""
    return (np.array(table, dtype=np.int16) + 128).astype(np.uint8)[codes]


def _iq4_nl(blocks: _Bytes) -> _Parts:
    scales = _halves(blocks, 0)
    return _values(_nibbles(blocks, 2, 16), _IQ4_VALUES), scales, -128 * scales


def _iq4_xs(blocks: _Bytes) -> _Parts:
    both: _Bytes = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16)
    high = both >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(len(blocks), 8)
    scales = _halves(blocks, 0) * ((low | high << 4).astype(np.float32) - 32)
    return _values(_nibbles(blocks, 8, 16), _IQ4_VALUES), scales, -128 * scales


def _mxfp4(blocks: _Bytes) -> _Parts:
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return _values(_nibbles(blocks, 1, 16), _MXFP4_VALUES), scales, -128 * scales


_READERS: dict[Any, tuple[int, Callable[[_Bytes], _Parts]]] = {
    _KIND.Q4_0: (4, _q4_0),
    _KIND.Q4_1: (4, _q4_1),
    _KIND.Q5_0: (8, _q5_0),
    _KIND.Q5_1: (8, _q5_1),
    _KIND.Q8_0: (8, _q8_0),
    _KIND.Q2_K: (8, _q2_k),
    _KIND.Q3_K: (8, _q3_k),
    _KIND.Q4_K: (4, _q4_k),
    _KIND.Q5_K: (8, _q5_k),
    _KIND.Q6_K: (8, _q6_k),
    _KIND.IQ4_NL: (8, _iq4_nl),
    _KIND.IQ4_XS: (8, _iq4_xs),
    _KIND.MXFP4: (8, _mxfp4),
}
"""Bits in memory, and the reader, of each format"""
