"""Draws tokens from logits, and scores them.

The noise of a draw is a function of (seed, choice, position): it does not depend on what else is in
the batch, nor on what was drawn before, so a sequence can be stopped and continued anywhere. One
uniform number picks a token from the cumulated weights, either in the order of ids or, where top-k,
top-p or min-p restrict the row, in the order of falling weight.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.engine.messages import SamplingSettings, Score

__all__ = ["Row", "argmax", "sample", "score", "uniform"]

_CANDIDATES = 256
"""Of a restricted row, the tokens looked at before all are sorted"""
_GROUP = 256
"""Weights summed at once when a draw looks for its token"""


@dataclass(frozen=True, slots=True)
class Row:
    """How one row of logits is drawn from."""

    settings: SamplingSettings
    choice: int
    position: int
    """Tokens generated before, counted from the end of the original prompt"""
    banned: Sequence[int] = ()
    """Ids that must not be drawn"""
    mask: bytes | None = None
    """Bit i, least significant first, = id i may be drawn; None = every id"""


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1), the same for the same arguments on every machine."""
    key = struct.pack("<qQQ", seed, choice, position)
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


def argmax(logits: Tensor) -> list[int]:
    """The most likely id of each row; the first of equals.

    logits: float32 [rows, vocabulary].
    """
    if logits.device.type == "cpu":
        ids: list[int] = logits.numpy().argmax(axis=-1).tolist()  # ten times as fast as torch's
        return ids
    return _ids(logits.argmax(dim=-1))


