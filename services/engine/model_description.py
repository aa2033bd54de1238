"""Description of the model that the loop process has loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.engine.checked_request import Pooled

__all__ = ["CacheGroup", "GenerationDefaults", "ModelDescription"]


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling settings that the checkpoint recommends; None = no recommendation."""

    temperature: float | None = None
    """0 where generation_config.json sets do_sample to false"""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class CacheGroup(NamedTuple):
    """Layers that keep the same for each token or sequence."""

    blocks: int
    """Blocks, or slots of states"""
    window: int = 0
    """Last tokens whose keys and values a token reads, itself included; 0 = all"""
    snapshot_interval: int = 0
    """Tokens of a prompt after each of which the group keeps a state; 0 = it holds no states"""


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
    """KV blocks of the first cache group"""
    cache_groups: Sequence[CacheGroup]
    kv_bytes: int
    weight_bytes: int
    kernels: str
    """Instruction set of the CPU kernels; "cuda" on a GPU, "none" if torch computes on a CPU"""
    model_code: str = "native"
    """Code that computes the model: "native" or "transformers" """
    takes_adapters: bool = True
    """False if the model is an encoder without adapters of its own, or in a GGUF file"""
    tasks: Sequence[str] = ()
    """Tasks whose adapters are loaded with the model, under the numbers from 1 on"""
    generates: bool = True
    """False if it only makes vectors"""
    pooled: Pooled | None = None
    """Tokens whose hidden states make vectors; None = it makes none"""
    vector_width: int = 0
    """Numbers of a prompt's vector; 0 = it makes none"""
    token_width: int = 0
    """Numbers of a token's vector; 0 = it makes none"""
    weighs_tokens: bool = False
    """True if it gives each token a weight"""
    hides_ends: bool = False
    """True if it can hide tokens at the end of a prompt from all tokens"""
    has_scores: bool = False
    """True if its vectors are scores of texts, or of pairs of texts, rather than embeddings"""
    vectors_are_normalized: bool = False
    takes_pairs: bool = False
    """True if it tells the two texts of a pair apart"""
    images_are_consecutive: bool = False
    """True if the tokens of an image must have no others between them"""
