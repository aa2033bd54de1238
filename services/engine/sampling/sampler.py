"""Sampler: draws one token per row of logits.

The noise of a draw is a function of (seed, choice, position). It depends neither on the batch nor
on earlier draws, so a sequence can stop and resume anywhere. One uniform number picks a token from
the cumulative weights: in the order of ids, or by falling weight where top-k, top-p or min-p apply.

A native kernel draws on a CPU; torch draws on other devices and where the kernels are not built.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.engine.batch.transfer import HostCopy, rows_of, staging_buffer, to_device
from services.engine.kernels.library import native
from services.engine.kernels.structures import DrawCall
from services.engine.sampling.adjustments import adjust
from services.engine.sampling.mirostat import Mirostat
from services.engine.sampling.row import Row

__all__ = ["Drawn", "argmax", "mark_nan", "reject_nan", "sample", "try_sample"]

_CANDIDATES = 256
"""Number of likeliest tokens that a restricted draw examines before it sorts the whole row"""
_GROUP = 256
"""Number of weights per group of the two-level search for the drawn token"""
_BLOCK = 1 << 19
"""Number of logits that a CPU processes at a time: they fit its caches, and temporaries do, too"""
_LOG2_E = math.log2(math.e)
"""Factor from exp to exp2: masks leave -inf, and exp is 100 times slower where it underflows"""
_LOWEST_TEMPERATURE = 1e-30
"""Lowest temperature, at which only the largest logits are drawn already"""

_NO_LIMIT = 2**31
"""Value for a row without top_k, above the size of any vocabulary"""

_Draw = Callable[[Tensor, Sequence[Row]], Tensor]


def argmax(logits: Tensor) -> list[int]:
    """Return the most likely id of each row, the lowest id of several.

    logits: float32 [rows, vocabulary].
    """
    return _ids(_draw_greedy(logits))


def sample(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Draw one id per row, and update the rows' mirostat state.

    logits: float32 [rows, vocabulary], not modified.
    """
    drawn = [0] * len(rows)
    draw_of = _draw_of if native is None or logits.device.type != "cpu" else _draw_of_on_cpu
    for draw, indices, part, part_rows in _groups(logits, rows, draw_of):
        for i, token in zip(indices, _ids(draw(part, part_rows)), strict=True):
            drawn[i] = token
    return drawn


def reject_nan(logits: Tensor, ids: Sequence[int]) -> list[int]:
    """Return the drawn ids, with -1 where the id's logit is NaN.

    A row of NaN yields an id whose logit is NaN, however it is drawn. logits: float32
    [rows, vocabulary].
    """
    if logits.device.type != "cpu":
        index = to_device(torch.tensor(ids, dtype=torch.int64), logits.device)
        return _ids(mark_nan(logits, index))
    logit = logits.numpy().item  # ten times as fast as indexing
    return [-1 if math.isnan(logit(row, token)) else token for row, token in enumerate(ids)]


