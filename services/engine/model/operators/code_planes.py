"""Planes of packed codes: bits of the codes of a tile, side by side in integers of 32 bits."""

import torch
from torch import Tensor

__all__ = ["BYTE", "FIVE_BITS", "join_codes"]

FIVE_BITS, BYTE = 5, 8
"""Bits of codes whose planes differ from those of the others"""


def join_codes(blocks: Tensor, bits: int) -> Tensor:
    """Join the codes of tiles, uint8 [outputs, tiles, blocks, width]: int32 [outputs, tiles, n].

    bits: bits of a code: 4, 5, 6 or 8. The lower four bits come first, then the others.
    """
    if bits == BYTE:
        return _plane(blocks, 4, range(0, 32, 8))
    planes = [_plane(blocks & 15, 8, range(0, 32, 4))]
    if bits == FIVE_BITS:
        planes.append(_half_plane(blocks >> 4))
    elif bits > 4:
        planes.append(_plane(blocks >> 4, 16, range(0, 32, 2)))
    return torch.cat(planes, dim=2)


def _plane(codes: Tensor, blocks: int, places: range) -> Tensor:
    """Join codes [outputs, tiles, n, width] of `blocks` blocks each: [outputs, tiles, integers].

    Blocks with even numbers lie in the lower halves of the integers, the others in the upper ones.
    places: first bits of the codes in an integer.
    """
    outputs, tiles, _, width = codes.shape
    order = torch.tensor(places, device=codes.device).view(2, -1).T.flatten()
    parts = codes.view(outputs, tiles, -1, blocks, width).to(torch.int32)
    joined = (parts << order.to(torch.int32)[:, None]).sum(dim=3, dtype=torch.int32)
    return joined.view(outputs, tiles, -1)


def _half_plane(bits: Tensor) -> Tensor:
    """Join a bit of each code [outputs, tiles, 16, width] to int32 [outputs, tiles, width / 2].

    16 bits hold the bits of an input of each block: those of even blocks in the lower byte.
    """
    outputs, tiles, blocks, width = bits.shape
    halves = bits.view(outputs, tiles, blocks // 2, 2, width)
    places = torch.arange(BYTE, dtype=torch.uint8, device=bits.device)[:, None, None]
    bytes_ = (halves << places).sum(dim=2, dtype=torch.uint8)
    return bytes_.transpose(2, 3).flatten(2).view(torch.int32)
