"""Models on this machine's disk: those in the hub's cache, and those below folders.

Only names, sizes, config.json and the first metadata of GGUF files are read.
"""

import glob
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from services.common.gguf.gguf_file import GgufError, first_metadata
from services.common.model_files.hub import HubCheckpoint
from services.common.model_files.mmproj_file import is_mmproj
from services.common.model_files.quantisation import quantisation_of, quantisations_of
from services.common.model_files.short_list import listed_models

__all__ = ["DiskModel", "gguf_parts", "hub_cache", "models_in_cache", "models_in_folder"]

_REPOSITORY = re.compile(r"models--(.+?)--(.+)")
_MAIN = "main"
_PART = re.compile(r"-00001-of-(\d{5})$")
_MOST_FOLDERS = 10_000
_DEPTH = 3
"""Bounds of a scan, so that a wrong folder, such as /, does not take for ever"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskModel:
    """A checkpoint on the disk."""

    name: str
    """Name by which `tokenwire serve` takes it"""
    path: Path
    """Directory of the checkpoint, or the (first) GGUF file"""
    num_bytes: int
    """Size of its files"""
    quantisation: str
    """Q4_K_M of a GGUF file; of a directory the dtype, or the method of quantization; or empty"""
    context: int | None
    """Tokens of prompt and output together, as the checkpoint states; None = it does not say"""
    architecture: str
    """Architecture by config.json, or by the GGUF file's metadata"""
    is_complete: bool = True
    """False for a download that was interrupted"""
    cache_folder: Path | None = None
    """Folder of its repository in the hub's cache; None = it lies elsewhere"""


def hub_cache() -> Path:
    """Return the folder of the hub's cache, by the variables of huggingface_hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def models_in_cache() -> tuple[DiskModel, ...]:
    """Return the models in the hub's cache, by name."""
    found: dict[str, DiskModel] = {}
    for repository in sorted(hub_cache().glob("models--*--*")):
        for model in _of_repository(repository):
            found.setdefault(model.name, model)
    return tuple(found[name] for name in sorted(found))


def models_in_folder(folder: Path) -> tuple[DiskModel, ...]:
    """Return the checkpoints and GGUF files below a folder, by path; links are followed."""
    found = []
    for here, names in _folders(folder):
        if "config.json" in names and any(name.endswith(".safetensors") for name in names):
            found.append(_directory(str(here), here))
        files = [here / name for name in _gguf_models(names)]
        found += [_gguf(str(file), file) for file in files if file.exists()]
    return tuple(found)


