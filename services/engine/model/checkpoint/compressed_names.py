"""Tensor names of compressed attention and of hyper-connections."""

from dataclasses import dataclass, field

__all__ = ["CompressedNames", "CompressorNames", "HyperNames"]


@dataclass(frozen=True, slots=True)
class CompressorNames:
    """Tensor names of a compressor; those of products and the norm without .weight."""

    vectors: str
    scores: str
    position_bias: str
    norm: str

    @staticmethod
    def below(module: str) -> "CompressorNames":
        return CompressorNames(*(f"{module}.{name}" for name in ("wkv", "wgate", "ape", "norm")))


@dataclass(frozen=True, slots=True)
class CompressedNames:
    """Tensor names of compressed attention; those of products and norms without .weight."""

    query_down: str = "attn.wq_a"
    query_norm: str = "attn.q_norm"
    query_up: str = "attn.wq_b"
    keys: str = "attn.wkv"
    key_norm: str = "attn.kv_norm"
    sinks: str = "attn.attn_sink"
    groups: str = "attn.wo_a"
    output: str = "attn.wo_b"
    compressor: CompressorNames = field(
        default_factory=lambda: CompressorNames.below("attn.compressor")
    )
    index_queries: str = "attn.indexer.wq_b"
    index_weights: str = "attn.indexer.weights_proj"
    index_compressor: CompressorNames = field(
        default_factory=lambda: CompressorNames.below("attn.indexer.compressor")
    )


@dataclass(frozen=True, slots=True)
class HyperNames:
    """Beginnings of the names of hyper-connections' tensors."""

    mixer: str = "hc_attn"
    feed_forward: str = "hc_ffn"
    head: str = "hc_head"
    """Name below the model's root rather than in a layer"""
