"""Stored tensors that a depth of Zamba adds to a shared block."""

from dataclasses import dataclass

from services.engine.model.architecture.layers import AttentionSpec, DenseSpec, LayerSpec
from services.engine.model.parts.stored import LayerNames, StoredLinear

__all__ = ["StoredLowRank", "StoredSharedBlock", "stored_shared_block"]


@dataclass(frozen=True, slots=True)
class StoredLowRank:
    """Products of low rank, one for each part of a product."""

    down: StoredLinear
    up: tuple[StoredLinear, ...]


@dataclass(frozen=True, slots=True)
class StoredSharedBlock:
    qkv: StoredLowRank | None
    """Products that the depth adds to attention's; None: it adds none"""
    gate: StoredLowRank | None
    output: StoredLinear


def stored_shared_block(
    names: LayerNames, layers: LayerNames, layer: LayerSpec
) -> StoredSharedBlock:
    """Name the tensors of a depth. names, layers: builders of names in the block and outside."""
    own, block, mixer = names.names.shared_block, layer.shared_block, layer.mixer
    hidden, dense = names.spec.hidden_size, layer.feed_forward
    assert own is not None
    assert block is not None
    assert isinstance(mixer, AttentionSpec)
    assert isinstance(dense, DenseSpec)
    queries, cached = (heads * mixer.head_dim for heads in (mixer.num_heads, mixer.num_kv_heads))

    def low_rank(
        modules: tuple[str, ...], outputs: tuple[int, ...], inputs: int, rank: int
    ) -> StoredLowRank | None:
        if not rank:
            return None
        modules = tuple(module.format(block.number) for module in modules)
        downs = tuple(f"{module}.0" for module in modules)
        return StoredLowRank(
            down=names.linear(downs, (rank,) * len(downs), inputs, False),
            up=tuple(
                names.linear((f"{module}.1",), (width,), rank, False)
                for module, width in zip(modules, outputs, strict=True)
            ),
        )

    widths = (queries, cached, cached)
    return StoredSharedBlock(
        qkv=low_rank(own.qkv_adapters, widths, mixer.input_width, block.attention_rank),
        gate=low_rank((own.gate_adapter,), (2 * dense.width,), hidden, block.gate_rank),
        output=layers.linear((f"{block.depth}.{own.output}",), (hidden,), hidden, False),
    )
