"""A name for a checkpoint's weights that is cheap to compute and the same on every machine."""

import hashlib
from pathlib import Path

__all__ = ["weights_fingerprint"]

_SAMPLES = 256
_SAMPLE_BYTES = 4096


def weights_fingerprint(directory: Path, weights: str = "full") -> str:
    """16 hex digits over config.json and samples of every safetensors file, and over --weights.

    Training changes every weight, so that samples tell two exports apart without reading gigabytes:
    per file its size, its first bytes (names and shapes) and 256 pieces of 4 KiB.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update((directory / "config.json").read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as data:
            for sample in range(_SAMPLES):
                data.seek(size * sample // _SAMPLES)
                digest.update(data.read(_SAMPLE_BYTES))
    if weights != "full":
        digest.update(weights.encode())
    return digest.hexdigest()
