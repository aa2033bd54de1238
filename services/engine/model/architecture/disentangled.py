"""Shape of disentangled attention, whose scores depend on content and distance (DeBERTa)."""

from dataclasses import dataclass

from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["DisentangledSpec"]

_KINDS = ("c2p", "p2c")


@dataclass(frozen=True, slots=True)
class DisentangledSpec:
    """Terms of two tokens' score beside the product of query and key.

    Source: He et al., "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", 2021.
    """

    span: int
    """Number of embeddings of distances in each direction"""
    buckets: int
    """Number of buckets, which far distances share by logarithm; 0: each distance has its own"""
    farthest: int
    """Distance of the last bucket"""
    reads_keys: bool
    """True if queries are multiplied with keys of distances (c2p)"""
    reads_queries: bool
    """True if keys are multiplied with queries of distances (p2c)"""
    shares_projections: bool
    """True if distances are projected by the weights of tokens"""
    has_norm: bool
    """True if a LayerNorm precedes the projection of distances"""

    @property
    def num_products(self) -> int:
        """Number of products that a score adds up."""
        return 1 + self.reads_keys + self.reads_queries

    @staticmethod
    def from_config(config: Config) -> "DisentangledSpec":
        """Read config.json. Raises CheckpointError for kinds of attention that are not served."""
        if not config.flag("relative_attention", False):
            raise CheckpointError(
                f"{config.file}: relative_attention is false, which is not supported."
            )
        if config.integer("conv_kernel_size", 0) > 0:
            raise CheckpointError(
                f"{config.file}: conv_kernel_size is set, which is not supported."
            )
        kinds = _kinds(config)
        farthest = config.integer("max_relative_positions", -1)
        if farthest < 1:
            farthest = config.positive("max_position_embeddings")
        buckets = max(0, config.integer("position_buckets", -1))
        most = 2 * farthest - 2
        if buckets and not 1 < buckets <= most:
            bounds = f"between 2 and {most}" if most else "0 with max_relative_positions = 1"
            raise CheckpointError(
                f"{config.file}: position_buckets must be {bounds}, got {buckets}."
            )
        norms = config.text("norm_rel_ebd", "none").lower().split("|")
        return DisentangledSpec(
            span=buckets or farthest,
            buckets=buckets,
            farthest=farthest,
            reads_keys="c2p" in kinds,
            reads_queries="p2c" in kinds,
            shares_projections=config.flag("share_att_key", False),
            has_norm="layer_norm" in map(str.strip, norms),
        )


def _kinds(config: Config) -> tuple[str, ...]:
    """Return the names in pos_att_type, a list or a text with bars between them."""
    listed = config.values.get("pos_att_type")
    if isinstance(listed, str):
        kinds = tuple(part.strip() for part in listed.lower().split("|"))
    else:
        kinds = config.texts("pos_att_type") if listed is not None else ()
    if not kinds or not set(kinds) <= set(_KINDS):
        raise CheckpointError(
            f"{config.file}: pos_att_type must hold {' or '.join(_KINDS)}, got "
            f"{', '.join(kinds) or 'nothing'}."
        )
    return kinds
