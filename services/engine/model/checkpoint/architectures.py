"""The family of a checkpoint, by the architectures that its config.json names."""

from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.encoder_families import (
    POOLING_ARCHITECTURES,
    is_bidirectional,
    pooling_family,
)
from services.engine.model.checkpoint.families import FAMILIES
from services.engine.model.checkpoint.family import Family
from services.engine.model.checkpoint.vision_language import VISION_LANGUAGE

__all__ = ["UnknownArchitectureError", "family_of"]


class UnknownArchitectureError(CheckpointError):
    """Architecture without a family of ours."""


def family_of(config: Config) -> Family:
    """Return the family. Raises UnknownArchitectureError for an architecture that is not served.

    Raises CheckpointError for wrong values of config.json that the family depends on.
    """
    architectures = config.texts("architectures")
    for name in architectures:
        if name in FAMILIES and not is_bidirectional(FAMILIES[name], config):
            return FAMILIES[name]
        if name in VISION_LANGUAGE:
            return VISION_LANGUAGE[name].family(config)
        if (family := pooling_family(name, config)) is not None:
            return family
    named = ", ".join(architectures) or "none"
    raise UnknownArchitectureError(
        f"{config.file}: the architecture {named} is not supported. Supported: "
        f"{', '.join((*FAMILIES, *VISION_LANGUAGE, *POOLING_ARCHITECTURES))}."
    )
