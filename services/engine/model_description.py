"""Description of the model that the loop process has loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.engine.checked_request import Pooled

__all__ = ["CacheGroup", "GenerationDefaults", "ModelDescription", "SuppressedIds"]


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling settings that the checkpoint recommends; None = no recommendation."""

    temperature: float | None = None
    """Temperature; 0 if generation_config.json sets do_sample to false"""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class SuppressedIds(NamedTuple):
    """Ids that the checkpoint excludes from answers."""

    always: tuple[int, ...] = ()
    """Ids that are never generated, such as marks of images"""
    first: tuple[int, ...] = ()
    """Ids that are not generated as the first token"""


class CacheGroup(NamedTuple):
    """Group of layers that keep equally large data for each token or sequence."""

    blocks: int
    """Number of blocks, or of slots of states"""
    window: int = 0
    """Number of last tokens, itself included, whose keys and values a token reads; 0 = all"""
    snapshot_interval: int = 0
    """Number of prompt tokens between two states that the group keeps; 0 = it holds no states"""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model that the loop process has loaded."""

    architecture: str
    dtype: str
    device: str
    context_length: int
    vocabulary_size: int
    eos_token_ids: Sequence[int]
    bos_token_id: int | None
    recommended: GenerationDefaults
    weights_fingerprint: str
    block_size: int
    total_blocks: int
    """Number of KV blocks of the first cache group"""
    cache_groups: Sequence[CacheGroup]
    kv_bytes: int
    weight_bytes: int
    pool_bytes: Sequence[int]
    """Bytes of a block of each cache group, or of a slot of states"""
    max_running: int
    """Most sequences that run at the same time"""
    max_step_tokens: int
    """Most prompt tokens of a step"""
    kernels: str
    """Instruction set of the CPU kernels; "cuda" on a GPU, "none" if torch computes on a CPU"""
    model_code: str = "native"
    """Code that computes the model: "native" or "transformers" """
    takes_adapters: bool = True
    """False for a model in a GGUF file, and for an encoder without its own adapters"""
    tasks: Sequence[str] = ()
    """Tasks whose adapters are loaded with the model, under the numbers from 1 on"""
    generates: bool = True
    """False if the model only makes vectors"""
    pooled: Pooled | None = None
    """Tokens whose hidden states make vectors; None = the model makes no vectors"""
    vector_width: int = 0
    """Width of a prompt's vector; 0 = the model makes none"""
    token_width: int = 0
    """Width of a token's vector; 0 = the model makes none"""
    weighs_tokens: bool = False
    """True if the model gives each token a weight"""
    hides_ends: bool = False
    """True if the model can hide tokens at the end of a prompt from all tokens"""
    has_scores: bool = False
    """True if the vectors are scores of texts, or of pairs of texts, instead of embeddings"""
    vectors_are_normalized: bool = False
    takes_pairs: bool = False
    """True if the model tells the two texts of a pair apart"""
    suppressed: SuppressedIds = field(default_factory=SuppressedIds)
    images_are_consecutive: bool = False
    """True if the tokens of an image must have no other tokens between them"""
