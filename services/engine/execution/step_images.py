"""Images in a step's batch: their rows, and the positions and views of its tokens."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.engine.batch.staging import HostFields
from services.engine.batch.step_batch import ImageRows, StagedImages
from services.engine.batch.transfer import to_device
from services.engine.checked_request import PlacedImage
from services.engine.model.architecture.cache_groups import layer_groups
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.family import ImageSight
from services.engine.scheduling.prompt_images import PromptImages
from services.engine.scheduling.step_plan import StepPlan

__all__ = ["NO_IMAGES", "ImageFields", "StepImages"]


@dataclass(frozen=True, slots=True)
class ImageFields:
    """Fields of a StepBatch that images fill in."""

    rows: tuple[ImageRows, ...] = ()
    rotary_positions: Tensor | None = None
    visible_ends: Tensor | None = None
    """int32 [tokens], the `visible_ends` of the groups that `StepImages.groups_ahead` marks"""


NO_IMAGES = ImageFields()


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of one sequence with images that a step computes."""

    images: PromptImages
    start: int
    """Index of the first token in the sequence"""
    end: int
    row: int
    """Row of the first token in the step"""

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.end - self.start)


class StepImages:
    """Images of one step after another, for one model."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._hidden_size = spec.hidden_size
        self.has_grid = spec.has_grid_positions
        """True if tokens have rotary positions by the grids of images"""
        sight = spec.family.image_sight
        self.groups_ahead = tuple(
            sight is ImageSight.ALL or (sight is ImageSight.WINDOWS and group.window > 0)
            for group in layer_groups(spec)
        )
        """True for each cache group in which an image's token sees the later tokens of this
        image"""
        self._layers = spec.family.image_layers
        self._dtype = dtype
        self._device = device
        self._staged: Tensor | None = None
        """[layers, rows, hidden_size], the embeddings of the images of a step that a graph runs"""

    def reserve(self, tokens: int) -> None:
        """Reserve memory for the images of padded steps of up to so many tokens.

        Graphs don't hold what tokens see ahead, so models with such images get no memory.
        """
        if self._layers and not any(self.groups_ahead):
            shape = (self._layers, tokens, self._hidden_size)
            self._staged = torch.zeros(shape, dtype=self._dtype, device=self._device)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the reserved memory."""
        return 0 if self._staged is None else self._staged.nbytes

    @property
    def are_staged(self) -> bool:
        """True if padded steps with chunks hold images."""
        return self._staged is not None

    def stage(self, plan: StepPlan, fields: HostFields) -> None:
        """Write the images of a padded step to the reserved memory, and the rows of its tokens."""
        assert self._staged is not None
        fields.image_rows[:] = -1
        end = 0
        for part in _parts(plan, fields):
            for run in part.images.runs(part.start, part.end):
                start, end = end, end + len(run.indices)
                last = run.first + len(run.indices)
                embeddings = self._embeddings(run.image)[:, run.first : last]
                self._staged[:, start:end] = to_device(embeddings, self._device)
                fields.image_rows[run.indices - part.start + part.row] = np.arange(start, end)

    def staged(self, rows: Tensor) -> StagedImages | None:
        """Return the images that `stage` has written. rows: the tokens' rows, on the device."""
        return None if self._staged is None else StagedImages(rows, self._staged)

    def fill(self, plan: StepPlan) -> bool:
        """Return whether a chunk of the step has tokens of images."""
        return any(
            next(chunk.sequence.images.runs(chunk.start, chunk.end), None) is not None
            for chunk in plan.chunks
            if chunk.sequence.images is not None
        )

    def affect(self, plan: StepPlan) -> bool:
        """Return whether images change the step: it has image tokens, or positions after images."""
        return (
            self.has_grid and any(sequence.images is not None for sequence in plan.decodes)
        ) or any(chunk.sequence.images is not None for chunk in plan.chunks)

    def of(
        self, plan: StepPlan, fields: HostFields, *, has_positions: bool, has_rows: bool
    ) -> ImageFields:
        """Return the fields that images add to a step whose other fields are filled in.

        has_positions: whether its rotary positions are among them; has_rows: whether the rows of
        images are.
        """
        parts = list(_parts(plan, fields))
        return ImageFields(
            rows=tuple(each for part in parts for each in self._rows(part)) if has_rows else (),
            rotary_positions=self._rotary_positions(parts, fields) if has_positions else None,
            visible_ends=self._visible_ends(parts, fields) if any(self.groups_ahead) else None,
        )

    def fill_positions(
        self, plan: StepPlan, fields: HostFields, out: npt.NDArray[np.signedinteger[Any]]
    ) -> None:
        """Write the rotary positions of tokens of sequences with images to `out` [3, tokens]."""
        _write_positions(_parts(plan, fields), out)

    def _rows(self, part: _Part) -> Iterator[ImageRows]:
        for run in part.images.runs(part.start, part.end):
            embeddings = self._embeddings(run.image)
            last = run.first + len(run.indices)
            yield ImageRows(
                to_device(torch.from_numpy(run.indices - part.start + part.row), self._device),
                to_device(embeddings[:, run.first : last], self._device),
            )

    def _embeddings(self, image: PlacedImage) -> Tensor:
        flat = torch.frombuffer(image.embeddings, dtype=self._dtype)
        return flat.view(-1, len(image.places), self._hidden_size)

    def _rotary_positions(self, parts: list[_Part], fields: HostFields) -> Tensor:
        positions = np.tile(fields.positions, (3, 1))
        _write_positions(parts, positions)
        return to_device(torch.from_numpy(positions), self._device)

    def _visible_ends(self, parts: list[_Part], fields: HostFields) -> Tensor | None:
        """Return the ends, or None if no image is among the tokens."""
        ends = None
        for part in parts:
            for run in part.images.runs(part.start, part.end):
                if ends is None:
                    ends = (fields.positions + 1).astype(np.int32)
                ends[run.indices - part.start + part.row] = run.image.places[-1] + 1
        return None if ends is None else to_device(torch.from_numpy(ends), self._device)


def _write_positions(parts: Iterable[_Part], out: npt.NDArray[np.signedinteger[Any]]) -> None:
    for part in parts:
        out[:, part.rows] = part.images.rotary_positions(part.start, part.end)


def _parts(plan: StepPlan, fields: HostFields) -> Iterator[_Part]:
    for row, sequence in enumerate(plan.decodes):
        if sequence.images is not None:
            index = int(fields.positions[row])
            yield _Part(sequence.images, index, index + 1, row)
    row = len(plan.decodes)
    for chunk in plan.chunks:
        if chunk.sequence.images is not None:
            yield _Part(chunk.sequence.images, chunk.start, chunk.end, row)
        row += chunk.count
