"""Name and key of the file that keeps a model's packed weights (`--packed-cache`)."""

import hashlib
import re
from pathlib import Path

import torch

import services.engine
from services.common.settings import StartupError
from services.engine.kernels.build import LIBRARY
from services.engine.kernels.library import instruction_set
from services.engine.kernels.packed_file import PackedFile
from services.engine.model.checkpoint.fingerprint import weight_files, weights_fingerprint
from services.engine.ranks.rank import Rank

__all__ = ["open_packed"]

_CODE = Path(services.engine.__file__).parent


def open_packed(
    cache: Path, model: Path, dtype: torch.dtype, weights: str, rank: Rank
) -> PackedFile:
    """Open the file of this rank's packed weights of the checkpoint in `model`.

    The name of the file depends on the model and the flags, its key on all else that decides the
    bytes. So a changed file of the model, or another version of the program, replaces the file.
    weights: value of --weights. Raises StartupError for a directory that can't be opened.
    """
    content = weights_fingerprint(model, weights)
    parts = (content, str(dtype), weights, str(instruction_set()), rank.number, rank.count)
    name = re.sub(r"[^\w.-]", "_", weight_files(model)[0].resolve().name)[:64]
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
    try:
        return PackedFile(cache, f"{name}-{digest}.packed", _key(model, parts))
    except OSError as error:
        raise StartupError(f"--packed-cache {cache}: {error.strerror}.") from None


def _key(model: Path, parts: tuple[object, ...]) -> str:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=32)
    for file in weight_files(model):
        found = file.stat()
        # No program can set the time of the last change, so copies with an old date count as new.
        times = found.st_size, found.st_mtime_ns, found.st_ctime_ns
        digest.update(f"{file.name} {times}".encode())
    digest.update(f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}".encode())
    for code in (LIBRARY, *sorted(_CODE.rglob("*.py"))):
        digest.update(hashlib.blake2b(code.read_bytes()).digest())
    return digest.hexdigest()
