"""Checks of a checkpoint's folder: common mistakes, and the remedy for each."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from services.common.model_files.hub import HubCheckpoint
from services.common.model_files.mmproj_file import is_mmproj

__all__ = [
    "CheckpointFolderError",
    "gguf_of",
    "require_config",
    "require_readable",
    "served_name",
]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_REPOSITORY = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
"""Folder of a repository in the cache of a Hugging Face hub"""
_PICKLES = ("pytorch_model*.bin", "consolidated*.pth", "*.pt", "*.pth")
_CONVERT = (
    "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
    "[each.from_pretrained('{0}').save_pretrained('{1}') for each in (M, T)]"
)
_PART = re.compile(r"-\d{5}-of-\d{5}$")
"""End of the name of a part of a split GGUF file"""
_LFS_POINTER = b"version https://git-lfs"


class CheckpointFolderError(Exception):
    """The path holds no checkpoint that can be served. The message is one sentence."""


def require_readable(path: Path) -> None:
    """Raise CheckpointFolderError if the services can't read a checkpoint in this form."""
    if path.is_file() and path.suffix == ".gguf":
        return
    if not path.is_dir():
        raise CheckpointFolderError(_no_directory(path))
    try:
        reason = next(_reasons(path), None)
    except PermissionError as error:
        raise CheckpointFolderError(f"No permission to read {error.filename}.") from None
    if reason is not None:
        raise CheckpointFolderError(reason)


def gguf_of(path: Path) -> Path | None:
    """Return the path itself if it is a GGUF file, or the only GGUF file in the directory."""
    if path.is_file():
        return path
    files = _gguf_files(path)
    return files[0] if len(files) == 1 and not _first(path, "*.safetensors") else None


def require_config(path: Path) -> None:
    """Raise CheckpointFolderError unless the directory has a config.json with an object.

    A GGUF file needs none.
    """
    if gguf_of(path) is not None:
        return
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointFolderError(f"The model directory {path} holds no config.json.")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except PermissionError:
        raise CheckpointFolderError(f"No permission to read {file}.") from None
    except (OSError, ValueError) as error:
        raise CheckpointFolderError(f"{file} cannot be read as JSON: {error}.") from None
    if not isinstance(values, dict) or not values.get("architectures"):
        raise CheckpointFolderError(f"{file} names no architectures; see docs/models.md.")


def served_name(path: Path) -> str:
    """Return the name under which a checkpoint is served: its repository's, or its folder's."""
    if path.suffix == ".gguf":
        return _PART.sub("", path.stem)
    resolved = path.resolve()
    if resolved.parent.name == "snapshots":
        repository = _REPOSITORY.fullmatch(resolved.parent.parent.name)
        if repository is not None:
            return "/".join(repository.groups())
    return resolved.name


def _no_directory(path: Path) -> str:
    if path.exists():
        return f"{path} is no GGUF file; give the directory that holds it and config.json."
    if HubCheckpoint.is_named_by(str(path)):
        return f"{path} is not a directory; `tokenwire pull {path}` downloads it and prints one."
    if _HUB_ID.fullmatch(str(path)):
        return f"There is no directory {path}; hf:{path} is that repository of the hub."
    return f"The model directory {path} does not exist."


def _reasons(path: Path) -> Iterator[str]:
    """Yield the reasons why the directory can't be served as a checkpoint."""
    yield from _of_hub_cache(path)
    if not (path / "config.json").is_file():
        yield from _of_adapter(path)
    yield from _of_pointers(path)
    yield from _of_weights(path)


def _of_hub_cache(path: Path) -> Iterator[str]:
    snapshots = sorted(path.glob("snapshots/*/")) or sorted(path.glob("models--*/snapshots/*/"))
    if snapshots:
        names = " or ".join(str(each) for each in snapshots[:3])
        yield f"{path} is a folder of the hub's cache; serve a snapshot in it: {names}."


def _of_adapter(path: Path) -> Iterator[str]:
    file = path / "adapter_config.json"
    if not file.is_file():
        return
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = "its base model"
    yield (
        f"{path} is a LoRA adapter, which is not served alone: merge it into {base} with peft's "
        "merge_and_unload(), save the result with save_pretrained(), and serve that."
    )


def _of_pointers(path: Path) -> Iterator[str]:
    for name in ("config.json", "tokenizer.json", "*.safetensors"):
        for file in sorted(path.glob(name)):
            if not file.is_file():
                continue
            with file.open("rb") as opened:
                if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
                    yield f"{file} is a pointer of git-LFS; run `git lfs pull` in {path}."


def _of_weights(path: Path) -> Iterator[str]:
    if _first(path, "*.safetensors"):
        yield from _of_index(path)
    elif len(files := _gguf_files(path)) > 1:
        names = ", ".join(file.name for file in files[:3])
        yield f"{path} holds {len(files)} GGUF files ({names}, …); name the one to serve."
    elif pickle := _first(path, *_PICKLES):
        target = f"{path.resolve()}-safetensors"
        yield (
            f"The weights in {path} are a pickle ({pickle.name}), which could run any code; "
            f'convert them with `.venv/bin/python -c "{_CONVERT.format(path, target)}"` '
            f"and serve {target}."
        )


def _of_index(path: Path) -> Iterator[str]:
    index = path / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return  # the engine reads the file again, and reports what is wrong
    missing = sorted(str(name) for name in names if not (path / str(name)).exists())
    if missing:
        yield (
            f"{path} lacks {len(missing)} of the files that {index.name} names, such as "
            f"{missing[0]}; download them again."
        )


def _gguf_files(path: Path) -> list[Path]:
    """Return the models in GGUF files of a directory; a split file counts as its first part."""
    files = sorted(file for file in path.glob("*.gguf") if not is_mmproj(file))
    return [file for file in files if not _PART.search(file.stem) or "-00001-of-" in file.name]


def _first(path: Path, *patterns: str) -> Path | None:
    return next((file for each in patterns for file in sorted(path.glob(each))), None)
