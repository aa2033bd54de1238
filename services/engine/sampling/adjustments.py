"""Logit adjustments before a draw: bias, penalties, masks and bans."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.engine.batch.transfer import to_device
from services.engine.sampling.row import Row

__all__ = ["adjust"]

_LARGEST_LOGIT = 1e30
"""Largest |logit| after a penalty: finite, because two infinities add up to NaN"""
_CACHED_MASKS = 64
"""Number of masks in the cache: most tokens are inside strings, so few masks differ"""
_MASK_ADDENDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
    np.float32(0),
    np.float32(-np.inf),
)
"""float32 [256, 8]: 0 or -inf for the logits of eight ids, by byte of a mask"""


def adjust(logits: Tensor, rows: Sequence[Row]) -> None:
    """Apply logit_bias, penalties, DRY, masks, forbidden ids and bans in place, in this order.

    logits: float32 [rows, vocabulary], contiguous.
    """
    _add_bias(logits, rows)
    if any(row.penalties is not None for row in rows):
        _penalise_seen(logits, rows)
        _penalise_counted(logits, rows)
        _penalise_repetitions(logits, rows)
    _mask(logits, rows)
    _forbid(logits, rows)
    _ban(logits, rows)


def _add_bias(logits: Tensor, rows: Sequence[Row]) -> None:
    entries = [
        (i, np.frombuffer(bias.ids, np.int64), np.frombuffer(bias.values, np.float32))
        for i, row in enumerate(rows)
        if (bias := row.settings.logit_bias) is not None
    ]
    _add(logits, entries, 1)


def _penalise_seen(logits: Tensor, rows: Sequence[Row]) -> None:
    """Divide positive logits by the repetition penalty, and multiply negative ones by it."""
    entries = [
        (i, penalties.seen, penalties.repetition)
        for i, row in enumerate(rows)
        if (penalties := row.penalties) is not None and penalties.repetition != 1
    ]
    if entries:
        places = _places(logits, [(i, ids) for i, ids, _ in entries])
        lengths = [len(ids) for _, ids, _ in entries]
        factors = np.repeat(np.array([factor for _, _, factor in entries], np.float32), lengths)
        factor = to_device(torch.from_numpy(factors), logits.device)
        before = logits.view(-1)[places]
        after = torch.where(before > 0, before / factor, before * factor).clamp_(
            -_LARGEST_LOGIT, _LARGEST_LOGIT
        )
        logits.view(-1)[places] = after  # a repeated id gets the same value twice


def _penalise_counted(logits: Tensor, rows: Sequence[Row]) -> None:
    entries = [
        (i, *penalties.counted)
        for i, row in enumerate(rows)
        if (penalties := row.penalties) is not None and penalties.counts_tokens
    ]
    _add(logits, entries, -1)


def _penalise_repetitions(logits: Tensor, rows: Sequence[Row]) -> None:
    entries = [
        (i, *penalties.repetitions.penalties(penalties.tokens))
        for i, row in enumerate(rows)
        if (penalties := row.penalties) is not None and penalties.repetitions is not None
    ]
    _add(logits, entries, -1)


def _mask(logits: Tensor, rows: Sequence[Row]) -> None:
    masks = {i: row.mask for i, row in enumerate(rows) if row.mask is not None}
    if masks and logits.device.type == "cpu":
        # numpy, row by row: torch's threads would wait for cores that other processes use
        values = logits.numpy()
        for i, mask in masks.items():
            values[i] += _amounts(mask, logits.shape[1])
    elif masks:
        from services.engine.sampling.mask_kernel import apply_masks  # needs Triton

        apply_masks(logits, masks)


@lru_cache(maxsize=_CACHED_MASKS)
def _amounts(mask: bytes, vocabulary: int) -> npt.NDArray[np.float32]:
    """Return the addends of a mask for its row: float32 [vocabulary]."""
    bits = np.zeros(-(-vocabulary // 8), dtype=np.uint8)
    bits[: len(mask)] = np.frombuffer(mask, dtype=np.uint8)
    return _MASK_ADDENDS[bits].reshape(-1)[:vocabulary]


def _forbid(logits: Tensor, rows: Sequence[Row]) -> None:
    """Exclude ids unconditionally. They never are the whole vocabulary."""
    entries = [
        (i, np.array(row.forbidden, dtype=np.int64)) for i, row in enumerate(rows) if row.forbidden
    ]
    if entries:
        logits.view(-1)[_places(logits, entries)] = -torch.inf


def _ban(logits: Tensor, rows: Sequence[Row]) -> None:
    """Exclude ids, except in rows that would have no id left."""
    entries = [
        (i, np.array(row.banned, dtype=np.int64)) for i, row in enumerate(rows) if row.banned
    ]
    if not entries:
        return
    places = _places(logits, entries)
    flat = logits.view(-1)
    if not any(
        rows[i].mask is not None or rows[i].forbidden or len(ids) >= logits.shape[1]
        for i, ids in entries
    ):
        flat[places] = -torch.inf  # every row has an id left
        return
    before = flat[places]
    flat[places] = -torch.inf
    owners = np.repeat([i for i, _ in entries], [len(ids) for _, ids in entries])
    emptied = logits.amax(dim=-1) == -torch.inf
    again = emptied[to_device(torch.from_numpy(owners), logits.device)]
    flat[places] = before.masked_fill(~again, -torch.inf)


def _places(logits: Tensor, entries: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> Tensor:
    """Return the indices of (row, ids) in the flattened logits, int64."""
    width = logits.shape[1]
    places = np.concatenate([i * width + ids for i, ids in entries])
    return to_device(torch.from_numpy(places), logits.device)


def _add(
    logits: Tensor,
    entries: Sequence[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32]]],
    sign: int,
) -> None:
    """Add `sign` times the amounts to the logits of (row, ids); a row's ids are distinct."""
    if entries:
        places = _places(logits, [(i, ids) for i, ids, _ in entries])
        amounts = np.concatenate([amounts for _, _, amounts in entries])
        source = to_device(torch.from_numpy(amounts), logits.device)
        logits.view(-1).index_add_(0, places, source, alpha=sign)
