"""Loading of a checkpoint into our decoder or into transformers' modules."""

from pathlib import Path

import torch

from services.common.settings import StartupError
from services.engine.kernels.packed_file import PackedFile
from services.engine.model.checkpoint.model_code import ModelCode, code_of
from services.engine.model.checkpoint.tensors import Checkpoint
from services.engine.model.loader import load_model
from services.engine.model.model import Model
from services.engine.ranks.group import SINGLE_RANK, RankGroup

__all__ = ["load_any_model"]

_CPU = torch.device("cpu")


def load_any_model(
    path: str | Path,
    dtype: torch.dtype,
    code: str = "auto",
    *,
    progress: bool = False,
    device: torch.device = _CPU,
    weights: str = "full",
    with_xformers: bool = False,
    kv_dtype: str = "model",
    ranks: RankGroup = SINGLE_RANK,
    packed: PackedFile | None = None,
) -> Model:
    """Load a checkpoint as `load_model` does.

    code: "native", "transformers" (its modules compute the model, with our attention and products)
    or "auto", which is native if there is native code for the architecture.
    Raises CheckpointError for an architecture without such code, and the errors of `load_model`.
    """
    directory = Path(path)
    config = Checkpoint.config(directory)
    if code_of(config, code) is ModelCode.NATIVE:
        return load_model(
            directory,
            dtype,
            progress=progress,
            device=device,
            weights=weights,
            with_xformers=with_xformers,
            kv_dtype=kv_dtype,
            ranks=ranks,
            packed=packed,
        )
    if weights == "mapped":
        raise StartupError(
            "--weights mapped needs native code, and this model runs on transformers'. Start "
            "without it."
        )
    # imported here, because transformers is optional and its import takes seconds
    from services.engine.model.transformers_code.loading import load_on_transformers

    return load_on_transformers(
        directory,
        config,
        dtype,
        device,
        weights,
        progress=progress,
        with_xformers=with_xformers,
        kv_dtype=kv_dtype,
        ranks=ranks,
    )
