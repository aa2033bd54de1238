"""Downloads of large files from the hub that continue where an earlier one was interrupted.

huggingface_hub begins an interrupted file again. This module fetches the files whose content the
hub names by SHA-256, puts them where huggingface_hub looks for them, and leaves the rest to it.
"""

import fcntl
import hashlib
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

__all__ = ["DownloadedFileError", "fetch_large_files", "require_space"]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SUFFIX = ".tokenwire.incomplete"
_CHUNK = 1 << 24


class DownloadedFileError(Exception):
    """A file can't be stored, or is not what the hub promised. The message is one sentence."""


def require_space(files: Sequence["DryRunFileInfo"], folder: Path) -> None:
    """Raise DownloadedFileError unless the disk of a folder has room for the files.

    Parts of earlier downloads count as room that is still needed, so that the check is simple.
    """
    needed = sum(file.file_size or 0 for file in files)
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise DownloadedFileError(
            f"The download takes {needed / 1e9:.2f} GB, and {place} has {free / 1e9:.2f} GB free: "
            "remove a model with `tokenwire rm`, or set HF_HOME to a folder of another disk."
        )


def fetch_large_files(
    repository: str, files: Sequence["DryRunFileInfo"], blobs: Path | None, folder: Path | None
) -> None:
    """Download the files whose content has a SHA-256, one after the other.

    blobs: folder of the contents in the hub's cache. folder: directory of the files themselves, in
    place of the cache. Shows a bar on a terminal, else a line for each file. Raises
    DownloadedFileError, OSError, and the errors of huggingface_hub.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE
    from huggingface_hub.utils._headers import build_hf_headers

    for file in files:
        url = hf_hub_url(repository, file.filename, revision=file.commit_hash)
        found = get_hf_file_metadata(url)
        size, digest = found.size, found.etag
        if size is None or digest is None or not _SHA256.fullmatch(digest):
            continue
        if size > MAX_HTTP_DOWNLOAD_SIZE:
            continue
        place = folder / file.filename if folder is not None else (blobs or Path()) / digest
        headers = build_hf_headers()
        if urlsplit(found.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # the token is the hub's, not the content network's
        source = _Source(found.location, headers, size, digest, file.filename)
        _fetch(source, place)
        if not sys.stderr.isatty():
            print(f"{file.filename}: {size / 1e6:.0f} MB", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class _Source:
    """Place of a file's content, and what is known of it."""

    url: str
    headers: Mapping[str, str]
    size: int
    digest: str
    name: str


def _fetch(source: _Source, place: Path) -> None:
    """Download a file, from the end of what is there. Two processes take turns."""
    from huggingface_hub.file_download import http_get

    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(f"{place.name}{_SUFFIX}")
    with partial.open("ab") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        if place.exists():
            partial.unlink(missing_ok=True)
            return
        offset = opened.tell()
        if offset > source.size:
            opened.truncate(0)
            offset = 0
        http_get(
            source.url,
            opened,
            resume_size=offset,
            headers=dict(source.headers),
            expected_size=source.size,
            displayed_filename=source.name,
        )
        opened.flush()
        if offset and _sha256(partial) != source.digest:
            partial.unlink()
            raise DownloadedFileError(
                f"{source.name} was interrupted and continued, and is damaged: download it again."
            )
        partial.replace(place)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
