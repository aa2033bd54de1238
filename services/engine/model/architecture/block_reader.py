"""Attention to chosen blocks of tokens (MiniMax M3), read from config.json."""

from dataclasses import replace

from services.engine.model.architecture.block_index import BlockIndex
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["with_block_indexes"]

_SPARSE = "minimax_m3_sparse"
_PUBLISHED = {
    "index_head_dim": "sparse_index_dim",
    "index_n_heads": "sparse_num_index_heads",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""Keys of sparse_attention_config in published files, which take precedence"""


def with_block_indexes(config: Config, layers: list[AttentionSpec]) -> list[AttentionSpec]:
    """Return the layers with the indexers that some of them have. Raises CheckpointError."""
    published = config.section("sparse_attention_config")
    config = Config(
        config.file,
        {
            **config.values,
            **{
                key: published.values[name]
                for key, name in _PUBLISHED.items()
                if published.has(name)
            },
        },
        config.keys,
    )
    return [
        replace(layer, index=_read_index(config, layer)) if is_sparse else layer
        for layer, is_sparse in zip(
            layers, _sparse_layers(config, published, len(layers)), strict=True
        )
    ]


def _sparse_layers(config: Config, published: Config, num_layers: int) -> list[bool]:
    if config.has("layer_types"):
        kinds = config.kind_per_layer("layer_types", num_layers, (_SPARSE, "full_attention"))
        return [kind == _SPARSE for kind in kinds]
    if not published.has("sparse_attention_freq"):
        return [False] * num_layers
    marks = published.integers("sparse_attention_freq")
    if len(marks) != num_layers:
        raise CheckpointError(
            f"{config.file}: sparse_attention_freq names {len(marks)} layers, num_hidden_layers "
            f"{num_layers}."
        )
    return [bool(mark) for mark in marks]


def _read_index(config: Config, layer: AttentionSpec) -> BlockIndex:
    index = BlockIndex(
        width=config.positive("index_head_dim"),
        block_tokens=config.positive("index_block_size"),
        chosen_blocks=config.positive("index_topk_blocks"),
        last_blocks=config.integer("index_local_blocks"),
    )
    rotating = 0 if layer.rotary is None else layer.rotary.width
    problem = None
    if (heads := config.positive("index_n_heads")) != layer.num_kv_heads:
        problem = f"index_n_heads ({heads}) must equal num_key_value_heads ({layer.num_kv_heads})"
    elif index.width < rotating or index.width % 2:
        problem = f"index_head_dim ({index.width}) must be even, and at least {rotating}"
    elif not 0 <= index.last_blocks <= index.chosen_blocks:
        problem = (
            f"index_local_blocks ({index.last_blocks}) must be from 0 to index_topk_blocks "
            f"({index.chosen_blocks})"
        )
    if problem is not None:
        raise CheckpointError(f"{config.file}: {problem}.")
    return index
