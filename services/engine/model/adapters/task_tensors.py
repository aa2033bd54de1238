"""Checkpoints whose files hold the LoRA adapters of several tasks beside the weights (Jina v3)."""

from pathlib import Path
from typing import Self

from torch import Tensor

from services.engine.model.adapters.peft_files import LowRankPair, PeftAdapter
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.tensors import Checkpoint, FoundTensor, StoredTensor

__all__ = ["TaskTensors"]

_PARAMETER = ".parametrizations.weight"
_ORIGINAL = f"{_PARAMETER}.original"
_DOWN, _UP = f"{_PARAMETER}.0.lora_A", f"{_PARAMETER}.0.lora_B"
_TABLES = "embeddings."
"""Part of the names of embeddings, whose adapters are stored transposed"""
_UNUSED = "pooler."
_STACK = 3  # dimensions


class TaskTensors(Checkpoint):
    """Files whose weights have the names of torch's parametrizations, read under `….weight`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._adapters: dict[str, FoundTensor] = {}
        self._own: dict[str, str] = {}
        """Name in the files of each weight that is stored under another name"""

    def __enter__(self) -> Self:
        opened = super().__enter__()
        for name in self.names:
            if name.endswith((_DOWN, _UP)):
                self._adapters[name] = self._found.pop(name)
            elif name.endswith(_ORIGINAL):
                weight = f"{name.removesuffix(_ORIGINAL)}.weight"
                self._found[weight] = self._found.pop(name)
                self._own[weight] = name
        return opened

    def tensor(self, stored: StoredTensor) -> Tensor:
        own = self._own.get(stored.name)
        if own is None:
            return super().tensor(stored)
        file = self._open[self._found[stored.name].file]
        tensor: Tensor = file.get_tensor(own)  # type: ignore[no-untyped-call]
        return tensor

    def adapter(self, config: Config, number: int) -> PeftAdapter:
        """Return the adapter of a task by its number in lora_adaptations. Raises CheckpointError.

        An embedding's pair is returned like that of a linear layer that reads one-hot rows.
        """
        scale = config.number("lora_alpha") / config.positive("lora_rank")
        pairs = {}
        for name in self._adapters:
            if name.endswith(_DOWN) and _UNUSED not in name:
                layer = name.removesuffix(_DOWN)
                down, up = (self._part(layer + end, number) for end in (_DOWN, _UP))
                if _TABLES in layer:
                    down, up = down.T, up.T
                pairs[layer] = LowRankPair(down, up, scale)
        if not pairs:
            raise CheckpointError(f"{self._directory} has no adapters of tasks.")
        return PeftAdapter(pairs)

    def _part(self, name: str, number: int) -> Tensor:
        found = self._adapters.get(name)
        if found is None or len(found.shape) != _STACK or number >= found.shape[0]:
            raise CheckpointError(f"{self._directory}: {name} has no adapter of task {number}.")
        stack = self._open[found.file].get_slice(name)  # type: ignore[no-untyped-call]
        part: Tensor = stack[number]
        return part
