"""Check of the model and of the free memory before the engine starts. Free of torch."""

import os
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from services.common.gguf.checkpoint_files import MMPROJ, PARTS
from services.common.gguf.gguf_config import config_of
from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.host_memory import free_host_memory, in_units
from services.common.model_files.checkpoint_folder import (
    CheckpointFolderError,
    gguf_of,
    require_readable,
)
from services.common.model_files.mmproj_file import mmproj_beside
from services.common.settings import StartupError
from services.engine.kernels.freshness import require_current
from services.engine.model.checkpoint.architectures import family_of
from services.engine.model.checkpoint.assistant_config import is_assistant
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.eagle_config import is_eagle
from services.engine.model.checkpoint.encoder_families import JINA_V5
from services.engine.model.checkpoint.model_code import ModelCode, code_of
from services.engine.model.checkpoint.stored_weights import StoredWeights
from services.engine.model.checkpoint.task_names import (
    TASKS_IN_DIRECTORIES,
    adapter_directory,
    read_tasks,
)
from services.engine.ranks.rank import Rank
from services.engine.settings import EngineSettings, parse_bytes, parse_share

__all__ = [
    "check_config",
    "check_room",
    "check_start",
    "checkpoint_config",
    "gpu_memory_by_weights",
    "memory_by_weights",
    "needed_bytes",
    "require_room",
    "stored_weights",
]

_DRIVER = Path("/proc/driver/nvidia/version")
_PROCESSOR = Path("/proc/cpuinfo")
_HALVES = frozenset({"avx512_bf16", "amx_bf16"})
"""Flags of processors that multiply bfloat16"""
_WIDE = frozenset({"avx2", "fma", "f16c"})
"""Flags of processors whose kernels read weights in their stored form, mapped or in memory"""
_CODED_BYTES = 12.5 / 8
"""Bytes of a bfloat16 number in the CPU's coded form"""
_BFLOAT16_BYTES = 2
_ROUNDED = ("int8", "int4")


def check_start(settings: EngineSettings) -> None:
    """Raise StartupError for stale kernels, a model that is not served, and too little memory.

    Checks that need torch come when the model is loaded: other values of config.json, a GPU's
    memory, and the room for the KV cache.
    """
    require_current()
    if settings.packed_cache:
        _require_directory(Path(settings.packed_cache))
    try:
        config = checkpoint_config(settings.model)
        check_config(config, settings)
        check_room(stored_weights(settings.model), config, settings)
    except (CheckpointError, GgufError) as error:
        raise StartupError(str(error)) from None


def needed_bytes(settings: EngineSettings) -> int:
    """Return the bytes of weights and KV cache, whatever memory is free.

    A KV cache of a share counts as that share of the free memory. Raises StartupError for a model
    that is not served.
    """
    try:
        config = checkpoint_config(settings.model)
        check_config(config, settings)
        weights = stored_weights(settings.model)
    except (CheckpointError, GgufError) as error:
        raise StartupError(str(error)) from None
    if not _can_map(config, settings):
        weights = replace(weights, mapped_bytes=0)
    draft = _draft_bytes(settings) + _tower_bytes(settings)
    share = 0.5 if settings.kv_memory == "auto" else parse_share(settings.kv_memory)
    cache = parse_bytes(settings.kv_memory) if share is None else int(free_host_memory() * share)
    return weights.num_bytes(settings.weights, _number_bytes(settings)) + draft + cache


def _require_directory(cache: Path) -> None:
    """Raise StartupError for a directory in which packed weights can't be kept."""
    if not cache.is_dir():
        raise StartupError(f"--packed-cache {cache} is not a directory. Make it first.")
    if not os.access(cache, os.R_OK | os.W_OK | os.X_OK):
        raise StartupError(f"--packed-cache {cache} is not writable by this user.")


def check_config(config: Config, settings: EngineSettings) -> None:
    """Raise CheckpointError for a config.json of an architecture that is not served."""
    code_of(config, settings.model_code)


def stored_weights(model: Path) -> StoredWeights:
    """Return the sizes of a checkpoint's weights, and of the adapters that are loaded with them.

    Raises CheckpointError or GgufError.
    """
    gguf = _gguf(model)
    if gguf is not None:
        return StoredWeights.of_gguf(GgufFile(gguf))
    return StoredWeights.of_directory(model, _adapters(model))


