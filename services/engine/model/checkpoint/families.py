"""Supported decoders, by architecture."""

from collections.abc import Mapping

from services.engine.model.checkpoint.alibi_families import ALIBI_FAMILIES
from services.engine.model.checkpoint.compressed_families import COMPRESSED_FAMILIES
from services.engine.model.checkpoint.delta_families import DELTA_FAMILIES
from services.engine.model.checkpoint.dense_families import DENSE_FAMILIES
from services.engine.model.checkpoint.expert_families import EXPERT_FAMILIES
from services.engine.model.checkpoint.family import Family
from services.engine.model.checkpoint.gemma_families import GEMMA_FAMILIES
from services.engine.model.checkpoint.gpt_families import GPT_FAMILIES
from services.engine.model.checkpoint.latent_families import LATENT_FAMILIES
from services.engine.model.checkpoint.layer_norm_families import LAYER_NORM_FAMILIES
from services.engine.model.checkpoint.recurrent_families import RECURRENT_FAMILIES
from services.engine.model.checkpoint.relative_families import RELATIVE_FAMILIES
from services.engine.model.checkpoint.sigmoid_families import SIGMOID_FAMILIES
from services.engine.model.checkpoint.zamba_families import ZAMBA_FAMILIES

__all__ = ["FAMILIES"]

FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        *DENSE_FAMILIES,
        *GEMMA_FAMILIES,
        *LAYER_NORM_FAMILIES,
        *GPT_FAMILIES,
        *ALIBI_FAMILIES,
        *EXPERT_FAMILIES,
        *SIGMOID_FAMILIES,
        *LATENT_FAMILIES,
        *COMPRESSED_FAMILIES,
        *DELTA_FAMILIES,
        *RECURRENT_FAMILIES,
        *RELATIVE_FAMILIES,
        *ZAMBA_FAMILIES,
    )
}
"""Families by architecture name, as in config.json."""
