"""Loading of a draft model or a draft head beside the engine's model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.common.model_files.checkpoint import opened_checkpoint
from services.common.settings import StartupError
from services.engine.batch.buckets import row_bucket
from services.engine.execution.assistant_drafts import LEAST_KEPT, AssistantDrafts
from services.engine.execution.draft_model import DraftModel
from services.engine.execution.draft_vocabulary import find_difference
from services.engine.execution.head_drafts import HeadDrafts
from services.engine.execution.layered_drafts import LayeredDrafts
from services.engine.execution.memory_budget import require_memory
from services.engine.execution.model_loader import load_any_model
from services.engine.execution.model_runner import StepCapacity
from services.engine.execution.step_memory import measure_captures, measure_steps, usable_kernels
from services.engine.kernels.memory import populate_behind
from services.engine.model.architecture.cache_groups import layer_groups
from services.engine.model.assistant_head import AssistantHead, load_assistant
from services.engine.model.attention import KVCache
from services.engine.model.checkpoint.assistant_config import is_assistant
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.eagle_config import eagle_depths, is_eagle
from services.engine.model.checkpoint.tensors import Checkpoint
from services.engine.model.decoder import Decoder
from services.engine.model.draft_head import DraftHead
from services.engine.model.eagle_head import load_eagle
from services.engine.model.layered_head import LayeredHead
from services.engine.model.loader import load_spec
from services.engine.model.model import Model
from services.engine.model.mtp_head import holds_mtp, load_mtp
from services.engine.scheduling.speculation import DraftKind

__all__ = [
    "LoadedDraft",
    "can_draft_with_mtp",
    "load_draft",
    "load_mtp_draft",
    "tap_for_head",
    "tap_for_mtp",
]

_PASS_TOKENS = 512
"""Most tokens of a pass of the draft model"""
_KEPT_ROWS = 4096
"""Most rows of hidden states that are kept for a head"""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """Weights and buffers of a draft model."""

    decoder: Model
    vocabulary_size: int
    """Number of ids of the engine's model"""
    block_size: int
    """Number of tokens of its blocks"""
    pass_tokens: int
    """Most tokens of a pass"""
    pass_bytes: int
    """Bytes that a pass takes beside weights, pages and reserved buffers"""
    kind: DraftKind = DraftKind.MODEL
    targets: Sequence[int] = ()
    """Id of the engine's model for each id of a head; empty: the ids are the same"""
    capacity: StepCapacity | None = None
    """Size of the largest pass if padded passes run as CUDA graphs; None: they do not"""

    @property
    def block_bytes(self) -> int:
        """Bytes of the pages for one block of the engine's model."""
        own = sum(map(self.decoder.block_bytes, layer_groups(self.decoder.spec)))
        return own * self.block_size // self.decoder.block_size

    def allocate(self, num_blocks: int, target: KVCache) -> DraftModel:
        """Allocate the pages for so many blocks of the engine's model, whose cache is `target`."""
        model = self._allocate(num_blocks, target)
        if self.capacity is not None:
            model.reserve(self.capacity, num_blocks)
        return model

    def _allocate(self, num_blocks: int, target: KVCache) -> DraftModel:
        """Do `allocate` without the memory of graphs."""
        sizes = self.vocabulary_size, self.pass_tokens
        if isinstance(self.decoder, AssistantHead):
            return AssistantDrafts(self.decoder, target, *sizes)
        groups = len(layer_groups(self.decoder.spec))
        blocks = num_blocks + (self.capacity is not None)  # padding has a block of its own
        cache = self.decoder.allocate_cache([blocks] * groups, self.block_size)
        if self.decoder.device.type == "cpu":
            populate_behind(list(cache.pages))
        if isinstance(self.decoder, DraftHead):
            drafts = LayeredDrafts if isinstance(self.decoder, LayeredHead) else HeadDrafts
            return drafts(self.decoder, cache, *sizes, self.kind, self.targets, _KEPT_ROWS)
        return DraftModel(self.decoder, cache, *sizes)


def tap_for_head(path: Path, target: Model) -> None:
    """Have the engine's model copy the hidden states that the draft head at `path` reads.

    Does nothing for a draft model. Call this before `reserve`. Raises StartupError for a head that
    does not fit `target`.
    """
    try:
        with opened_checkpoint(path) as directory:
            config = Checkpoint.config(directory)
            if is_assistant(config):
                depths: Sequence[int] = [target.spec.num_layers]
            elif is_eagle(config):
                depths = eagle_depths(config, target.spec.num_layers)
            else:
                return
    except CheckpointError as error:
        raise StartupError(f"--draft {path}: {error}") from None
    _tap(f"--draft {path}", depths, target)


def can_draft_with_mtp(model: Path, target: Model) -> bool:
    """Return whether the checkpoint in `model` holds an MTP layer that can draft for `target`."""
    if not isinstance(target, Decoder) or not target.can_tap or not target.computes_logits:
        return False
    # the files hold whole layers, and a rank's spec describes its part of them
    whole = target.spec if target.runs_alone else load_spec(model)
    return not layer_groups(whole)[0].window and holds_mtp(model, whole)


def tap_for_mtp(target: Model) -> None:
    """Have the engine's model copy its final hidden states, which its MTP layer reads.

    Call this before `reserve`. Raises StartupError for a model that can't have such a layer.
    """
    _tap("--speculate mtp", [target.spec.num_layers], target)


