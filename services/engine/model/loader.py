"""Loading of a checkpoint directory into a decoder."""

import dataclasses
import logging
from importlib.util import find_spec
from pathlib import Path

import torch

from services.common.gguf.checkpoint_files import PARTS
from services.common.settings import StartupError
from services.engine.kernels.library import InstructionSet, native
from services.engine.kernels.memory import give_back_freed
from services.engine.kernels.packed_file import PackedFile
from services.engine.model.adapters.adapters import Adapters
from services.engine.model.adapters.peft_files import PeftAdapter
from services.engine.model.adapters.task_tensors import TaskTensors
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.architecture.tiling import runs_in_tiles
from services.engine.model.attention import choose_backend
from services.engine.model.attention.kv_dtype import resolve_kv_dtype
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.fp8 import Fp8Tensors
from services.engine.model.checkpoint.generation import generation_config
from services.engine.model.checkpoint.gguf_tensors import GgufTensors
from services.engine.model.checkpoint.progress import LoadProgress
from services.engine.model.checkpoint.quantized_tensors import QuantizedTensors
from services.engine.model.checkpoint.task_names import adapter_directory
from services.engine.model.checkpoint.tensors import Checkpoint, TensorFiles
from services.engine.model.decoder import Decoder
from services.engine.model.encoder import Encoder
from services.engine.model.encoder_reader import EncoderReader
from services.engine.model.lockstep import LeadingDecoder
from services.engine.model.manifest import Manifest, find_root
from services.engine.model.model import Model
from services.engine.model.operators.fp8_weights import Fp8Rounding
from services.engine.model.operators.grouped_operators import GroupedOperators
from services.engine.model.operators.interface import Operators
from services.engine.model.operators.native_operators import NativeOperators
from services.engine.model.operators.rounded_operators import (
    ByteOperators,
    Int8Operators,
    RoundedOperators,
    RoundedTiledOperators,
)
from services.engine.model.operators.tiled_operators import TiledOperators
from services.engine.model.operators.torch_operators import TorchOperators, runs_tensor_kernels
from services.engine.model.parts.shard import Shard
from services.engine.model.parts.stored_feed_forward import unread_experts
from services.engine.model.parts.tensor_reader import TensorReader
from services.engine.model.weight_reader import WeightReader
from services.engine.model.whole_text_decoder import WholeTextDecoder
from services.engine.model.whole_text_stack import has_one_attention
from services.engine.ranks.group import SINGLE_RANK, RankGroup

__all__ = [
    "choose_operators",
    "load_model",
    "load_spec",
    "multiplies_fp8",
    "open_tensors",
    "resolve_dtype",
    "with_known_ends",
]

_LOG = logging.getLogger("engine")
_CPU = torch.device("cpu")
_ADA = (8, 9)
"""Least compute capability that multiplies FP8"""
_AMPERE = (8, 0)
"""Least compute capability that multiplies bfloat16"""
_GROUPED = (torch.float32, torch.bfloat16)
"""Types of the rows that products with weights in groups accept"""
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_dtype(name: str, device: torch.device = _CPU) -> torch.dtype:
    """Return the dtype of activations and sums that a --dtype value means on a device.

    `auto` is bfloat16 on hardware that multiplies it (CUDA, AMX, AVX-512 BF16) and float32
    elsewhere, because emulated bfloat16 is slower than float32.
    Raises ValueError for an unknown name, StartupError for float16 on a CPU that lacks it.
    """
    if name == "auto":
        return torch.bfloat16 if _multiplies_bfloat16(device) else torch.float32
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of auto, {', '.join(_DTYPES)}, got {name}")
    if name == "float16" and not _multiplies_float16(device):
        raise StartupError(
            "--dtype float16: this CPU computes in float32 and bfloat16. Start without it; weights "
            "in float16 stay as they are stored."
        )
    return _DTYPES[name]


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= _AMPERE
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _multiplies_float16(device: torch.device) -> bool:
    if device.type == "cuda":
        return True
    if not torch._C._has_mkldnn:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def load_spec(path: str | Path) -> ModelSpec:
    """Read config.json, and the EOS ids as `with_known_ends` does. Raises CheckpointError."""
    directory = Path(path)
    config = Checkpoint.config(directory)
    return with_known_ends(ModelSpec.from_config(config.values, config.file), directory)


