"""Division of texts into parts of bounded size."""

from collections.abc import Iterator, Sequence

__all__ = ["parts"]


def parts(sizes: Sequence[int], most: int, most_texts: int | None = None) -> Iterator[slice]:
    """Yield slices of texts of these sizes, in order, whose sums are at most `most`.

    A larger text has a slice of its own. most_texts: most texts of a slice; None = no limit.
    """
    start = total = 0
    for place, size in enumerate(sizes):
        if place > start and (total + size > most or place - start == most_texts):
            yield slice(start, place)
            start, total = place, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))
