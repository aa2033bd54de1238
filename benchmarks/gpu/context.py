"""Context of a part: the device, the sizes to use and the folders."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch

from benchmarks.gpu.checkpoints import make_checkpoint
from benchmarks.gpu.report import Figure

__all__ = ["Context", "Row", "Rows", "UnavailableError", "release"]

Row: TypeAlias = "dict[str, Figure]"
"""Figures of one case by name; `ok` is False if one of them is out of its bounds"""
Rows: TypeAlias = Iterator[Row]
Size = TypeVar("Size")


class UnavailableError(Exception):
    """This machine lacks what a part needs; the message says what."""


@dataclass(frozen=True, slots=True)
class Context:
    """Device, sizes and files with which a part runs."""

    device: torch.device
    is_dry: bool
    """True if the sizes must be so small that a CPU computes the part in seconds"""
    checkpoints: Path
    """Folder of the checkpoints, which every part may add to"""

    @property
    def on_gpu(self) -> bool:
        """True if the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations: bfloat16, or float16, which Triton's interpreter multiplies."""
        return torch.float16 if self.is_dry else torch.bfloat16

    def size(self, full: Size, dry: Size) -> Size:
        """Return the size for this run."""
        return dry if self.is_dry else full

    def checkpoint(self, name: str, config: Mapping[str, object], *, small: bool = False) -> Path:
        """Return the folder of a checkpoint with random weights, which the first call makes.

        small: `config` only adds to the shape of the small families.
        """
        path = make_checkpoint(self.checkpoints / name, config, self.device, small=small)
        release()
        return path

    def variant(self, path: Path, changes: Mapping[str, object]) -> Path:
        """Return a checkpoint with other values in config.json that shares its weights."""
        names = "-".join(f"{name}-{value}" for name, value in sorted(changes.items()))
        out = path.with_name(f"{path.name}-{names}")
        if not (out / "config.json").exists():
            out.mkdir(exist_ok=True)
            for file in path.iterdir():
                if file.name != "config.json":
                    (out / file.name).symlink_to(file.resolve())
            values = json.loads((path / "config.json").read_text()) | changes
            (out / "config.json").write_text(json.dumps(values))
        return out

    def require_capability(self, major: int, minor: int, purpose: str) -> None:
        """Raise UnavailableError unless the device is a GPU of this compute capability."""
        if not self.on_gpu:
            raise UnavailableError(f"{purpose} needs a GPU")
        if torch.cuda.get_device_capability() < (major, minor):
            raise UnavailableError(f"{purpose} needs compute capability {major}.{minor}")

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        if self.on_gpu:
            torch.cuda.synchronize()


def release() -> None:
    """Give unused memory back to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
