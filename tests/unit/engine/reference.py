"""Reference sampling in plain Python, which the engine's tensor code must equal."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.engine.checked_request import DrySettings, SamplingSettings

MOST = 1e30
"""The engine's largest penalty, where a float would overflow"""


@dataclass(frozen=True, slots=True)
class SoFar:
    """Tokens so far, and limits of the next draw."""

    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()
    allowed: Collection[int] | None = None
    banned: Collection[int] = ()


def adjusted(logits: Sequence[float], settings: SamplingSettings, so_far: SoFar) -> list[float]:
    """Return the logits after bias, penalties, DRY, mask and bans."""
    values = list(logits)
    if settings.logit_bias is not None:
        for token, bias in zip(settings.logit_bias.ids, settings.logit_bias.values, strict=True):
            values[token] += bias
    tokens = counted = [*so_far.prompt, *so_far.generated]
    if (window := settings.penalty_window) is None:
        counted = list(so_far.generated)
    else:
        tokens = counted = tokens[max(0, len(tokens) - window) :]
    if settings.repetition_penalty != 1:
        for token in set(tokens):
            value, factor = values[token], settings.repetition_penalty
            value = value / factor if value > 0 else value * factor
            values[token] = max(-MOST, min(value, MOST))
    for token in set(counted):
        count = counted.count(token)
        values[token] -= settings.frequency_penalty * count + settings.presence_penalty
    if settings.dry is not None:
        losses = dry_penalties([*so_far.prompt, *so_far.generated], settings.dry)
        for token, loss in losses.items():
            values[token] -= loss
    if so_far.allowed is not None:
        values = [v if i in so_far.allowed else -math.inf for i, v in enumerate(values)]
    left = [v if i not in so_far.banned else -math.inf for i, v in enumerate(values)]
    return left if max(left) > -math.inf else values


def dry_penalties(tokens: Sequence[int], dry: DrySettings) -> dict[int, float]:
    """Return each id's penalty, by the longest end of `tokens` that it followed before."""
    losses: dict[int, float] = {}
    for place in range(1, len(tokens)):
        longest = 0
        while (
            longest < place
            and tokens[place - 1 - longest] == tokens[-1 - longest]
            and tokens[-1 - longest] not in dry.breaker_ids
        ):
            longest += 1
        if longest >= dry.allowed_length:
            try:
                loss = dry.multiplier * dry.base ** (longest - dry.allowed_length)
            except OverflowError:
                loss = math.inf
            losses[tokens[place]] = max(losses.get(tokens[place], 0.0), min(loss, MOST))
    return losses


def probabilities(
    values: Sequence[float], settings: SamplingSettings, mu: float | None = None
) -> list[float]:
    """Return each id's probability after temperature, and top-k, top-p, min-p, or mirostat."""
    top = max(values)
    weights = [math.exp((value - top) / settings.temperature) for value in values]
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if mu is not None:
        mass = sum(weights)
        surprises = [-math.log2(w / mass) if w else math.inf for w in weights]
        kept = [i for i in order if surprises[i] <= mu] or order[:1]
    else:
        order = order[: settings.top_k or None]
        total = sum(weights[i] for i in order)
        kept, mass = [], 0.0
        for i in order:
            if mass < settings.top_p or not kept:
                kept.append(i)
            mass += weights[i] / total
        kept = [i for i in kept if weights[i] >= settings.min_p * weights[order[0]]]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(values))]
