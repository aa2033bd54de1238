"""Vision tower and projector of a checkpoint, as transformers computes them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.tensors import Checkpoint, StoredTensor

__all__ = ["load_tower"]

_DECODERS = ("language_model", "text_model")
_OLD_NAMES = (("vision_tower.", "vision_tower.vision_model."),)
"""Parts of names today, and in files of transformers before release 5"""


def load_tower(directory: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return the checkpoint's model without its decoder, for `get_image_features`.

    Only the tower's and the projector's weights are read. Raises CheckpointError.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory}/config.json: {error}") from None
    name = config.architectures[0].replace("ForConditionalGeneration", "Model")
    with _parameters_on_meta():
        model: PreTrainedModel = getattr(transformers, name)(config)
    for decoder in _DECODERS:
        if hasattr(model, decoder):
            delattr(model, decoder)
    with Checkpoint(directory) as checkpoint:
        weights = {
            name: tensor.to(device, dtype, copy=True)
            for name, tensor in _read(checkpoint, dict(model.named_parameters()))
        }
    model.load_state_dict(weights, strict=False, assign=True)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _read(checkpoint: Checkpoint, wanted: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    stored = {
        name: StoredTensor(_stored_name(checkpoint, name), tuple(parameter.shape))
        for name, parameter in wanted.items()
    }
    checkpoint.require(stored.values(), ignored=["*"])
    for name, each in stored.items():
        yield name, checkpoint.tensor(each)


def _stored_name(checkpoint: Checkpoint, name: str) -> str:
    """Return the name under which the files hold a parameter, `name` itself if they lack it."""
    names = [name, *(name.replace(new, old, 1) for new, old in _OLD_NAMES if name.startswith(new))]
    return next(
        (full for each in names for full in (each, f"model.{each}") if checkpoint.holds(full)), name
    )


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Give parameters of new modules no memory. Buffers, which files lack, keep their values."""
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
