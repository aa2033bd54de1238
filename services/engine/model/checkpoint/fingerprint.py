"""Fingerprints of a checkpoint: cheap to compute, the same on every machine."""

import hashlib
from pathlib import Path

from services.common.gguf.checkpoint_files import MMPROJ, PARTS

__all__ = ["tokenizer_fingerprint", "weight_files", "weights_fingerprint"]

_SAMPLES = 256
_SAMPLE_BYTES = 4096


def weights_fingerprint(
    directory: Path, weights: str = "full", states: str = "float32", keys: str = "auto"
) -> str:
    """Return 16 hex digits that identify the weights in `directory`, as --weights loads them.

    states: --state-dtype, which changes the answers of recurrent models; keys: --kv-dtype, of which
    only int8 counts: 16 bits change the answers less than another instruction set does.

    The digits hash config.json, each weight file's name and size, and 256 evenly spaced pieces of
    4 KiB per file. Training changes every weight, so samples tell two exports apart. The heads of
    BGE-M3 and the adapters of tasks count as weight files.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update((directory / "config.json").read_bytes())
    for file in weight_files(directory):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as data:
            for sample in range(_SAMPLES):
                data.seek(size * sample // _SAMPLES)
                digest.update(data.read(_SAMPLE_BYTES))
    if weights not in ("full", "mapped"):  # these two compute the same
        digest.update(weights.encode())
    if states != "float32":
        digest.update(states.encode())
    if keys == "int8":
        digest.update(f"keys in {keys}".encode())
    return digest.hexdigest()


def weight_files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint that hold weights."""
    patterns = ("*.safetensors", "*_linear.pt", "adapters/*/adapter_*", f"{PARTS}/*", f"{MMPROJ}/*")
    return sorted(file for pattern in patterns for file in directory.glob(pattern))


def tokenizer_fingerprint(directory: Path) -> str:
    """Return the SHA-256 of tokenizer.json, in hex; empty if the directory has none."""
    try:
        return hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""
