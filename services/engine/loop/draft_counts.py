"""Drafts as they are reported."""

from collections.abc import Collection, Mapping, Sequence

from services.engine.messages import DraftCount
from services.engine.scheduling.speculation import DraftKind, DraftTotals

__all__ = ["draft_counts"]


def draft_counts(
    parts: Sequence[Mapping[DraftKind, DraftTotals]], stated: Collection[DraftKind] = ()
) -> tuple[DraftCount, ...]:
    """Return the sums of the parts, of the sources that are stated or have a draft."""
    counts = []
    for kind in DraftKind:
        drafts = sum(part[kind].drafts for part in parts)
        if drafts or kind in stated:
            drafted = sum(part[kind].drafted for part in parts)
            accepted = sum(part[kind].accepted for part in parts)
            counts.append(DraftCount(kind.value, drafts, drafted, accepted))
    return tuple(counts)