def mark_nan(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the ids of `reject_nan` without waiting for the device. ids: int64 [rows]."""
    if logits.device.type == "cpu":
        is_nan = logits.gather(1, ids.unsqueeze(1)).squeeze(1).isnan()
        return torch.where(is_nan, -1, ids)
    from services.engine.sampling.draw_kernels import mark_nan_ids  # needs Triton

    return mark_nan_ids(logits, ids)


class RestrictedDraws(NamedTuple):
    """Draws among the likeliest tokens alone. More candidates may change their results."""

    indices: Sequence[int]
    """Row numbers of these draws in the batch"""
    rows: Sequence[Row]
    logits: Tensor
    """float32 [rows, vocabulary], adjusted"""
    is_settled: HostCopy
    """bool [rows], False for rows of which more candidates must be examined"""

    def repeat_unsettled(self) -> Iterator[tuple[int, int]]:
        """Wait for the device, draw unsettled rows again, and yield row number and id of each."""
        for i in (~self.is_settled.wait()).nonzero().squeeze(1).tolist():
            [token] = _ids(_draw_restricted(self.logits[i : i + 1], [self.rows[i]]))
            yield self.indices[i], token


class MirostatDraws(NamedTuple):
    """Draws whose surprise updates their sequences' mirostat states."""

    states: Sequence[Mirostat]
    surprises: HostCopy
    """float64 [rows], in bits"""

    def observe(self) -> None:
        """Wait for the device, and update the states."""
        for state, surprise in zip(self.states, self.surprises.wait().tolist(), strict=True):
            state.observe(surprise)


class Drawn(NamedTuple):
    """Tokens that a device draws."""

    ids: Tensor
    """int64 [rows]"""
    restricted: Sequence[RestrictedDraws] = ()
    mirostat: Sequence[MirostatDraws] = ()


def try_sample(logits: Tensor, rows: Sequence[Row] | None) -> Drawn:
    """Draw on the device, without waiting for it.

    logits: float32 [rows, vocabulary], which may change after the call. rows: None = plain greedy.
    """
    if rows is None:
        return Drawn(_draw_greedy(logits))
    drawn: list[Tensor] = []
    order: list[int] = []
    restricted: list[RestrictedDraws] = []
    mirostat: list[MirostatDraws] = []
    for draw, indices, part, part_rows in _groups(logits, rows, _draw_of):
        if draw is _draw_restricted:
            ids, is_settled = _try_restricted(part, part_rows)
            kept = part.clone() if _share_memory(part, logits) else part
            restricted.append(RestrictedDraws(indices, part_rows, kept, HostCopy(is_settled)))
        elif draw is _draw_mirostat:
            ids, surprises = _draw_by_surprise(part, part_rows)
            mirostat.append(MirostatDraws(_states(part_rows), HostCopy(surprises)))
        else:
            ids = draw(part, part_rows)
        drawn.append(ids)
        order += indices
    return Drawn(_in_order(drawn, order), restricted, mirostat)


def _share_memory(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _in_order(drawn: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """Concatenate the groups' ids by row. order: the row of each."""
    if len(drawn) == 1:
        return drawn[0]  # the rows of a group are ascending
    places = torch.from_numpy(np.argsort(order))
    return torch.cat(list(drawn))[to_device(places, drawn[0].device)]


def _groups(
    logits: Tensor, rows: Sequence[Row], draw_of: Callable[[Row], _Draw]
) -> Iterator[tuple[_Draw, Sequence[int], Tensor, Sequence[Row]]]:
    """Group rows by the kind of draw. Yields the draw, row indices, adjusted logits and rows."""
    groups: dict[tuple[_Draw, bool], list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault((draw_of(row), row.is_adjusted), []).append(i)
    size = max(_BLOCK // logits.shape[1], 1) if logits.device.type == "cpu" else len(rows)
    for (draw, adjusted), members in groups.items():
        for start in range(0, len(members), size):
            indices = members[start : start + size]
            part, part_rows = _select(logits, indices, adjusted), [rows[i] for i in indices]
            if adjusted:
                adjust(part, part_rows)
            yield draw, indices, part, part_rows


def _select(logits: Tensor, indices: Sequence[int], is_modified: bool) -> Tensor:
    """Select rows in ascending order. They are copied if they are modified or not contiguous."""
    part = rows_of(logits, indices)
    if not is_modified or not _share_memory(part, logits):
        return part
    # numpy copies in this thread; torch's threads would wait for cores that others use
    return torch.from_numpy(part.numpy().copy()) if logits.device.type == "cpu" else part.clone()


def _draw_of(row: Row) -> _Draw:
    settings = row.settings
    if settings.temperature == 0:
        return _draw_greedy
    if row.mirostat is not None:
        return _draw_mirostat
    if settings.top_k > 0 or settings.top_p < 1 or settings.min_p > 0:
        return _draw_restricted
    return _draw_plain


def _draw_of_on_cpu(row: Row) -> _Draw:
    draw = _draw_of(row)
    return _draw_by_kernel if draw in (_draw_plain, _draw_restricted) else draw


def _draw_by_kernel(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    assert native is not None
    first, stride = logits.data_ptr(), logits.stride(0) * logits.element_size()
    calls = (DrawCall * len(rows))()
    for i, (call, row) in enumerate(zip(calls, rows, strict=True)):
        settings = row.settings
        call.logits = first + i * stride
        call.temperature, call.top_p = settings.temperature, settings.top_p
        call.min_p, call.top_k = settings.min_p, settings.top_k
        call.noise = row.noise
    native.draw_tokens(calls, len(rows), logits.shape[1])
    return torch.tensor([call.drawn for call in calls])


def _draw_greedy(logits: Tensor, rows: Sequence[Row] = ()) -> Tensor:
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))  # ten times as fast as torch's
    return logits.argmax(dim=-1)


def _draw_plain(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Draw from the whole vocabulary, in the order of ids."""
    columns = _columns(rows, logits.device)
    if logits.device.type == "cpu":
        return _pick(_weights(logits, columns), columns.noise).squeeze(1)
    from services.engine.sampling.draw_kernels import pick, sum_weights  # needs Triton

    largest = logits.amax(dim=-1, keepdim=True)
    sums = sum_weights(logits, largest, columns.scale, _GROUP)
    return pick(logits, largest, columns.scale, columns.noise, sums, _GROUP)


def _draw_mirostat(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Draw by mirostat, and update the rows' states."""
    ids, surprises = _draw_by_surprise(logits, rows)
    MirostatDraws(_states(rows), HostCopy(surprises)).observe()
    return ids


def _draw_by_surprise(logits: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Draw from the tokens whose surprise is at most mu, or the likeliest if none, in id order.

    Returns ids, int64 [rows], and their surprises, float64 [rows].
    """
    columns = _columns(rows, logits.device)
    weights = _weights(logits, columns)
    totals = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    mu = _column([state.mu for state in _states(rows)], logits.device)
    # -log2(weight / total) <= mu, and the largest weight is 1
    least = (totals * torch.exp2(-mu)).clamp_(max=1).float()
    weights *= weights >= least
    ids = _pick(weights, columns.noise)
    surprises = -(weights.gather(1, ids) / totals).log2()
    return ids.squeeze(1), surprises.squeeze(1)


def _states(rows: Sequence[Row]) -> list[Mirostat]:
    return [row.mirostat for row in rows if row.mirostat is not None]


def _draw_restricted(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Apply top-k, then top-p, then min-p, and draw in descending order of weight.

    Equal logits are in the order of ids: the result must not depend on the number of candidates.
    """
    columns = _columns(rows, logits.device)
    drawn, is_settled, normaliser = _draw_candidates(logits, rows, columns)
    unsettled = (~is_settled).nonzero().squeeze(1).tolist()
    if unsettled:
        part, part_rows = rows_of(logits, unsettled), [rows[i] for i in unsettled]
        ids, columns = _sort_falling(part), _columns(part_rows, logits.device)
        values = part.gather(1, ids).double() / columns.temperature
        index, _ = _pick_restricted(values, normaliser[unsettled], part_rows, columns, False)
        drawn[unsettled] = ids.gather(1, index).squeeze(1)
    return drawn


def _try_restricted(logits: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Draw from the likeliest tokens alone, without waiting for the device.

    Returns ids, int64 [rows], and whether the other tokens can't change them, bool [rows].
    """
    columns = _columns(rows, logits.device)
    if logits.device.type == "cpu":
        return _draw_candidates(logits, rows, columns)[:2]
    from services.engine.sampling.draw_kernels import pick_restricted, sum_weights  # needs Triton

    found, ids = _candidates(logits)
    sums = sum_weights(logits, found[:, :1], columns.scale, _GROUP)
    more = found.shape[1] < logits.shape[1]
    return pick_restricted(found, ids, sums, columns[:5], _NO_LIMIT, more)


def _draw_candidates(
    logits: Tensor, rows: Sequence[Row], columns: "_Columns"
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw from the likeliest tokens alone.

    Returns ids, int64 [rows]; whether the other tokens can't change them, bool [rows]; and the log
    of the sum of exp(logit / temperature), float64 [rows, 1].
    """
    found, ids = _candidates(logits)
    width = ids.shape[1]
    values = found.double() / columns.temperature
    normaliser = values[:, :1]
    if not all(0 < row.settings.top_k < width for row in rows):  # top-k normalises its own tokens
        totals = _weights(logits, columns).sum(dim=-1, keepdim=True, dtype=torch.float64)
        normaliser = normaliser + totals.log()
    more = width < logits.shape[1]
    index, is_settled = _pick_restricted(values, normaliser, rows, columns, more)
    return ids.gather(1, index).squeeze(1), is_settled, normaliser


def _candidates(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens by descending logit, then by id: float32, int64 [rows, n]."""
    width = min(_CANDIDATES, logits.shape[1])
    ids = logits.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
    found, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return found, ids.gather(1, order)


def _sort_falling(logits: Tensor) -> Tensor:
    """Sort ids by descending logit, then by id: int64 [rows, vocabulary]."""
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True, stable=True).indices
    # logit and id in one integer: numpy sorts these six times as fast as torch's stable sort
    bits = (logits + 0.0).numpy().view(np.uint32)  # -0.0 becomes 0.0
    keys = np.where(bits >> 31, bits, ~bits & 0x7FFFFFFF).astype(np.uint64)
    packed = keys << np.uint64(32) | np.arange(logits.shape[1], dtype=np.uint64)
    packed.sort(axis=-1)
    return torch.from_numpy((packed & np.uint64(0xFFFFFFFF)).astype(np.int64))


def _pick_restricted(
    values: Tensor, normaliser: Tensor, rows: Sequence[Row], columns: "_Columns", more: bool
) -> tuple[Tensor, Tensor]:
    """Draw an index into each row's candidates, and tell whether other tokens can't change it.

    values: float64 [rows, candidates], logits / temperature, descending; normaliser: float64
    [rows, 1], their logsumexp over the vocabulary; more: the vocabulary has other tokens, too.
    Returns int64 [rows, 1] and bool [rows].
    """
    count, device = values.shape[1], values.device
    last = values[:, -1:]
    limits = [row.settings.top_k or count for row in rows]
    has_limit = any(limit < count for limit in limits)
    most = columns.top_k.clamp(max=count).long() if has_limit else None
    if most is not None:
        places = torch.arange(count, device=device)
        values = values.masked_fill(places >= most, -torch.inf)
        limited = values.logsumexp(dim=-1, keepdim=True)
        normaliser = torch.where(most < count, limited, normaliser)
    probabilities = ((values - normaliser) * _LOG2_E).exp2_()
    cumulated = probabilities.cumsum(dim=-1)

    def kept_by(condition: Tensor) -> Tensor:
        return condition.sum(dim=-1, keepdim=True)

    kept = kept_by(cumulated - probabilities < columns.top_p)
    floor = columns.min_p * probabilities[:, :1]
    kept = torch.minimum(kept, kept_by((probabilities >= floor) & (probabilities > 0)))
    if most is not None:
        kept = torch.minimum(kept, most)
    kept = kept.clamp_(min=1)
    target = columns.noise * cumulated.gather(1, kept - 1)
    index = torch.minimum(kept_by(cumulated <= target), kept - 1)
    if not more:
        return index, torch.ones(len(rows), dtype=torch.bool, device=device)
    # Unsettled rows: equal logits continue past the candidates, so their order by id is unknown;
    # or top-p or top-k keep more tokens than there are candidates.
    end = kept if most is None else torch.where(most < count, most, kept)
    is_settled = (values.gather(1, end - 1) > last) | (last == -torch.inf)
    if any(row.settings.top_k >= count for row in rows):
        is_settled &= (columns.top_k < count) | (columns.top_k == _NO_LIMIT)
    return index, is_settled.squeeze(1)


def _pick(weights: Tensor, noises: Tensor) -> Tensor:
    """Return the id at which each row's cumulative weight passes its noise: int64 [rows, 1].

    weights: float32 [rows, vocabulary], not normalised; noises: float64 [rows, 1], in [0, 1).
    """
    padding = -weights.shape[1] % _GROUP
    padded = torch.nn.functional.pad(weights, (0, padding)) if padding else weights
    groups = padded.view(len(weights), -1, _GROUP)
    cumulated = groups.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = noises * cumulated[:, -1:]
    group = _first_above(cumulated, target)
    before = torch.where(group > 0, cumulated.gather(1, (group - 1).clamp(min=0)), 0.0)
    chosen = groups.gather(1, group.unsqueeze(2).expand(-1, 1, _GROUP)).squeeze(1)
    inner = _first_above(chosen.cumsum(dim=-1, dtype=torch.float64), target - before)
    return (group * _GROUP + inner).clamp_(max=weights.shape[1] - 1)


def _weights(logits: Tensor, columns: "_Columns") -> Tensor:
    """Return exp((logit - largest) / temperature): float32 [rows, vocabulary]."""
    scales = columns.scale.float()
    return (logits - logits.amax(dim=-1, keepdim=True)).mul_(scales).exp2_()


def _first_above(cumulated: Tensor, target: Tensor) -> Tensor:
    """Find the first entry above the target or, if rounding left none, the last increase.

    cumulated: float64 [rows, n], ascending; target: float64 [rows, 1]. Returns int64 [rows, 1],
    below n even in a row of NaN, so that this row does not fail the others.
    """
    index = torch.searchsorted(cumulated, target, right=True)
    last = torch.searchsorted(cumulated, cumulated[:, -1:].contiguous())
    return torch.minimum(index, last).clamp_(max=cumulated.shape[1] - 1)


class _Columns(NamedTuple):
    """Parameters of the rows on a device: float64 [rows, 1] each."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    """top_k of each row, `_NO_LIMIT` if it is not set"""
    noise: Tensor
    scale: Tensor
    """Factor from differences of logits to exponents of 2, rounded to float32"""


def _columns(rows: Sequence[Row], device: torch.device) -> _Columns:
    """Copy the rows' parameters to a device, all at once."""
    count = len(rows)
    # Columns of an even length all begin at 16 bytes: Triton compiles a kernel for each alignment.
    numbers = staging_buffer((len(_Columns._fields), count + count % 2, 1), torch.float64, device)
    settings = [row.settings for row in rows]
    temperatures = np.array([each.temperature for each in settings])
    # a denormal temperature may count as 0, and 0 / 0 is NaN
    scales = 1 / np.maximum(temperatures, _LOWEST_TEMPERATURE) * _LOG2_E
    numbers.numpy()[:, :count, 0] = (
        temperatures,
        [each.top_p for each in settings],
        [each.min_p for each in settings],
        [each.top_k or _NO_LIMIT for each in settings],
        [row.noise for row in rows],
        scales.astype(np.float32),
    )
    return _Columns(*to_device(numbers, device)[:, :count])


def _column(
    numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64
) -> Tensor:
    return to_device(torch.tensor(numbers, dtype=dtype), device).unsqueeze(1)


def _ids(drawn: Tensor) -> list[int]:
    ids: list[int] = drawn.tolist()
    return ids
