"""Draws one token per row.

The noise of a draw is a function of (seed, choice, position): it does not depend on what else is in
the batch, nor on what was drawn before, so a sequence can be stopped and continued anywhere. One
uniform number picks a token from the cumulated weights, either in the order of ids or, where top-k,
top-p or min-p restrict the row, in the order of falling weight.

On a CPU, one of our kernels does that; torch does it elsewhere, and where there are no kernels.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.batch.transfer import to_device
from services.engine.kernels.library import DrawCall, native
from services.engine.sampling.adjust import adjust
from services.engine.sampling.row import Row

__all__ = ["argmax", "only_numbers", "sample", "try_sample"]

_CANDIDATES = 256
"""Of a restricted row, the tokens looked at before all are sorted"""
_GROUP = 256
"""Weights summed at once when a draw looks for its token"""
_BLOCK = 1 << 19
"""Logits that a CPU works on at a time: they stay in its caches, and what is made of them needs no
fresh memory from the system"""
_LOG2_E = math.log2(math.e)
"""For exp2: exp takes a hundred times as long where it underflows, and -inf is what masks leave"""
_COLDEST = 1e-30
"""Of any two logits that differ, only the larger is drawn at this temperature"""

_Draw = Callable[[Tensor, Sequence[Row]], Tensor]


def argmax(logits: Tensor) -> list[int]:
    """The most likely id of each row; the first of equals.

    logits: float32 [rows, vocabulary].
    """
    return _ids(_draw_greedy(logits))


def sample(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Draw one id per row, and move the rows' mirostat on.

    logits: float32 [rows, vocabulary]; left as they are.
    """
    drawn = [0] * len(rows)
    draw_of = _draw_of if native is None or logits.device.type != "cpu" else _draw_of_on_cpu
    for draw, indices, some, theirs in _groups(logits, rows, draw_of):
        for i, token in zip(indices, _ids(draw(some, theirs)), strict=True):
            drawn[i] = token
    return drawn


def only_numbers(logits: Tensor, ids: Sequence[int]) -> list[int]:
    """The ids that were drawn, one per row; -1 where the model gave NaN for it.

    However a row of NaN is drawn from, what comes out has no other logit. Where logits are not on
    the CPU they are not looked at: there most steps go on before the host knows what was drawn.
    logits: float32 [rows, vocabulary].
    """
    if logits.device.type != "cpu":
        return list(ids)
    logit = logits.numpy().item  # a tenth of what indexing takes
    return [-1 if math.isnan(logit(row, token)) else token for row, token in enumerate(ids)]


def try_sample(logits: Tensor, rows: Sequence[Row] | None) -> tuple[Tensor, Tensor | None]:
    """The same without waiting for the device; no row has mirostat. None: the most likely ids.

    Returns int64 [rows], and bool [rows], which is False where `sample` has to be asked, because
    more candidates must be looked at; None: nowhere.
    """
    if rows is None:
        return _draw_greedy(logits), None
    device = logits.device
    drawn = torch.empty(len(rows), dtype=torch.int64, device=device)
    is_settled: Tensor | None = None
    for draw, indices, some, theirs in _groups(logits, rows, _draw_of):
        index = to_device(torch.tensor(indices), device)
        if draw is _draw_restricted:
            if is_settled is None:
                is_settled = torch.ones(len(rows), dtype=torch.bool, device=device)
            ids, settled, _ = _draw_candidates(some, theirs)
            is_settled.index_copy_(0, index, settled)
        else:
            ids = draw(some, theirs)
        drawn.index_copy_(0, index, ids)
    return drawn, is_settled