def with_known_ends(spec: ModelSpec, directory: Path) -> ModelSpec:
    """Return a spec with the EOS ids of generation_config.json, if it has any.

    Drops EOS ids outside the vocabulary and logs a warning.
    """
    if eos_token_ids := generation_config(directory).ids("eos_token_id"):
        spec = dataclasses.replace(spec, eos_token_ids=eos_token_ids)
    known = tuple(eos for eos in spec.eos_token_ids if 0 <= eos < spec.vocab_size)
    if known != spec.eos_token_ids:
        unknown = sorted(set(spec.eos_token_ids) - set(known))
        _LOG.warning("ignoring end-of-sequence ids outside the model's vocabulary: %s", unknown)
        spec = dataclasses.replace(spec, eos_token_ids=known)
    return spec


def load_model(
    path: str | Path,
    dtype: torch.dtype,
    *,
    progress: bool = False,
    device: torch.device = _CPU,
    weights: str = "full",
    with_xformers: bool = False,
    kv_dtype: str = "model",
    ranks: RankGroup = SINGLE_RANK,
    packed: PackedFile | None = None,
) -> Model:
    """Load a checkpoint, one layer at a time from the mapped files.

    progress: show a bar on a terminal, or log a few lines without one.
    weights: "full" (as stored where `device` multiplies that, else in `dtype`), "mapped" (the same,
    but codes stay in the files, whose pages steps read), "decoded" (in `dtype`), "int4" and "int8"
    (rounded, for all products but an expert router's; of "int4", those that compute the logits have
    8 bits), "w8a8" ("int8", with the inputs of these products in int8 too) or "fp8" (rounded, for
    all products but an expert router's and those that compute the logits).
    with_xformers: decode with xformers' kernel on a GPU.
    kv_dtype: type of cached keys and values, as for `resolve_kv_dtype`.
    ranks: the ranks that hold the model together. Each loads its shard; rank 0 gets a decoder that
    directs the others.
    packed: the file that keeps packed weights, but not an encoder's; None = no file does.
    Raises CheckpointError before loading if a tensor is missing or of another shape.
    Raises StartupError if this machine can't multiply int8, FP8 or mapped weights, the checkpoint
    has no weights that can be mapped, the ranks can't share the model, xformers is missing, or the
    cache can't have `kv_dtype`.
    """
    directory = Path(path)
    whole = load_spec(directory)
    if whole.is_encoder and not ranks.rank.is_alone:
        raise StartupError("An encoder can't be shared by several ranks. Start without them.")
    if whole.is_encoder and not has_one_attention(whole):
        raise CheckpointError(
            f"{directory}: {whole.architecture} without a causal mask is not supported: not all of "
            "its layers are attention of one shape."
        )
    if weights == "mapped" and whole.is_encoder:
        raise StartupError("--weights mapped needs a model that generates. Start without it.")
    if whole.family.encoder is not None:
        resolve_kv_dtype(kv_dtype, whole, dtype, device)  # refuses any type but the model's
        return _load_encoder(directory, whole, dtype, progress, device, weights)
    shard = Shard(ranks.rank.number, ranks.rank.count, ranks.all_reduce)
    spec = shard.of(whole)
    operators = choose_operators(spec, dtype, device, weights)
    if isinstance(operators, NativeOperators):
        operators.arena.file = packed
    attention = choose_backend(
        spec,
        dtype,
        device,
        tiled=isinstance(operators, TiledOperators),
        with_xformers=with_xformers,
        kv_dtype=kv_dtype,
    )
    named = str(dtype).removeprefix("torch.")
    if spec.fp8 is not None and operators.without_fp8() is operators:
        _LOG.warning("decoding the FP8 weights of %s to %s", directory, named)
    with open_tensors(directory, whole, maps=weights == "mapped") as checkpoint:
        if checkpoint.maps:
            _require_blocks(directory, whole, checkpoint)
        rounds = weights not in ("full", "mapped", "decoded", "fp8" if spec.fp8 is not None else "")
        if checkpoint.is_quantized and rounds:
            raise StartupError(
                f"--weights {weights} rounds what the checkpoint has rounded before. Start without "
                "it, or with a checkpoint that is not quantized."
            )
        if checkpoint.is_quantized and spec.fp8 is None and not operators.keeps_groups:
            packs = operators.groups_experts and checkpoint.has_mxfp4_experts
            but = ", except experts in MXFP4" if packs else ""
            _LOG.warning("decoding the quantized weights of %s to %s%s", directory, named, but)
        elif checkpoint.types_without_codes:
            types = ", ".join(checkpoint.types_without_codes)
            _LOG.warning("decoding the weights of %s in %s to %s", directory, types, named)
        whole = _with_held_names(whole, checkpoint)
        names = whole.family.names
        root = find_root(checkpoint, names)
        whole = _with_stored_modal_tokens(_with_stored_experts(whole, root, checkpoint), checkpoint)
        manifest = Manifest.of(whole, root)
        head = [f"{names.roots[root]}.weight"] if spec.tied_embeddings else []
        head += [f"{stage.name}.*" for stage in spec.family.head]
        further = range(spec.num_layers, spec.num_layers + spec.num_draft_layers)
        unread = [f"{root}{names.layers}.{layer}.*" for layer in further]
        unread += [f"{root}{names.layers}.*.{name}.*" for name in unread_experts(spec)]
        total = checkpoint.require(manifest.tensors(), (*names.ignored, *head, *unread))
        bar = LoadProgress(total, shown=progress)
        adapters: Adapters | None = None
        has_peft_names = checkpoint.has_peft_names and whole.family.other_names is None
        if has_peft_names and (spec.tasks or not spec.is_encoder):
            adapters = Adapters(operators, dtype, device, names.roots)
        try:
            reader = TensorReader(checkpoint, whole, dtype, device, operators, bar, shard, adapters)
            loaded = WeightReader(reader).read(manifest)
        finally:
            bar.finish()
    give_back_freed()
    if adapters is not None:
        for number, task in enumerate(spec.tasks, 1):
            adapters.load(number, PeftAdapter.read(adapter_directory(directory, task)))
    if spec.is_encoder:
        whole_texts = WholeTextDecoder(spec, dtype, loaded, operators, attention)
        whole_texts.adapters = adapters
        return whole_texts
    decoder = (
        LeadingDecoder(ranks, spec, dtype, loaded, operators, attention)
        if ranks.leads_others
        else Decoder(spec, dtype, loaded, operators, attention)
    )
    decoder.runs_alone = ranks.rank.is_alone
    decoder.adapters = adapters
    return decoder


