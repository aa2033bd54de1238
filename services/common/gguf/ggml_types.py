"""Types of ggml's tensors, and the sizes of their blocks.

The package `gguf` has them too, but imports much of what is installed, such as mistral_common.
"""

from enum import IntEnum

__all__ = ["BLOCK_SIZES", "GgmlType"]


class GgmlType(IntEnum):
    """A type of tensors by its number in GGUF files (enum ggml_type in ggml.h)."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40


_TYPE = GgmlType
BLOCK_SIZES = {
    _TYPE.F32: (1, 4),
    _TYPE.F16: (1, 2),
    _TYPE.BF16: (1, 2),
    _TYPE.Q4_0: (32, 18),
    _TYPE.Q4_1: (32, 20),
    _TYPE.Q5_0: (32, 22),
    _TYPE.Q5_1: (32, 24),
    _TYPE.Q8_0: (32, 34),
    _TYPE.Q2_K: (256, 84),
    _TYPE.Q3_K: (256, 110),
    _TYPE.Q4_K: (256, 144),
    _TYPE.Q5_K: (256, 176),
    _TYPE.Q6_K: (256, 210),
    _TYPE.IQ2_XXS: (256, 66),
    _TYPE.IQ2_XS: (256, 74),
    _TYPE.IQ3_XXS: (256, 98),
    _TYPE.IQ1_S: (256, 50),
    _TYPE.IQ4_NL: (32, 18),
    _TYPE.IQ3_S: (256, 110),
    _TYPE.IQ2_S: (256, 82),
    _TYPE.IQ4_XS: (256, 136),
    _TYPE.IQ1_M: (256, 56),
    _TYPE.TQ1_0: (256, 54),
    _TYPE.TQ2_0: (256, 66),
    _TYPE.MXFP4: (32, 17),
    _TYPE.NVFP4: (64, 36),
}
"""Numbers in a block of each type, and the bytes of the block"""