def _folders(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield folders with the names of their files, down to a depth, and each folder once."""
    seen: set[str] = set()
    for here, below, names in islice(os.walk(top, followlinks=True), _MOST_FOLDERS):
        real = os.path.realpath(here)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        depth = len(Path(here).relative_to(top).parts)
        hidden = {name for name in below if name.startswith(".")}
        below[:] = [] if depth >= _DEPTH else sorted(set(below) - hidden)
        yield Path(here), sorted(names)


def _gguf_models(names: list[str]) -> list[str]:
    """Return the GGUF files that hold a model: of a split file the first part."""
    ggufs = [name for name in names if name.endswith(".gguf") and not is_mmproj(Path(name))]
    named = [file for files in quantisations_of(ggufs).values() for file in files]
    return named + [name for name in ggufs if quantisation_of(name) is None]


def _of_repository(folder: Path) -> Iterator[DiskModel]:
    """Yield the models of a repository, those of the main branch first."""
    match = _REPOSITORY.fullmatch(folder.name)
    if match is None:
        return
    revisions = _revisions(folder)
    snapshots = sorted((folder / "snapshots").glob("*/"), key=lambda each: each.name)
    name, has_models = "/".join(match.groups()), False
    for snapshot in sorted(snapshots, key=lambda each: revisions.get(each.name) != _MAIN):
        revision = revisions.get(snapshot.name, snapshot.name)
        for model in _of_snapshot(_Snapshot(folder, snapshot, name, revision)):
            has_models = True
            yield model
    if not has_models:
        yield from _interrupted(folder, name)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A revision of a repository in the cache."""

    folder: Path
    path: Path
    repository: str
    revision: str

    def name(self, which: str = "") -> str:
        """Return the short name of a model, or its name on the hub. which: :TAG or /FILE."""
        name = f"{self.repository}{which}"
        if self.revision != _MAIN:
            return f"{name}@{self.revision}"
        return next((row.name for row in listed_models() if row.source == name), name)


def _of_snapshot(snapshot: _Snapshot) -> Iterator[DiskModel]:
    files = [file for file in snapshot.path.rglob("*") if file.is_file()]
    names = [str(file.relative_to(snapshot.path)) for file in files]
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    if has_safetensors and "config.json" in names:
        revision = None if snapshot.revision == _MAIN else snapshot.revision
        checkpoint = HubCheckpoint(snapshot.repository, None, revision)
        size = sum(file.stat().st_size for file in files if file.suffix != ".gguf")
        model = _directory(snapshot.name(), snapshot.path, size)
        is_complete = checkpoint.on_disk() is not None
        yield replace(model, is_complete=is_complete, cache_folder=snapshot.folder)
    by_kind = quantisations_of(name for name in names if name.endswith(".gguf"))
    for kind, same in by_kind.items():
        for file in same:
            name = snapshot.name(f":{kind}" if len(same) == 1 else f"/{file}")
            yield replace(_gguf(name, snapshot.path / file), cache_folder=snapshot.folder)


def _interrupted(folder: Path, name: str) -> Iterator[DiskModel]:
    """Yield the download that has not finished a model yet, if there is one."""
    partial = list((folder / "blobs").glob("*.incomplete"))
    if partial:
        yield DiskModel(
            name=name,
            path=folder,
            num_bytes=sum(file.stat().st_size for file in partial),
            quantisation="",
            context=None,
            architecture="",
            is_complete=False,
            cache_folder=folder,
        )


def _revisions(folder: Path) -> dict[str, str]:
    """Return the revision that names each commit; the main branch takes precedence."""
    references = folder / "refs"
    found: dict[str, str] = {}
    for file in sorted(references.rglob("*")):
        if file.is_file():
            revision = str(file.relative_to(references))
            commit = file.read_text(encoding="utf-8").strip()
            if found.get(commit) != _MAIN:
                found[commit] = revision
    return found


def _directory(name: str, path: Path, num_bytes: int | None = None) -> DiskModel:
    config = _config(path)
    if num_bytes is None:
        num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return DiskModel(
        name=name,
        path=path,
        num_bytes=num_bytes,
        quantisation=_quantization(config),
        context=_context(config),
        architecture=str(names[0]) if names else "",
    )


def _gguf(name: str, path: Path) -> DiskModel:
    try:
        metadata = first_metadata(path)
    except GgufError:
        metadata = {}
    architecture = metadata.get("general.architecture", "")
    context = metadata.get(f"{architecture}.context_length")
    part = _PART.search(path.stem)
    count = 1 if part is None else int(part[1])
    parts = gguf_parts(path)
    return DiskModel(
        name=name,
        path=path,
        num_bytes=sum(part.stat().st_size for part in parts),
        quantisation=quantisation_of(path.name) or "",
        context=context if isinstance(context, int) else None,
        architecture=str(architecture),
        is_complete=bool(metadata) and len(parts) == count,
    )


def gguf_parts(path: Path) -> list[Path]:
    """Return the GGUF file, or the parts that are there of the split file that it begins."""
    part = _PART.search(path.stem)
    if part is None:
        return [path]
    stem = glob.escape(path.stem[: part.start()])
    return list(path.parent.glob(f"{stem}-*-of-{part[1]}.gguf"))


def _config(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _context(config: Mapping[str, Any]) -> int | None:
    for values in (_text_config(config), config):
        for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            if isinstance(value := values.get(key), int):
                return value
    return None


def _quantization(config: Mapping[str, Any]) -> str:
    method = config.get("quantization_config")
    if isinstance(method, dict):
        bits = method.get("bits") or method.get("w_bit")
        return f"{method.get('quant_method', '')}{f' {bits} bits' if bits else ''}"
    for values in (config, _text_config(config)):
        dtype = values.get("dtype") or values.get("torch_dtype")
        if isinstance(dtype, str):
            return dtype
    return ""
