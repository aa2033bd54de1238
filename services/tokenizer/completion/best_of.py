"""best_of: which of the candidates are answered."""

from collections.abc import Sequence
from math import fsum, inf

__all__ = ["rank"]


def rank(candidates: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the candidates, best first, from the logprobs of the tokens that each keeps.

    The mean decides, so that length does not; of equals, the first. One without tokens is last.
    """
    means = [fsum(logprobs) / len(logprobs) if logprobs else -inf for logprobs in candidates]
    return sorted(range(len(means)), key=lambda index: (-means[index], index))
