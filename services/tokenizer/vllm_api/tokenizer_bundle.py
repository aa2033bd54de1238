"""Tokenizer files of a checkpoint as one zip archive."""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

__all__ = ["TokenizerBundle", "pack_tokenizer"]

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
    "chat_template.json",
    "preprocessor_config.json",
)
_TEMPLATES = "*.jinja"
_CHUNK_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """The archive, and its SHA-256 in hexadecimal."""

    data: bytes
    sha256: str

    def chunks(self) -> Iterator[common_pb2.GetTokenizerChunk]:
        """Yield the archive in parts; the last one has the hash."""
        for begin in range(0, len(self.data), _CHUNK_BYTES):
            end = begin + _CHUNK_BYTES
            yield common_pb2.GetTokenizerChunk(
                data=self.data[begin:end],
                sha256=self.sha256 if end >= len(self.data) else "",
            )


def pack_tokenizer(directory: Path) -> TokenizerBundle:
    """Return the archive of a checkpoint's tokenizer. Equal files give equal bytes."""
    archive = io.BytesIO()
    paths = [directory / name for name in _FILES]
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as bundle:
        for path in filter(Path.is_file, [*paths, *sorted(directory.glob(_TEMPLATES))]):
            entry = zipfile.ZipInfo(path.name)  # dated 1980, so equal content has an equal hash
            bundle.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = archive.getvalue()
    return TokenizerBundle(data, hashlib.sha256(data).hexdigest())