def _with_held_names(spec: ModelSpec, checkpoint: TensorFiles) -> ModelSpec:
    """Return a spec with the names that the files have, which depend on the writing program."""
    other = spec.family.other_names
    roots = () if other is None else other.roots
    if other is None or not any(checkpoint.holds(f"{r}{other.embedding}.weight") for r in roots):
        return spec
    return dataclasses.replace(spec, family=dataclasses.replace(spec.family, names=other))


def _with_stored_experts(spec: ModelSpec, root: str, checkpoint: TensorFiles) -> ModelSpec:
    """Return a spec with the files' names of experts, which are apart or stacked."""
    names = spec.family.names
    stacked = names.stacked_experts
    if stacked is None:
        return spec
    for layer in range(spec.num_layers):
        if checkpoint.holds(f"{root}{names.layers}.{layer}.{stacked.down}"):
            names = dataclasses.replace(names, experts=stacked)
            family = dataclasses.replace(spec.family, names=names)
            return dataclasses.replace(spec, family=family)
    return spec


def _with_stored_modal_tokens(spec: ModelSpec, checkpoint: TensorFiles) -> ModelSpec:
    """Return a spec with the modal tokens whose table the files hold; files for text hold none."""
    held = (t for t in spec.modal_tokens if checkpoint.holds(f"{t.module}.embedding.weight"))
    return dataclasses.replace(spec, modal_tokens=tuple(held))


def _load_encoder(
    directory: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: bool,
    device: torch.device,
    weights: str,
) -> Encoder:
    """Do `load_model` for an encoder."""
    if spec.fp8 is not None or spec.scheme is not None:
        raise StartupError(f"{directory}: quantized encoders are not supported.")
    operators = choose_operators(spec, dtype, device, weights)
    tiled = isinstance(operators, TiledOperators)
    adapters = Adapters(operators, dtype, device, spec.family.names.roots) if spec.tasks else None
    with open_tensors(directory, spec) as checkpoint:
        reader = EncoderReader(
            checkpoint, spec, dtype, device, operators, adapters, shows_progress=progress
        )
        loaded = reader.read()
        if adapters is not None:
            assert isinstance(checkpoint, TaskTensors)
            config = Checkpoint.config(directory)
            for number in range(len(spec.tasks)):
                adapters.load(number + 1, checkpoint.adapter(config, number))
    give_back_freed()
    attention = choose_backend(spec, dtype, device, pair_scores=loaded.pair_scores, tiled=tiled)
    encoder = Encoder(spec, dtype, loaded, operators, attention)
    encoder.adapters = adapters
    return encoder


