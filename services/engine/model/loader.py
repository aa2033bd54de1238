"""From a checkpoint directory to a decoder that can run."""

import dataclasses
import logging
from pathlib import Path

import torch

from services.common.settings import StartupError
from services.engine.kernels.library import native
from services.engine.model.architecture.precision import resolve_dtype
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.architecture.tiling import runs_in_tiles
from services.engine.model.attention import choose_backend
from services.engine.model.checkpoint.errors import CheckpointError
from services.engine.model.checkpoint.generation import generation_config
from services.engine.model.checkpoint.progress import LoadProgress
from services.engine.model.checkpoint.tensors import Checkpoint
from services.engine.model.decoder import Decoder
from services.engine.model.layout import Layout
from services.engine.model.lockstep import LeadingDecoder
from services.engine.model.operators.int8_operators import Int8Operators
from services.engine.model.operators.interface import Operators
from services.engine.model.operators.native_operators import NativeOperators, TiledOperators
from services.engine.model.operators.torch_operators import TorchOperators
from services.engine.model.reader import Reader
from services.engine.model.shard import Shard
from services.engine.ranks.group import SINGLE_RANK, RankGroup

__all__ = [
    "CheckpointError",
    "load_model",
    "load_spec",
    "resolve_dtype",
]


_LOG = logging.getLogger("engine")
_CPU = torch.device("cpu")


def load_spec(path: str | Path) -> ModelSpec:
    """Reads config.json and the EOS ids of generation_config.json, which may name several.

    Raises CheckpointError.
    """
    directory = Path(path)
    config = Checkpoint.config(directory)
    spec = ModelSpec.from_config(config.values, config.file)
    if eos_token_ids := generation_config(directory).ids("eos_token_id"):
        spec = dataclasses.replace(spec, eos_token_ids=eos_token_ids)
    known = tuple(eos for eos in spec.eos_token_ids if 0 <= eos < spec.vocab_size)
    if known != spec.eos_token_ids:
        beyond = sorted(set(spec.eos_token_ids) - set(known))
        _LOG.warning("end-of-sequence ids %s are not in the vocabulary of the model", beyond)
        spec = dataclasses.replace(spec, eos_token_ids=known)
    return spec


def load_model(
    path: str | Path,
    dtype: torch.dtype,
    *,
    progress: bool = False,
    device: torch.device = _CPU,
    weights: str = "full",
    ranks: RankGroup = SINGLE_RANK,
) -> Decoder:
    """Loads a checkpoint, one layer at a time from the mapped files.

    progress: show a bar on a terminal, or log a few lines where there is none.
    weights: "full", in `dtype`, or "int8", rounded to that for all products.
    ranks: ranks that share the model. This one loads its shard; the decoder of rank 0
    makes the others follow.
    Raises CheckpointError; nothing is loaded unless every tensor is there in its right shape.
    Raises StartupError where this machine can't multiply int8 weights, or the model be cut so.
    """
    directory = Path(path)
    whole = load_spec(directory)
    shard = Shard(ranks.rank.number, ranks.rank.count)
    spec = shard.of(whole)
    operators = _choose_operators(spec, dtype, device, weights)
    with Checkpoint(directory) as checkpoint:
        names = whole.family.names
        held = (root for root in names.roots if checkpoint.holds(f"{root}{names.embedding}.weight"))
        layout = Layout.of(whole, next(held, names.roots[0]))
        ignored = (*names.ignored, "lm_head.weight") if spec.tied_embeddings else names.ignored
        total = checkpoint.require(layout.tensors(), ignored)
        bar = LoadProgress(total, shown=progress)
        try:
            reader = Reader(checkpoint, whole, dtype, device, operators, bar, shard)
            read = reader.read(layout)
        finally:
            bar.finish()
    attention = choose_backend(spec, dtype, device, read.sinks)
    if ranks.leads_others:
        return LeadingDecoder(ranks, spec, dtype, read.weights, operators, attention)
    return Decoder(spec, dtype, read.weights, operators, attention)


def _choose_operators(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, weights: str
) -> Operators:
    """The fastest operators that this machine, this dtype and this shape allow."""
    if weights == "int8":
        if native is None or not runs_in_tiles(spec, dtype, device):
            raise StartupError(
                "--weights int8 needs a CPU with AMX or AVX-512 BF16 and VBMI, the compiled "
                "kernels, --dtype bfloat16 and layers whose widths, cut by the ranks, are "
                "multiples of 32; start without it."
            )
        return Int8Operators(native)
    if native is None or device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return TorchOperators(dtype, device)
    if runs_in_tiles(spec, dtype, device):
        return TiledOperators(native)
    return NativeOperators(native, dtype)
