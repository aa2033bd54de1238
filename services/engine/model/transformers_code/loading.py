"""Loading of a checkpoint into transformers' modules."""

import logging
from pathlib import Path

import torch

from services.common.gguf.checkpoint_files import PARTS
from services.common.settings import StartupError
from services.engine.kernels.memory import give_back_freed
from services.engine.model.adapters.adapters import Adapters
from services.engine.model.attention import choose_backend
from services.engine.model.checkpoint.config import Config
from services.engine.model.checkpoint.progress import LoadProgress
from services.engine.model.loader import choose_operators, open_tensors, with_known_ends
from services.engine.model.operators.tiled_operators import TiledOperators
from services.engine.model.parts.shard import Shard
from services.engine.model.transformers_code.leading import LeadingModel
from services.engine.model.transformers_code.paged_model import TransformersModel
from services.engine.model.transformers_code.plan import ModelPlan
from services.engine.model.transformers_code.reader import CheckpointReader
from services.engine.model.transformers_code.refusal import refusal
from services.engine.model.transformers_code.verification import separates_sequences
from services.engine.ranks.group import RankGroup

__all__ = ["load_on_transformers"]

_LOG = logging.getLogger("loop")


def load_on_transformers(
    directory: Path,
    config: Config,
    dtype: torch.dtype,
    device: torch.device,
    weights: str,
    *,
    progress: bool,
    with_xformers: bool,
    ranks: RankGroup,
    kv_dtype: str,
) -> TransformersModel:
    """Load the checkpoint whose config.json is `config`. Arguments as of `load_any_model`.

    Raises CheckpointError before the weights are read if the model can't be served, or not by
    several ranks. Raises StartupError likewise if the cache can't have `kv_dtype`.
    """
    if (directory / PARTS).is_dir():
        raise StartupError(
            f"{config.file}: transformers' code can't run a GGUF file. Start without "
            "--model-code, or with a checkpoint of safetensors."
        )
    shard = Shard(ranks.rank.number, ranks.rank.count, ranks.all_reduce)
    plan = ModelPlan.of(config, dtype, shard.count)
    spec = with_known_ends(plan.spec, directory)
    operators = choose_operators(spec, dtype, device, weights)
    tiled = isinstance(operators, TiledOperators)
    attention = choose_backend(
        spec, dtype, device, tiled=tiled, with_xformers=with_xformers, kv_dtype=kv_dtype
    )
    with open_tensors(directory, spec) as checkpoint:
        if checkpoint.is_quantized and weights not in ("full", "decoded"):
            raise StartupError(
                f"--weights {weights} rounds what the checkpoint has rounded before. Start without "
                "it, or with a checkpoint that is not quantized."
            )
        adapters = Adapters(operators, dtype, device, roots=())
        reader = CheckpointReader(plan, checkpoint, operators, device, shard, adapters)
        bar = LoadProgress(reader.require(), shown=progress)
        try:
            reader.read(bar)
        finally:
            bar.finish()
    give_back_freed()
    parts = (plan, spec, dtype, device, operators, attention, reader.step_bytes)
    model = LeadingModel(ranks, *parts) if ranks.leads_others else TransformersModel(*parts)
    model.runs_alone = ranks.rank.is_alone
    model.adapters = adapters
    if not separates_sequences(model):
        reason = "sequences that share a step change each other"
        raise refusal(config.file, spec.architecture, reason)
    _LOG.info("our operators compute %d of %d layers", model.num_fused, spec.num_layers)
    return model