def _tap(option: str, depths: Sequence[int], target: Model) -> None:
    _require_target(option, target)
    if not isinstance(target, Decoder) or not target.can_tap:
        raise StartupError(
            f"{option}: a head reads hidden states, and those of this model are no plain sums of "
            "its layers. Start without it, or with a draft model."
        )
    target.tap(depths)


def load_mtp_draft(model: Path, target: Model, kv_dtype: str, max_running: int) -> LoadedDraft:
    """Load the MTP layer of the engine's model, whose checkpoint is in `model`.

    Raises StartupError without such a layer, and with too little memory.
    """
    assert isinstance(target, Decoder)
    option = "--speculate mtp"
    try:
        head = load_mtp(model, target, kv_dtype)
    except CheckpointError as error:
        raise StartupError(f"{option}: {error} Start with --speculate off.") from None
    return _reserved(option, head, target, max_running, DraftKind.MTP)


def load_draft(
    path: Path, model: Path, target: Model, kv_dtype: str, max_running: int
) -> LoadedDraft:
    """Load the draft model at `path` for the engine's model, whose checkpoint is in `model`.

    Raises StartupError for a model that can't draft for `target`, and with too little memory.
    """
    option = f"--draft {path}"
    _require_target("--draft", target)
    try:
        with opened_checkpoint(path) as directory:
            config = Checkpoint.config(directory)
            if is_assistant(config):
                assert isinstance(target, Decoder)
                assistant = load_assistant(directory, target, kv_dtype)
                return _reserved(option, assistant, target, max_running, DraftKind.MODEL)
            if is_eagle(config):
                assert isinstance(target, Decoder)
                head = load_eagle(directory, target, kv_dtype)
                return _reserved(
                    option, head.model, target, max_running, DraftKind.EAGLE, head.targets
                )
            decoder = load_any_model(
                directory, target.dtype, progress=True, device=target.device, kv_dtype=kv_dtype
            )
            sizes = decoder.spec.vocab_size, target.spec.vocab_size
            difference = find_difference(directory, model, sizes)
    except CheckpointError as error:
        raise StartupError(f"--draft {path}: {error}") from None
    _require_draft(path, decoder)
    if difference is not None:
        raise StartupError(
            f"--draft {path} has another vocabulary: {difference}. Use a model with the same "
            "tokenizer."
        )
    return _reserved(option, decoder, target, max_running, DraftKind.MODEL)


def _reserved(
    option: str,
    decoder: Model,
    target: Model,
    max_running: int,
    kind: DraftKind,
    targets: Sequence[int] = (),
) -> LoadedDraft:
    """Reserve the buffers of passes. Raises StartupError with too little memory."""
    if target.block_size % decoder.block_size:
        raise StartupError(
            f"{option} needs blocks of {decoder.block_size} tokens; the model has "
            f"{target.block_size}. Use another draft model."
        )
    tokens = max(_PASS_TOKENS, max_running)
    further = 0
    if decoder.device.type == "cpu" or isinstance(decoder, AssistantHead):
        further = decoder.pass_bytes(tokens, max_running, decoder.spec.context_length)
    needed = decoder.bytes_to_reserve(tokens, max_running) + further
    require_memory(needed, f"A pass of {option}", decoder.device)
    decoder.reserve(tokens, max_running)
    if decoder.device.type == "cuda" and not isinstance(decoder, AssistantHead):
        further = measure_steps(decoder, tokens - max_running, max_running, None)
    if isinstance(decoder, DraftHead):
        kept = LEAST_KEPT * max_running if isinstance(decoder, AssistantHead) else _KEPT_ROWS
        handed_on = tokens if isinstance(decoder, LayeredHead) else 0  # by each layer to the next
        further += (kept + handed_on) * decoder.states_width * decoder.dtype.itemsize
    size, block_size = target.spec.vocab_size, target.block_size
    draft = LoadedDraft(decoder, size, block_size, tokens, further, kind, targets)
    if decoder.device.type != "cuda" or not decoder.is_capturable:
        return draft
    context = min(decoder.spec.context_length, target.spec.context_length)
    capacity = StepCapacity(tokens, max_running, -(-context // block_size))
    draft = replace(draft, capacity=capacity)
    return replace(draft, pass_bytes=further + _graph_bytes(draft, capacity, target))


def _graph_bytes(draft: LoadedDraft, capacity: StepCapacity, target: Model) -> int:
    """Return the bytes of all graphs of a draft model's passes. Raises StartupError."""
    blocks = capacity.blocks + row_bucket(capacity.sequences)  # so that no size is left out
    with usable_kernels():
        model = draft.allocate(blocks, target.allocate_cache(1))
        return measure_captures(model.captures)


def _require_target(option: str, target: Model) -> None:
    """Raise StartupError for an engine's model that takes no draft model."""
    if target.computes_whole_prompts or not target.computes_logits:
        raise StartupError(f"{option} is for models that generate. Start without it.")
    if layer_groups(target.spec)[0].window:
        raise StartupError(
            f"{option} needs a model with a layer that sees all tokens; all layers of this one "
            "have windows. Start without it."
        )


def _require_draft(path: Path, draft: Model) -> None:
    """Raise StartupError for a model that can't make draft tokens."""
    if draft.computes_whole_prompts or not draft.computes_logits:
        raise StartupError(f"--draft {path} generates no tokens. Use a model that does.")
    if draft.state_bytes:
        raise StartupError(
            f"--draft {path} has recurrent layers, which can't return to an accepted token. Use a "
            "model with attention alone."
        )
