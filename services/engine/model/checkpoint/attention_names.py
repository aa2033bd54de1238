"""Tensor names of latent attention, of indexers, and of addends by distance."""

from dataclasses import dataclass

__all__ = ["BlockIndexNames", "IndexNames", "LatentNames", "RelativeNames"]


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
    """Product that computes queries from the residual"""
    latents: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    expansion: tuple[str, ...] = ("self_attn.kv_b_proj",)
    """Product that computes keys and values from latents, head by head; or one tensor [heads,
    latent, key] and one [heads, value, latent]"""
    index: IndexNames | None = None
    """Tensors of the indexer; None: layers attend to all tokens"""


@dataclass(frozen=True, slots=True)
class RelativeNames:
    """Tensor names of Inkling's additions to attention and the feed-forward layer.

    Those of products and convolutions are without .weight.
    """

    states: str = "self_attn.r_proj"
    """Product that makes the factors of the table's rows"""
    table: str = "self_attn.rel_logits_proj.proj"
    """Addends of scores by distance"""
    keys: str = "self_attn.k_sconv.conv1d"
    values: str = "self_attn.v_sconv.conv1d"
    output: str = "attn_sconv.conv1d"
    feed_forward: str = "mlp_sconv.conv1d"
    """Convolution of the feed-forward layer's output, the last of four"""
    dense_scale: str = "mlp.global_scale"
    """Factor of a dense layer's output"""
    experts_scale: str = "mlp.gate.global_scale"
    """Factor of the weights of all experts"""
