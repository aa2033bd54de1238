"""Check of the services' flags, of their model and of the memory, before any process starts."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from services.common.accounts.key_file import KeyFileError, read_keys
from services.common.gguf.gguf_file import GgufError
from services.common.model_files.hub import HubCheckpoint, HubError
from services.common.settings import StartupError, StreamSettings, parse
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.stored_weights import StoredWeights
from services.engine.settings import EngineSettings
from services.engine.start_check import (
    check_config,
    check_room,
    check_start,
    checkpoint_config,
    needed_bytes,
)
from services.http_shim.settings import HttpShimSettings
from services.http_shim.settings import check as check_shim
from tokenwire.serving.serve_options import ServeError
from tokenwire.serving.service import Service
from tokenwire.serving.service_flags import SETTINGS, Settings

__all__ = ["check_before_download", "check_services", "needed_memory"]

_OVERHEAD = 768 * 2**20
"""Bytes that the processes of a model take besides weights and KV cache, up to _USUAL_TOKENS"""
_TEXT, _TOKENS = "text_config", "vocab_size"
_USUAL_TOKENS = 65_536
_BYTES_PER_TOKEN = 4608
"""Bytes that the processes take together for each further token of the vocabulary. Tokenizers of
Gemma 3 (262,144 tokens) take 1.1 GiB more than those of SmolLM2 (49,152)"""


def check_services(services: Iterable[Service]) -> None:
    """Raise ServeError for flags, a model or an amount of memory that a service can't start with.

    The services check the same again, and what takes longer to find out.
    """
    for service in services:
        try:
            settings = _parsed(service.name, service.arguments)
            _ = settings.tls, settings.peer_token
            if isinstance(settings, HttpShimSettings | StreamSettings) and settings.keys:
                read_keys(Path(settings.keys))
            if isinstance(settings, HttpShimSettings):
                check_shim(settings)
            if isinstance(settings, EngineSettings) and service.replica == 1:
                check_start(settings)
        except (KeyFileError, StartupError) as error:
            raise ServeError(f"{service.title}: {error}") from None


def needed_memory(services: Iterable[Service]) -> int:
    """Return the bytes that a model's services take once they serve. Raises ServeError.

    The sum of weights, KV caches, and what the processes take besides. Free memory does not matter.
    """
    total = 0
    for service in services:
        if service.name != "engine":
            continue
        try:
            settings = _parsed(service.name, service.arguments)
            assert isinstance(settings, EngineSettings)
            total += needed_bytes(settings) + _OVERHEAD
            if service.replica == 1:
                total += _of_vocabulary(settings.model)
        except StartupError as error:
            raise ServeError(f"{service.title}: {error}") from None
    return total


def _of_vocabulary(model: Path) -> int:
    """Return the bytes that a vocabulary takes beyond the usual one. Raises StartupError."""
    try:
        config = checkpoint_config(model)
        text = config.section(_TEXT) if config.has(_TEXT) else config
        tokens = text.positive(_TOKENS) if text.has(_TOKENS) else 0
    except (CheckpointError, GgufError) as error:
        raise StartupError(str(error)) from None
    return max(0, tokens - _USUAL_TOKENS) * _BYTES_PER_TOKEN


def check_before_download(checkpoint: HubCheckpoint, flags: Sequence[str]) -> None:
    """Raise ServeError for engine flags, an architecture or a size that can't be served.

    Only config.json is downloaded. A GGUF file has none: it is checked when it is there.
    """
    try:
        settings = _parsed("engine", flags)
        assert isinstance(settings, EngineSettings)
        file = checkpoint.download_config()
        config = None if file is None else _config(checkpoint, file)
        if config is not None:
            check_config(config, settings)
        weights = StoredWeights.of_sizes(checkpoint.weight_bytes(), config)
        check_room(weights, config, settings)
    except StartupError as error:
        raise ServeError(f"engine: {error}") from None
    except (HubError, CheckpointError) as error:
        raise ServeError(str(error)) from None


def _parsed(service: str, flags: Sequence[str]) -> Settings:
    prefix = f"TOKENWIRE_{service.upper()}"
    return parse(SETTINGS[service], f"services.{service}", prefix, flags)


def _config(checkpoint: HubCheckpoint, file: Path) -> Config:
    name = f"config.json of {checkpoint}"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name} can't be read as JSON: {error}.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{name} does not hold a JSON object.")
    return Config(name, values)