def memory_by_weights(model: Path) -> dict[str, int]:
    """Return the bytes that the weights take on this machine's CPU, by value of --weights.

    Only values that can start here. Raises CheckpointError, GgufError, or StartupError.
    """
    weights, config = stored_weights(model), checkpoint_config(model)
    found = {}
    for name in ("full", "mapped", "decoded", *_ROUNDED):
        settings = EngineSettings(weights=name)
        if name == "mapped" and not (weights.mapped_bytes and _can_map(config, settings)):
            continue
        if name in _ROUNDED and (weights.coded or weights.is_rounded):
            continue
        found[name] = weights.num_bytes(name, _number_bytes(settings))
    return found


def gpu_memory_by_weights(model: Path) -> dict[str, int]:
    """Return the bytes that the weights take on a GPU in bfloat16, by value of --weights.

    The GPU is one that keeps codes packed and multiplies in FP8. Only values that can start there.
    Raises CheckpointError or GgufError.
    """
    weights = stored_weights(model)
    packed = weights.on_gpu(packs=True, keeps_fp8=True)
    found = {"full": packed.num_bytes("full", _BFLOAT16_BYTES)}
    if weights.coded or weights.fp8:
        decoded = weights.on_gpu(packs=False)
        found["decoded"] = decoded.num_bytes("decoded", _BFLOAT16_BYTES)
    elif not weights.is_rounded:
        found["fp8"] = packed.num_bytes("fp8", _BFLOAT16_BYTES)
    return found


def checkpoint_config(model: Path) -> Config:
    """Return config.json, or what a GGUF file states. Raises CheckpointError or GgufError."""
    gguf = _gguf(model)
    if gguf is None:
        return Config.read(model / "config.json")
    return Config(str(gguf), config_of(GgufFile(gguf)))


def _adapters(model: Path) -> list[Path]:
    """Return the directories of the adapters of tasks, which are loaded with the weights."""
    config = Config.read(model / "config.json")
    if not config.has("architectures") or JINA_V5 not in config.texts("architectures"):
        return []
    return [adapter_directory(model, task) for task in read_tasks(config, TASKS_IN_DIRECTORIES)]


def check_room(weights: StoredWeights, config: Config | None, settings: EngineSettings) -> None:
    """Raise StartupError for weights that can't fit into this machine's memory.

    config: None = it is not known yet. A GPU's memory is not known here.
    """
    if settings.device == "cpu" or not _DRIVER.exists():
        rank = Rank.from_environment()
        free = free_host_memory() * rank.count // rank.local_count
        if not _can_map(config, settings):
            weights = replace(weights, mapped_bytes=0)
        number_bytes = _number_bytes(settings)
        others = ("mapped",) if weights.mapped_bytes else _ROUNDED
        require_room(weights, settings.weights, free, number_bytes, others)
        free -= weights.num_bytes(settings.weights, number_bytes)
        free -= _require_draft_room(settings, free)
        free -= _require_tower_room(settings, free)
        _require_stated_cache(settings.kv_memory, free)


def require_room(
    weights: StoredWeights,
    stored_as: str,
    free: int,
    number_bytes: float | None,
    others: Sequence[str],
) -> None:
    """Raise StartupError for weights that don't fit into `free` bytes.

    stored_as: value of --weights. number_bytes: parameter of `StoredWeights.num_bytes`. others:
    other values of --weights that the device has; the message names the first that would fit.
    """
    needed = weights.num_bytes(stored_as, number_bytes)
    if needed <= free:
        return
    if weights.coded or weights.is_rounded:
        others = [name for name in others if name == "mapped"]
    if stored_as == "decoded":
        others = ("full", *others)
    fits = (name for name in others if weights.num_bytes(name, number_bytes) <= free)
    name = next(fits, None)
    remedy = f"start with --weights {name}" if name else "serve a smaller model"
    if name == "mapped":
        remedy += ", which reads them from the disk as steps need them"
    raise StartupError(
        f"The weights take {in_units(needed)}; {in_units(needed - free)} of memory are missing. "
        f"Free some, or {remedy}."
    )


def _require_draft_room(settings: EngineSettings, free: int) -> int:
    """Return the bytes of the draft model's weights. Raises StartupError if they are not free."""
    needed = _draft_bytes(settings)
    if (missing := needed - free) > 0:
        raise StartupError(
            f"The weights of --draft {settings.draft} take {in_units(needed)}; "
            f"{in_units(missing)} of memory are missing. Start without it, or with a smaller one."
        )
    return needed


