"""A hub's cache as huggingface_hub lays it out: blobs, and links to them in snapshots."""

import hashlib
from pathlib import Path

from gguf import GGUFWriter

__all__ = ["COMMIT", "add_repository", "gguf_bytes"]

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def add_repository(
    cache: Path, name: str, files: dict[str, bytes], *, commit: str = COMMIT, revision: str = "main"
) -> Path:
    """Add a repository's files; return the folder of the snapshot."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for file, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = snapshot / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    reference = folder / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    return snapshot


def gguf_bytes(folder: Path, context: int) -> bytes:
    """Return a GGUF file that has metadata alone."""
    file = folder / "written.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(context)
    writer.add_tokenizer_model("gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes()
