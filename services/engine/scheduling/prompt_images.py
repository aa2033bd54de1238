"""Images of a prompt: the ids that stand for them, rotary positions, and runs within a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.engine.checked_request import PlacedImage

__all__ = ["ImageRun", "PromptImages"]


@dataclass(frozen=True, slots=True)
class ImageRun:
    """Consecutive parts of an image within some ids of its prompt."""

    image: PlacedImage
    first: int
    """Index of the first part within the image"""
    indices: npt.NDArray[np.int64]
    """int64 [parts], indices of the parts' ids in the prompt, ascending"""


class PromptImages:
    """Images of one prompt, which all its choices share."""

    def __init__(self, images: Sequence[PlacedImage], prompt_length: int) -> None:
        self._images = images
        self._places = [np.array(image.places, dtype=np.int64) for image in images]
        self._positions = _grid_positions(images, prompt_length)

    def digests(self, start: int, end: int) -> bytes:
        """Return the joined digests of the images that ids from `start` to `end` stand for."""
        return b"".join(run.image.digest for run in self.runs(start, end))

    def runs(self, start: int, end: int) -> Iterator[ImageRun]:
        """Yield each image's parts among the ids from `start` to `end`."""
        for image, places in zip(self._images, self._places, strict=True):
            first, last = np.searchsorted(places, (start, end))
            if first < last:
                yield ImageRun(image, int(first), places[first:last])

    def span_around(self, index: int) -> tuple[int, int] | None:
        """Return first index and end of the image that the id at `index` stands for.

        Its ids must be consecutive. Returns None for text, and beyond the prompt.
        """
        for places in self._places:
            if places[0] <= index <= places[-1]:
                return int(places[0]), int(places[-1]) + 1
        return None

    def whole(self, start: int, count: int) -> int:
        """Return `count`, changed so that the tokens from `start` on do not end within an image.

        The count is lowered to end before the image. If no token is left, the whole image is
        taken, which exceeds a step's limit by less than the image.
        """
        span = self.span_around(start + count)
        if span is None or span[0] == start + count:
            return count
        first, end = span
        return first - start if first > start else end - start

    def rotary_positions(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return time, row and column of the ids from `start` to `end`: int64 [3, ids].

        All ids of an image have one time. Text after it goes on behind its largest row or column.
        Indices beyond the prompt are generated text.
        """
        length = self._positions.shape[1] - 1
        indices = np.arange(start, end)
        beyond = np.maximum(indices - length, 0)
        positions: npt.NDArray[np.int64] = self._positions[:, np.minimum(indices, length)] + beyond
        return positions


def _grid_positions(images: Sequence[PlacedImage], length: int) -> npt.NDArray[np.int64]:
    """Return time, row and column of the ids and of the next id: int64 [3, length + 1]."""
    positions = np.empty((3, length + 1), dtype=np.int64)
    done = following = 0

    def write_text(end: int) -> None:
        positions[:, done:end] = np.arange(following, following + end - done)

    for image in images:
        if image.grid is None:
            continue
        first, (rows, columns) = image.places[0], image.grid
        write_text(first)
        following += first - done
        done = first + rows * columns
        row, column = np.divmod(np.arange(rows * columns), columns)
        positions[:, first:done] = following
        positions[1, first:done] += row
        positions[2, first:done] += column
        following += max(rows, columns)
    write_text(length + 1)
    return positions
