"""Tables that a checkpoint holds twice, such as an MTP layer's copy of the model's embeddings."""

import torch

from services.engine.model.checkpoint.tensors import StoredTensor, TensorFiles

__all__ = ["repeats"]

_ROWS = 64
"""Number of rows that are compared"""
_ROUNDING = 0.25
"""Largest relative error of a copy that is rounded in another way; unrelated rows differ by 1.4"""


def repeats(files: TensorFiles, table: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tables [rows, width] have the same content, by a sample of their rows.

    Copies may differ in how they are rounded, if one of them is in groups of codes.
    """
    index = torch.linspace(0, table.shape[0] - 1, _ROWS).long()
    stored = [files.rows(each) for each in (table, other)]
    mine, theirs = (
        files.tensor(each)[index].float() if rows is None else rows.decode(index)
        for each, rows in zip((table, other), stored, strict=True)
    )
    if stored == [None, None]:
        return torch.equal(mine, theirs)
    return bool((mine - theirs).norm() <= _ROUNDING * theirs.norm())