def _require_blocks(directory: Path, spec: ModelSpec, checkpoint: TensorFiles) -> None:
    """Raise StartupError unless a checkpoint has codes that can stay in its files."""
    why = None
    if checkpoint.types_without_codes:
        named = ", ".join(checkpoint.types_without_codes)
        why = f"weights in {named}, which are decoded or packed anew"
    elif spec.scheme is not None or spec.fp8 is not None:
        why = "weights in a format that is packed anew"
    elif not spec.family.keeps_codes:
        why = "weights behind LayerNorms, which are decoded"
    elif not checkpoint.has_blocks:
        why = "no quantized weights"
    if why is not None:
        raise StartupError(
            f"--weights mapped needs a GGUF file, or experts in MXFP4, whose codes products can "
            f"read; {directory} has {why}. Start without it."
        )


def open_tensors(
    directory: Path, spec: ModelSpec, *, maps: bool = False, drafts: bool = False
) -> TensorFiles:
    """Return the reader of a checkpoint's files, which opens them when it is entered.

    maps: quantized weights stay in the files. drafts: the tensors of layers that make draft tokens
    are among a GGUF file's.
    """
    if (directory / PARTS).is_dir():
        return GgufTensors(directory, maps=maps, drafts=drafts)
    if spec.tasks and not spec.family.has_task_adapters:
        return TaskTensors(directory)
    if maps:
        return Checkpoint(directory, maps=True)
    if spec.scheme is not None:
        return QuantizedTensors(directory, spec.scheme)
    return Checkpoint(directory) if spec.fp8 is None else Fp8Tensors(directory, spec.fp8)


def choose_operators(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, weights: str
) -> Operators:
    """Return the fastest operators for this machine, dtype and shape."""
    groups = native is not None and device.type == "cpu" and dtype in _GROUPED
    tiles = runs_in_tiles(spec, dtype, device)
    if weights == "w8a8":
        if native is None or not tiles:
            raise StartupError(
                "--weights w8a8 needs a CPU with AMX or AVX-512 BF16, --dtype bfloat16 and widths "
                "of multiples of 32. Start with --weights int8."
            )
        return ByteOperators(native, rounds=True)
    if weights in ("int8", "int4"):
        if native is None or not groups:
            raise StartupError(
                f"--weights {weights} needs a CPU, the compiled kernels, and --dtype bfloat16 or "
                "float32. Start without it."
            )
        if tiles:
            return Int8Operators(native) if weights == "int8" else RoundedTiledOperators(native)
        return RoundedOperators(native, dtype, int(weights.removeprefix("int")))
    if weights == "mapped":
        if native is None or not groups or native.instruction_set() < InstructionSet.AVX2:
            raise StartupError(
                "--weights mapped needs a CPU with AVX2, the compiled kernels, and --dtype "
                "bfloat16 or float32. Start without it."
            )
        return TiledOperators(native) if tiles else GroupedOperators(native, dtype)
    if weights == "fp8" or (weights == "full" and spec.fp8 is not None):
        if multiplies_fp8(dtype, device):
            # imported here: only GPU machines have Triton
            from services.engine.model.operators.fp8_operators import Fp8Operators

            group = None if spec.fp8 is None else spec.fp8.group
            return Fp8Operators(dtype, device, Fp8Rounding(group))
        if weights == "fp8":
            raise StartupError(
                "--weights fp8 needs a GPU of compute capability 8.9 or more (L4, H100, …), Triton "
                "and --dtype bfloat16. Start without it."
            )
    if device.type == "cuda" and find_spec("triton") is not None:
        # imported here: only GPU machines have Triton
        from services.engine.model.operators.packed_operators import PackedOperators
        from services.engine.model.operators.triton_operators import TritonOperators

        if weights != "full" or not runs_tensor_kernels(dtype, device):
            return TritonOperators(dtype, device)
        rounds_rows = spec.scheme is not None and spec.scheme.rounds_rows
        return PackedOperators(dtype, device, rounds_rows=rounds_rows)
    if native is None or not groups:
        return TorchOperators(dtype, device)
    if tiles and weights == "full" and spec.scheme and spec.scheme.rounds_rows:
        return ByteOperators(native, rounds=False)
    if tiles:
        return TiledOperators(native, keeps_groups=weights == "full")
    if weights == "full" and native.instruction_set() >= InstructionSet.AVX2:
        return GroupedOperators(native, dtype)
    return NativeOperators(native, dtype)


def multiplies_fp8(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether products with activations of `dtype` have kernels for weights in FP8."""
    if device.type != "cuda" or dtype != torch.bfloat16 or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _ADA