def _draft_bytes(settings: EngineSettings) -> int:
    """Return the bytes of the draft model's weights; 0 without a draft model.

    Raises StartupError for a path that holds no model that is served.
    """
    if not settings.draft:
        return 0
    path = Path(settings.draft)
    try:
        require_readable(path)
        config = checkpoint_config(path)
        if config is None or not (is_eagle(config) or is_assistant(config)):
            code_of(config, settings.model_code)
        return stored_weights(path).num_bytes("full", _number_bytes(settings))
    except (CheckpointFolderError, CheckpointError, GgufError) as error:
        raise StartupError(f"--draft {settings.draft}: {error}") from None


def _require_tower_room(settings: EngineSettings, free: int) -> int:
    """Return the bytes of the vision tower. Raises StartupError if they are not free."""
    needed = _tower_bytes(settings)
    if (missing := needed - free) > 0:
        raise StartupError(
            f"The vision tower in the mmproj file takes {in_units(needed)}; {in_units(missing)} of "
            "memory are missing. Start with --vision off to serve text alone."
        )
    return needed


def _tower_bytes(settings: EngineSettings) -> int:
    """Return the bytes of the vision tower in an mmproj file once it is loaded; 0 without one."""
    if settings.vision == "off" or settings.model == Path():  # not downloaded yet
        return 0
    file = _mmproj(settings)
    if file is None:
        return 0
    number_bytes = 4 if _number_bytes(settings) in (None, 4) else 2
    try:
        tensors = GgufFile(file).tensors.values()
    except GgufError:
        return 0  # the model is served without it, or reading it ends the start
    return sum(prod(tensor.shape) for tensor in tensors) * number_bytes


def _mmproj(settings: EngineSettings) -> Path | None:
    """Return the mmproj file of a model: that in its directory of links, or the only candidate."""
    if (settings.model / PARTS).is_dir():
        links = settings.model / MMPROJ
        return next(links.iterdir()).readlink() if links.is_dir() else None
    gguf = _gguf(settings.model)
    if settings.mmproj or gguf is None:
        return Path(settings.mmproj) if settings.mmproj else None
    files = mmproj_beside(gguf)
    return files[0] if len(files) == 1 else None


def _can_map(config: Config | None, settings: EngineSettings) -> bool:
    """Return whether --weights mapped could start, as far as the weights' types allow it."""
    if settings.dtype == "float16" or not _processor_flags() >= _WIDE:
        return False
    if config is None:
        return settings.model_code != ModelCode.TRANSFORMERS.value
    if code_of(config, settings.model_code) is not ModelCode.NATIVE:
        return False
    family = family_of(config)
    return family.keeps_codes and not family.sees_whole_texts


def _require_stated_cache(kv_memory: str, free: int) -> None:
    """Raise StartupError for a KV cache larger than the memory that the weights leave free."""
    if kv_memory == "auto" or parse_share(kv_memory) is not None:
        return
    if (missing := parse_bytes(kv_memory) - free) > 0:
        raise StartupError(
            f"--kv-memory {kv_memory}: {in_units(missing)} of memory are missing; lower it."
        )


def _gguf(model: Path) -> Path | None:
    """Return the GGUF file of a checkpoint, which may be a directory that describes the file."""
    parts = model / PARTS
    return min(parts.iterdir()) if parts.is_dir() else gguf_of(model)


def _number_bytes(settings: EngineSettings) -> float | None:
    """Return the fewest bytes of a number of --dtype on this processor; None = as stored."""
    flags = _processor_flags()
    halves = bool(flags & _HALVES)
    if settings.dtype == "float32" or (settings.dtype == "auto" and not halves):
        return None if flags >= _WIDE else 4
    is_coded = halves and settings.dtype != "float16" and settings.weights in ("full", "mapped")
    return _CODED_BYTES if is_coded else 2


def _processor_flags() -> frozenset[str]:
    if not _PROCESSOR.exists():
        return frozenset()
    lines = _PROCESSOR.read_text(encoding="utf-8", errors="replace").splitlines()
    flags = (line.split() for line in lines if line.startswith("flags"))
    return frozenset(next(flags, ()))
