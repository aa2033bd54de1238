"""Numbers in FP8 (E4M3, https://arxiv.org/abs/2209.05433) in Triton kernels."""

import triton
import triton.language as tl

__all__ = ["encode"]


@triton.jit  # type: ignore[untyped-decorator]
def encode(values: tl.tensor) -> tl.tensor:
    """Return the bits of float32 values up to 448 in E4M3, rounded to the nearest, ties to even.

    It uses integers, because the conversion of Triton's interpreter does not round to the nearest.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Adding 2^14 leaves the multiples of 2^-9, E4M3's smallest number, in the lowest bits.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    coded = tl.where(magnitude < 0x3C800000, small - 0x46800000, (rounded >> 20) - (120 << 3))
    coded = tl.where(magnitude > 0x43E80000, 0x7F, coded)
    return (coded | ((bits >> 24) & 0x80)).to(tl.uint8)
