"""Facts of a checkpoint on the disk, from its config and headers alone. Free of torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.model_files.checkpoint import opened_checkpoint
from services.common.model_files.checkpoint_facts import (
    CheckpointFacts,
    bytes_by_type,
    checkpoint_facts,
)
from services.common.model_files.checkpoint_folder import (
    CheckpointFolderError,
    gguf_of,
    require_config,
    require_readable,
)
from services.common.model_files.checkpoint_kind import generates
from services.common.settings import StartupError
from services.engine.model.architecture.model_layers import read_config
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.stored_weights import count_parameters
from services.engine.sequence_memory import sequence_memory
from services.engine.start_check import (
    checkpoint_config,
    gpu_memory_by_weights,
    memory_by_weights,
)
from services.tokenizer.template_facts import ChatFacts, read_chat_facts
from tokenwire.errors import ServiceError
from tokenwire.serving.serve_options import ServeError

__all__ = ["ModelFacts", "read_facts"]

_NUMBER_BYTES = 2
"""Bytes of a number unless --dtype or --kv-dtype says otherwise: bfloat16 or float16"""
_CONTEXT = "max_position_embeddings"
_LICENCE = re.compile(r"^license:\s*([^\s#]+)", re.MULTILINE)
_CARD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of a checkpoint that are known before it is served."""

    architecture: str
    generates: bool
    """False for a model that makes vectors or scores of texts alone"""
    parameters: int | None
    """Number of weights; None = the files pack several in a byte"""
    context: int | None
    vocabulary: int | None
    """Number of token ids; None = the checkpoint does not say"""
    files: CheckpointFacts
    bytes_by_type: Mapping[str, int]
    """Bytes of the weights by the type in which they are stored, most bytes first"""
    licence: str
    """Name that the card or the GGUF file states; empty = they state none"""
    chat: ChatFacts
    memory: Mapping[str, int]
    """Bytes of the weights in this machine's memory, by value of --weights"""
    gpu_memory: Mapping[str, int]
    """Bytes of the weights in a GPU's memory, by value of --weights"""
    cache_bytes: int | None
    """Bytes of the keys and values of one text that fills the context; None = nothing is kept, or
    the context is not known"""
    state_bytes: int
    """Bytes of the states of one text, whatever its length; 0 = no layer has a state"""


async def read_facts(model: Path) -> ModelFacts:
    """Return the facts of a directory or GGUF file. Raises ServeError if it can't be served."""
    try:
        require_readable(model)
        require_config(model)
        config = checkpoint_config(model)
        gguf = gguf_of(model)
        file = None if gguf is None else GgufFile(gguf)
        memory = sequence_memory(config)
        _, read = read_config(config.values, config.file)
        context = _count(read, _CONTEXT)
        cached = None if memory is None or context is None else memory.cached_numbers(context)
        with opened_checkpoint(model) as directory:
            chat = await read_chat_facts(directory)
            is_generator = generates(directory)
            files, stored = checkpoint_facts(directory), bytes_by_type(directory)
        return ModelFacts(
            architecture=config.texts("architectures")[0],
            generates=is_generator,
            parameters=count_parameters(model) if file is None else _parameters(file),
            context=context,
            vocabulary=_count(read, "vocab_size"),
            files=files,
            bytes_by_type=stored,
            licence=_licence_of_card(model) if file is None else _licence_of_file(file),
            chat=chat,
            memory=memory_by_weights(model),
            gpu_memory=gpu_memory_by_weights(model),
            cache_bytes=None if cached is None else cached * _NUMBER_BYTES,
            state_bytes=0 if memory is None else memory.state_bytes(_NUMBER_BYTES),
        )
    except (CheckpointError, CheckpointFolderError, GgufError, StartupError) as error:
        raise ServeError(str(error)) from None
    except ServiceError as error:
        raise ServeError(error.message) from None


def _count(config: Config, key: str) -> int | None:
    return config.positive(key) if config.has(key) else None


def _parameters(file: GgufFile) -> int:
    return sum(prod(tensor.shape) for tensor in file.tensors.values())


def _licence_of_file(file: GgufFile) -> str:
    value = file.metadata.get("general.license", "")
    return value if isinstance(value, str) else ""


def _licence_of_card(model: Path) -> str:
    """Return the licence in the head of README.md."""
    try:
        with (model / "README.md").open(encoding="utf-8", errors="replace") as card:
            text = card.read(_CARD_BYTES)
    except OSError:
        return ""
    head = text.partition("\n---")[0] if text.startswith("---") else ""
    match = _LICENCE.search(head)
    return match[1].strip("\"'") if match is not None else ""
