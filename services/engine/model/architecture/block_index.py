"""Shape of the indexer that chooses blocks of tokens (MiniMax M3)."""

from dataclasses import dataclass

__all__ = ["BlockIndex"]


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """Indexer: small attention without values, whose scores choose the blocks a layer attends to.

    Each key head of the layer has one head of queries. All of them share one key of each token. A
    block's score is the highest one of its tokens.
    """

    width: int
    """Width of a query and of the key; the first numbers rotate, as many as in the layer's heads"""
    block_tokens: int
    """Number of tokens of a block; blocks begin at multiples of it"""
    chosen_blocks: int
    """Most blocks that a key head's queries attend to"""
    last_blocks: int
    """Number of blocks that are always chosen: the query's own and those right before it"""
