"""Vision tower and projector of a checkpoint, which transformers' modules compute."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from services.common.gguf.checkpoint_files import MMPROJ
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.tensors import Checkpoint, StoredTensor, TensorFiles
from services.engine.model.checkpoint.vision_language import VISION_LANGUAGE
from services.engine.vision.gemma3n import Gemma3nImages
from services.engine.vision.mmproj_names import names_of
from services.engine.vision.mmproj_tensors import MmprojTensors

__all__ = ["described_in", "load_tower", "reason_of"]

_OTHERS = ("language_model", "text_model", "audio_tower", "embed_audio")
"""Parts of models that encode no images"""
_FILE_NAMES = (
    ("vision_tower.", "vision_tower.vision_model."),
    ("embed_vision.patch_", "vision_embedder.patch_"),
    ("embed_vision.pos_", "vision_embedder.pos_"),
    ("embed_vision.multimodal_embedder.", "embed_vision."),
)
"""Beginnings of parameters' names, and their forms in files of transformers before release 5 and of
Gemma 4 Unified"""
_BUFFERS = ("*.position_ids", "*.inv_freq")
"""Tensors in old files whose values follow from config.json"""


def load_tower(directory: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return the part of the checkpoint's model that encodes images, for `get_image_features`.

    Only the tower's and the projector's weights are read. Raises CheckpointError.
    """
    config = Checkpoint.config(directory)
    architecture = next(iter(config.texts("architectures")), "")
    if architecture not in VISION_LANGUAGE:
        raise CheckpointError(f"{config.file}: images for {architecture} are not supported.")
    model = _without_weights(directory, architecture)
    wanted, patterns = model.state_dict(), VISION_LANGUAGE[architecture].vision
    with _open_tensors(directory, architecture, model.config) as checkpoint:
        weights = {
            name: tensor.to(device, dtype, copy=True)
            for name, tensor in _read(checkpoint, wanted, patterns)
        }
    model.load_state_dict(weights, strict=False, assign=True)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def described_in(directory: Path) -> Path:
    """Return the file that describes the tower, for a message: an mmproj file, or config.json."""
    links = directory / MMPROJ
    return next(links.iterdir()).readlink() if links.is_dir() else directory / "config.json"


def reason_of(error: Exception) -> str:
    """Return an error of transformers in one line, for a message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _without_weights(directory: Path, architecture: str) -> PreTrainedModel:
    """Return the image-encoding part of the model that config.json describes."""
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        config._attn_implementation = "sdpa"  # the file may name one that is not installed
        with _parameters_on_meta():
            model: PreTrainedModel = _kind(architecture)(config)
    except Exception as error:  # transformers raises errors of many types
        message = f"{described_in(directory)} describes no {architecture}: {reason_of(error)}"
        raise CheckpointError(message) from None
    for other in _OTHERS:
        if hasattr(model, other):
            delattr(model, other)
    return model


def _open_tensors(
    directory: Path, architecture: str, config: PreTrainedConfig
) -> Checkpoint | MmprojTensors:
    if not (directory / MMPROJ).is_dir():
        return Checkpoint(directory)
    vision = config.vision_config
    heads = getattr(vision, "num_heads", None) or vision.num_attention_heads
    hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
    return MmprojTensors(directory, names_of(architecture), hidden=hidden, heads=heads)


def _kind(architecture: str) -> Any:
    """Return the class of the model that encodes the images of an architecture."""
    if architecture == "Gemma3nForConditionalGeneration":
        return Gemma3nImages
    return getattr(transformers, architecture.replace("ForConditionalGeneration", "Model"))


def _read(
    checkpoint: TensorFiles, wanted: Mapping[str, Tensor], patterns: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the parameters and buffers of `wanted`.

    Raises CheckpointError unless these are all tensors whose names match one of `patterns`.
    """
    stored = {
        name: StoredTensor(_stored_name(checkpoint, name), tuple(tensor.shape))
        for name, tensor in wanted.items()
    }
    checkpoint.require(stored.values(), ignored=_BUFFERS, among=patterns)
    for name, each in stored.items():
        yield name, checkpoint.tensor(each)


def _stored_name(checkpoint: TensorFiles, name: str) -> str:
    """Return the name under which the files hold a parameter, `name` itself if they lack it."""
    names = [name, *(name.replace(new, old, 1) for new, old in _FILE_NAMES if name.startswith(new))]
    return next(
        (full for each in names for full in (each, f"model.{each}") if checkpoint.holds(full)), name
    )


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create parameters of new modules without memory. Buffers, which files lack, keep theirs."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        if parameter is not None:
            on_meta = nn.Parameter(parameter.to("meta"), requires_grad=False)
            module._parameters[name] = on_meta

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
