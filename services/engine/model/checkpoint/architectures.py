"""The family of a checkpoint, by the architectures that its config.json names."""

from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.encoder_families import (
    ENCODERS,
    is_bidirectional,
    pooling_family,
)
from services.engine.model.checkpoint.families import FAMILIES
from services.engine.model.checkpoint.family import Family
from services.engine.model.checkpoint.vision_language import VISION_LANGUAGE

__all__ = ["family_of"]


def family_of(config: Config) -> Family:
    """Return the family. Raises CheckpointError for an architecture that is not served."""
    architectures = config.texts("architectures")
    for name in architectures:
        if name in FAMILIES and not is_bidirectional(FAMILIES[name], config):
            return FAMILIES[name]
        if name in VISION_LANGUAGE:
            return VISION_LANGUAGE[name].family(config)
        if (family := pooling_family(name, config)) is not None:
            return family
    named = ", ".join(architectures) or "none"
    raise CheckpointError(
        f"{config.file}: the architecture {named} is not supported. Supported: "
        f"{', '.join((*FAMILIES, *VISION_LANGUAGE, *ENCODERS))}."
    )
