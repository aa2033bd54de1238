"""A directory in the Hugging Face format: its files, and its tensors by name."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.engine.model.config import Config
from services.engine.model.errors import CheckpointError

__all__ = ["Checkpoint", "StoredTensor"]

_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""The dtypes a weight may be stored in, by their names in safetensors files"""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies, known from its file's header alone."""

    file: Path
    shape: tuple[int, ...]
    num_bytes: int


class Checkpoint:
    """The open safetensors files of a checkpoint. Tensors are views of the mapped files.

    Use it as a context manager. Raises CheckpointError when a file is missing, truncated or holds
    a dtype that is not a plain floating one.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._open: dict[Path, safe_open] = {}
        self.tensors: dict[str, StoredTensor] = {}
        """By name, all that the files hold"""

    @staticmethod
    def config(directory: Path) -> Config:
        """config.json of the checkpoint in `directory`."""
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory.")
        return Config.read(directory / "config.json")

    def __enter__(self) -> "Checkpoint":
        with self._stack:
            for file in self._files():
                self._add(file)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.clear()
        self._stack.close()

    def require(self, wanted: Mapping[str, tuple[int, ...]], ignored: frozenset[str]) -> None:
        """Raises CheckpointError unless the files hold exactly `wanted`, names to shapes.

        Tensors in `ignored` may be there or not.
        """
        for name, shape in wanted.items():
            stored = self.tensors.get(name)
            if stored is None:
                raise CheckpointError(f"{self._directory}: no file holds the tensor {name}.")
            if stored.shape != shape:
                raise CheckpointError(
                    f"{stored.file}: the tensor {name} has the shape {list(stored.shape)}, "
                    f"but config.json asks for {list(shape)}."
                )
        for name, stored in self.tensors.items():
            if name not in wanted and name not in ignored:
                raise CheckpointError(
                    f"{stored.file}: the tensor {name} is not part of the model that "
                    "config.json describes."
                )

    def tensor(self, name: str) -> Tensor:
        """A view of the file; reading it is what reads the disk."""
        tensor: Tensor = self._open[self.tensors[name].file].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def _files(self) -> list[Path]:
        index = self._directory / "model.safetensors.index.json"
        if not index.exists():
            return [self._directory / "model.safetensors"]
        placed = Config.read(index).section("weight_map")
        names = sorted({placed.text(name) for name in placed.values})
        if any(Path(name).name != name for name in names):
            raise CheckpointError(f"{index} names a file outside the checkpoint.")
        return [self._directory / name for name in names]

    def _add(self, file: Path) -> None:
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist.")
        try:
            opened = self._stack.enter_context(safe_open(file, framework="pt"))
            for name in opened.keys():  # noqa: SIM118  (it is not a mapping)
                part = opened.get_slice(name)
                dtype, shape = part.get_dtype(), tuple(part.get_shape())
                if dtype not in _DTYPE_BYTES:
                    raise CheckpointError(
                        f"{file}: the tensor {name} is stored as {dtype}, which is not supported; "
                        f"these are: {', '.join(_DTYPE_BYTES)}."
                    )
                size = _DTYPE_BYTES[dtype]
                for extent in shape:
                    size *= extent
                self.tensors[name] = StoredTensor(file, shape, size)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged or truncated: {error}.") from None
        self._open[file] = opened