def _groups(
    logits: Tensor, rows: Sequence[Row], draw_of: Callable[[Row], _Draw]
) -> Iterator[tuple[_Draw, Sequence[int], Tensor, Sequence[Row]]]:
    """Rows that are drawn alike: how, which they are, their logits, adjusted, and themselves."""
    groups: dict[tuple[_Draw, bool], list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault((draw_of(row), row.is_adjusted), []).append(i)
    size = max(_BLOCK // logits.shape[1], 1) if logits.device.type == "cpu" else len(rows)
    for (draw, adjusted), members in groups.items():
        for start in range(0, len(members), size):
            indices = members[start : start + size]
            some, theirs = _of_rows(logits, indices, adjusted), [rows[i] for i in indices]
            if adjusted:
                adjust(some, theirs)
            yield draw, indices, some, theirs


def _of_rows(logits: Tensor, indices: Sequence[int], to_be_changed: bool) -> Tensor:
    """Some rows, in rising order; a copy where need be."""
    first, last = indices[0], indices[-1]
    if last - first + 1 > len(indices):
        return logits[to_device(torch.tensor(indices), logits.device)]
    some = logits[first : last + 1]
    if not to_be_changed:
        return some
    # numpy's one thread copies sooner than torch's, which wait for cores that others use now
    return torch.from_numpy(some.numpy().copy()) if logits.device.type == "cpu" else some.clone()


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
    return _pick(_weights(logits, rows), _noises(rows, logits.device)).squeeze(1)


def _draw_mirostat(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Draw from the tokens whose surprise is at most mu, or else the likeliest, in id order."""
    states = [row.mirostat for row in rows if row.mirostat is not None]
    weights = _weights(logits, rows)
    totals = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    mu = torch.tensor([state.mu for state in states], dtype=torch.float64, device=logits.device)
    # -log2(weight / total) <= mu, and the largest weight is 1
    least = (totals * torch.exp2(-mu.unsqueeze(1))).clamp_(max=1).float()
    weights *= weights >= least
    ids = _pick(weights, _noises(rows, logits.device))
    surprises = -(weights.gather(1, ids) / totals).log2()
    for state, surprise in zip(states, surprises.squeeze(1).tolist(), strict=True):
        state.observe(surprise)
    return ids.squeeze(1)


def _draw_restricted(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Draw from what top-k, then top-p, then min-p leave, in the order of falling weight.

    Equal logits are ordered by id, so that the outcome does not depend on how many candidates were
    looked at.
    """
    drawn, is_settled, normaliser = _draw_candidates(logits, rows)
    unsettled = (~is_settled).nonzero().squeeze(1).tolist()
    if unsettled:
        some, theirs = logits[unsettled], [rows[i] for i in unsettled]
        ids = _falling(some)
        values = some.gather(1, ids).double() / _temperatures(theirs, logits.device)
        index, _ = _pick_restricted(values, normaliser[unsettled], theirs, False)
        drawn[unsettled] = ids.gather(1, index).squeeze(1)
    return drawn


def _draw_candidates(logits: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """The same from the likeliest tokens alone, and where the others could change that.

    Returns int64 [rows], bool [rows], and float64 [rows, 1], what the probabilities divide by.
    """
    width = min(_CANDIDATES, logits.shape[1])
    ids = logits.topk(width, dim=-1).indices.sort(dim=-1).values
    order = logits.gather(1, ids).argsort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    temperatures = _temperatures(rows, logits.device)
    values = logits.gather(1, ids).double() / temperatures
    normaliser = values[:, :1]
    if not all(0 < row.settings.top_k < width for row in rows):  # top-k brings its own
        totals = _weights(logits, rows).sum(dim=-1, keepdim=True, dtype=torch.float64)
        normaliser = normaliser + totals.log()
    index, is_settled = _pick_restricted(values, normaliser, rows, width < logits.shape[1])
    return ids.gather(1, index).squeeze(1), is_settled, normaliser


def _falling(logits: Tensor) -> Tensor:
    """Ids by falling logit, those of equal logits by id: int64 [rows, vocabulary]."""
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True, stable=True).indices
    # logit and id as one integer: numpy sorts these six times as fast as torch sorts stably
    bits = (logits + 0.0).numpy().view(np.uint32)  # -0.0 becomes 0.0
    keys = np.where(bits >> 31, bits, ~bits & 0x7FFFFFFF).astype(np.uint64)
    packed = keys << np.uint64(32) | np.arange(logits.shape[1], dtype=np.uint64)
    packed.sort(axis=-1)
    return torch.from_numpy((packed & np.uint64(0xFFFFFFFF)).astype(np.int64))


def _pick_restricted(
    values: Tensor, normaliser: Tensor, rows: Sequence[Row], more: bool
) -> tuple[Tensor, Tensor]:
    """Index into each row's falling, tempered logits, and whether others can't change it.

    values: float64 [rows, candidates]; normaliser: float64 [rows, 1], logsumexp over the whole
    vocabulary; more: there are tokens besides these. Returns int64 [rows, 1] and bool [rows].
    """
    count, device = values.shape[1], values.device
    last = values[:, -1:]

    def column(numbers: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return _column(numbers, device, dtype)

    limits = [row.settings.top_k or count for row in rows]
    most = column([min(limit, count) for limit in limits], torch.int64)
    is_limited = most < count
    if any(limit < count for limit in limits):
        places = torch.arange(count, device=device)
        values = values.masked_fill(places >= most, -torch.inf)
        normaliser = torch.where(is_limited, values.logsumexp(dim=-1, keepdim=True), normaliser)
    probabilities = ((values - normaliser) * _LOG2_E).exp2_()
    cumulated = probabilities.cumsum(dim=-1)

    def kept_by(condition: Tensor) -> Tensor:
        return condition.sum(dim=-1, keepdim=True)

    kept = kept_by(cumulated - probabilities < column([row.settings.top_p for row in rows]))
    floor = column([row.settings.min_p for row in rows]) * probabilities[:, :1]
    kept = torch.minimum(kept, kept_by((probabilities >= floor) & (probabilities > 0)))
    kept = torch.minimum(kept, most).clamp_(min=1)
    target = _noises(rows, device) * cumulated.gather(1, kept - 1)
    index = torch.minimum(kept_by(cumulated <= target), kept - 1)
    if not more:
        return index, torch.ones(len(rows), dtype=torch.bool, device=device)
    # where equal logits go on past the candidates, their order by id is not known here; nor is the
    # end of what top-p keeps, if that is past them too, nor what top-k leaves to normalise
    end = torch.where(is_limited, most, kept)
    is_settled = (values.gather(1, end - 1) > last) | (last == -torch.inf)
    is_known = column([row.settings.top_k < count for row in rows], torch.bool)
    return index, (is_settled & is_known).squeeze(1)


def _pick(weights: Tensor, noises: Tensor) -> Tensor:
    """The id at which each row's cumulated weight passes its noise: int64 [rows, 1].

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


def _weights(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """exp((logit - largest) / temperature): float32 [rows, vocabulary]."""
    # no colder than this, because a denormal may count as 0, and 0 / 0 would be drawn from
    scales = _LOG2_E / _temperatures(rows, logits.device).clamp_(min=_COLDEST)
    return (logits - logits.amax(dim=-1, keepdim=True)).mul_(scales.float()).exp2_()


def _first_above(cumulated: Tensor, target: Tensor) -> Tensor:
    """Index of the first entry above the target; the last entry that grew if rounding left none.

    cumulated: float64 [rows, n], never falling; target: float64 [rows, 1]. Returns int64 [rows, 1],
    below n whatever the entries are: a row of NaN must not fail the others.
    """
    index = torch.searchsorted(cumulated, target, right=True)
    last = torch.searchsorted(cumulated, cumulated[:, -1:].contiguous())
    return torch.minimum(index, last).clamp_(max=cumulated.shape[1] - 1)


def _temperatures(rows: Sequence[Row], device: torch.device) -> Tensor:
    return _column([row.settings.temperature for row in rows], device)


def _noises(rows: Sequence[Row], device: torch.device) -> Tensor:
    return _column([row.noise for row in rows], device)


def _column(
    numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64
) -> Tensor:
    return to_device(torch.tensor(numbers, dtype=dtype), device).unsqueeze(1)


def _ids(drawn: Tensor) -> list[int]:
    ids: list[int] = drawn.tolist()
    return ids
