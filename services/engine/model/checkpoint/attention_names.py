"""Tensor names of latent attention and of indexers."""

from dataclasses import dataclass

__all__ = ["BlockIndexNames", "IndexNames", "LatentNames"]


@dataclass(frozen=True, slots=True)
class BlockIndexNames:
    """Tensor names of the indexer that chooses blocks of tokens, without .weight."""

    queries: str = "self_attn.indexer.q_proj"
    keys: str = "self_attn.indexer.k_proj"
    query_norm: str = "self_attn.indexer.q_norm"
    key_norm: str = "self_attn.indexer.k_norm"


@dataclass(frozen=True, slots=True)
class IndexNames:
    """Tensor names of the indexer of sparse attention, without .weight and .bias."""

    queries: str = "self_attn.indexer.wq_b"
    keys: str = "self_attn.indexer.wk"
    key_norm: str = "self_attn.indexer.k_norm"
    head_weights: str = "self_attn.indexer.weights_proj"


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Tensor names of multi-head latent attention, without .weight and .bias."""

    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    queries: str = "self_attn.q_proj"
    """Queries that are made of the residual in one product"""
    latents: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    expansion: tuple[str, ...] = ("self_attn.kv_b_proj",)
    """Keys and values of latents, head by head; or one tensor [heads, latent, key] and one [heads,
    value, latent]"""
    index: IndexNames | None = None
    """None: layers attend to all tokens"""