def sample(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Draw one id per row.

    logits: float32 [rows, vocabulary]; left as they are unless a row bans or masks ids, in which
    case a copy is made.
    """
    logits = _restrict(logits, rows)
    greedy = [i for i, row in enumerate(rows) if row.settings.temperature == 0]
    if len(greedy) == len(rows):
        return argmax(logits)
    plain = [i for i, row in enumerate(rows) if i not in set(greedy) and not _is_restricted(row)]
    restricted = [
        i for i, row in enumerate(rows) if row.settings.temperature > 0 and _is_restricted(row)
    ]
    drawn = [0] * len(rows)
    for indices, draw in ((greedy, _argmax), (plain, _draw_plain), (restricted, _draw_restricted)):
        if indices:
            some = logits if len(indices) == len(rows) else logits[indices]
            for i, token in zip(indices, draw(some, [rows[i] for i in indices]), strict=True):
                drawn[i] = token
    return drawn


def score(logits: Tensor, ids: Sequence[int], width: int) -> list[Score]:
    """Score one id per row, and report the `width` most likely ids.

    logits: float32 [rows, vocabulary]. Logprobs are the log-softmax of these logits.
    """
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    index = torch.tensor(ids, dtype=torch.int64, device=logits.device).unsqueeze(1)
    chosen = logits.gather(1, index)
    ranks = (logits > chosen).sum(dim=-1).tolist()
    logprobs = (chosen - normaliser).squeeze(1).tolist()
    if width == 0:
        return [Score(p, r + 1, (), ()) for p, r in zip(logprobs, ranks, strict=True)]
    top = logits.topk(width, dim=-1)
    top_ids, top_logprobs = top.indices.tolist(), (top.values - normaliser).tolist()
    columns = zip(logprobs, ranks, top_ids, top_logprobs, strict=True)
    return [Score(p, rank + 1, some, theirs) for p, rank, some, theirs in columns]


def _is_restricted(row: Row) -> bool:
    settings = row.settings
    return settings.top_k > 0 or settings.top_p < 1 or settings.min_p > 0


def _restrict(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits with -inf where an id is banned or masked."""
    if not any(row.banned or row.mask is not None for row in rows):
        return logits
    logits = logits.clone()
    for i, row in enumerate(rows):
        if row.mask is not None:
            bits = np.frombuffer(row.mask, dtype=np.uint8)
            allowed = np.unpackbits(bits, count=logits.shape[1], bitorder="little")
            denied = torch.from_numpy(allowed == 0).to(logits.device)
            logits[i].masked_fill_(denied, -torch.inf)
        if row.banned:
            banned = list(row.banned)
            before = logits[i, banned]
            logits[i, banned] = -torch.inf
            if row.mask is not None and logits[i].max() == -torch.inf:
                logits[i, banned] = before  # the grammar allows nothing else: it has the last word
    return logits


def _argmax(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    return argmax(logits)


def _draw_plain(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Draw from the whole vocabulary, in the order of ids."""
    weights = _weights(logits, rows)
    padding = -weights.shape[1] % _GROUP
    padded = torch.nn.functional.pad(weights, (0, padding))
    groups = padded.view(len(rows), -1, _GROUP)
    cumulated = groups.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = _uniforms(rows, logits.device) * cumulated[:, -1:]
    group = _first_above(cumulated, target)
    before = torch.where(group > 0, cumulated.gather(1, (group - 1).clamp(min=0)), 0.0)
    chosen = groups.gather(1, group.unsqueeze(2).expand(-1, 1, _GROUP)).squeeze(1)
    inner = _first_above(chosen.cumsum(dim=-1, dtype=torch.float64), target - before)
    return _ids((group * _GROUP + inner).squeeze(1))


def _draw_restricted(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Draw from what top-k, then top-p, then min-p leave, in the order of falling weight.

    Equal logits are ordered by id, so that the outcome does not depend on how many candidates were
    looked at.
    """
    scaled = logits.double() / _temperatures(rows, logits.device)
    normaliser = scaled.logsumexp(dim=-1, keepdim=True)
    width = min(_CANDIDATES, scaled.shape[1])
    ids = scaled.topk(width, dim=-1).indices.sort(dim=-1).values
    values = scaled.gather(1, ids)
    order = values.argsort(dim=-1, descending=True, stable=True)
    ids, values = ids.gather(1, order), values.gather(1, order)
    drawn = []
    for i, row in enumerate(rows):
        noise = uniform(row.settings.seed, row.choice, row.position)
        index = _pick(values[i], float(normaliser[i]), row.settings, noise, width < scaled.shape[1])
        if index is None:
            everything, all_ids = scaled[i].sort(descending=True, stable=True)
            index = _pick(everything, float(normaliser[i]), row.settings, noise, False)
            assert index is not None
            drawn.append(int(all_ids[index]))
        else:
            drawn.append(int(ids[i, index]))
    return drawn


def _pick(
    values: Tensor, normaliser: float, settings: SamplingSettings, noise: float, more: bool
) -> int | None:
    """Index into falling, tempered logits; None if it depends on those that are not here.

    values: float64 [candidates]; normaliser: logsumexp over the whole vocabulary; more: there are
    tokens besides these.
    """
    count = len(values)
    if 0 < settings.top_k < count:
        # with equal logits on both sides of the end of `values`, the order there is not known
        if more and values[settings.top_k - 1] == values[-1]:
            return None
        values, more = values[: settings.top_k], False
        normaliser = float(values.logsumexp(dim=0))
    probabilities = (values - normaliser).exp()
    cumulated = probabilities.cumsum(dim=0)
    kept = int((cumulated - probabilities < settings.top_p).sum())
    kept = min(kept, int((probabilities >= settings.min_p * probabilities[0]).sum()))
    kept = max(kept, 1)
    if more and values[kept - 1] == values[-1]:
        return None
    target = noise * float(cumulated[kept - 1])
    return min(int((cumulated[:kept] <= target).sum()), kept - 1)


def _weights(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """exp((logit - largest) / temperature): float32 [rows, vocabulary]."""
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return (shifted / _temperatures(rows, logits.device).float()).exp_()


def _first_above(cumulated: Tensor, target: Tensor) -> Tensor:
    """Index of the first entry above the target; the last entry that grew if rounding left none.

    cumulated: float64 [rows, n], never falling; target: float64 [rows, 1]. Returns int64 [rows, 1].
    """
    index = torch.searchsorted(cumulated, target, right=True)
    last = torch.searchsorted(cumulated, cumulated[:, -1:].contiguous())
    return torch.minimum(index, last)


def _temperatures(rows: Sequence[Row], device: torch.device) -> Tensor:
    values = [row.settings.temperature for row in rows]
    return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)


def _uniforms(rows: Sequence[Row], device: torch.device) -> Tensor:
    values = [uniform(row.settings.seed, row.choice, row.position) for row in rows]
    return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)


def _ids(tensor: Tensor) -> list[int]:
    return [int(token) for token in tensor.tolist()]
