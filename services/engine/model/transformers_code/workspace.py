"""Activations that the fused layers of a model share."""

from collections.abc import Hashable

import torch
from torch import Tensor

from services.engine.model.mixers.attention import AttentionMixer, AttentionScratch
from services.engine.model.operators.interface import Operators
from services.engine.model.operators.rotation import Rotation

__all__ = ["Workspace"]


class Workspace:
    """Buffers of the largest pass so far, and their views for the tokens of the present pass.

    They stay in place from pass to pass, as a recording needs it.
    """

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self.recording = operators.recording(only_decodes=False)
        """Recording of a pass through all layers; None: passes can't be recorded"""
        self.num_layers = 0
        """Number of fused layers"""
        self._capacity = 64
        self._tokens = 0
        self._buffers: dict[Hashable, Tensor | AttentionScratch | Rotation] = {}
        self._views: dict[Hashable, Tensor | AttentionScratch | Rotation] = {}
        self._cosines: Tensor | None = None
        """Cosines of the model from which the present rotation was copied"""

    def begin(self, tokens: int) -> None:
        """Prepare buffers for the number of tokens of the pass that follows."""
        self._cosines = None
        if tokens > self._capacity:
            self._capacity = tokens
            self._buffers.clear()
            if self.recording is not None:
                self.recording.discard()
        if tokens != self._tokens:
            self._tokens = tokens
            self._views.clear()

    def rows(self, name: str, width: int) -> Tensor:
        """Return the activation [tokens, width] of this name."""
        key = (name, width)
        if key not in self._views:
            if key not in self._buffers:
                self._buffers[key] = self.operators.empty(self._capacity, width)
            self._views[key] = self._buffers[key][: self._tokens]  # type: ignore[index]
        return self._views[key]  # type: ignore[return-value]

    def scratch(self, mixer: AttentionMixer) -> AttentionScratch:
        """Return the activations of attention of this shape."""
        key = mixer.scratch_key
        if key not in self._views:
            if key not in self._buffers:
                self._buffers[key] = mixer.allocate(self._capacity)
            self._views[key] = self._buffers[key].first(self._tokens)  # type: ignore[union-attr]
        return self._views[key]  # type: ignore[return-value]

    def rotation(self, cosines: Tensor, sines: Tensor) -> Rotation:
        """Return the rotation of the pass.

        cosines, sines: [1, tokens, head_dim], whose halves are equal; a pass has one of each.
        """
        key, half = "rotation", cosines.shape[2] // 2
        if key not in self._views:
            if key not in self._buffers:
                size, device = (self._capacity, half), cosines.device
                tables = (torch.empty(size, device=device) for _ in range(2))
                self._buffers[key] = Rotation(*tables)
            self._views[key] = self._buffers[key].first(self._tokens)  # type: ignore[union-attr]
        rotation: Rotation = self._views[key]  # type: ignore[assignment]
        if cosines is not self._cosines:
            rotation.cosines.copy_(cosines[0, :, :half])
            rotation.sines.copy_(sines[0, :, :half])
            self._cosines = cosines
        return rotation
