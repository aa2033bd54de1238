"""Our table of ggml's types is llama.cpp's own."""

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from services.common.gguf.ggml_types import BLOCK_SIZES, GgmlType


def test_types_have_the_numbers_and_blocks_of_the_package() -> None:
    """With another size, each row of such a tensor would begin in the wrong place."""
    for kind in GgmlType:
        theirs = GGMLQuantizationType(kind)
        assert (kind.name, BLOCK_SIZES[kind]) == (theirs.name, GGML_QUANT_SIZES[theirs])
