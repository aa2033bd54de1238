"""Types of JSON fields that several bodies have."""

from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from services.common.constraint_texts import JsonObject

__all__ = [
    "BOUNDED",
    "IDS",
    "Int64",
    "JsonObject",
    "KeptTokens",
    "LeftOut",
    "Priority",
    "Seconds",
    "Strings",
    "TopK",
    "Uint32",
    "about",
]

BOUNDED = Meta(max_length=4_096)  # the services have lower limits
IDS = Meta(max_length=2**20)  # as many as a body may have
Uint32: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1, le=2**32 - 1)]  # -1: all
KeptTokens: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # -1: as many as fit
Priority: TypeAlias = Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86_400)]
Strings: TypeAlias = Annotated[list[str], BOUNDED]


def about(meaning: str, **keywords: Any) -> Meta:
    """Return what documents a field of a body. keywords: of its JSON Schema, besides its type's."""
    return Meta(description=meaning, extra_json_schema=keywords or None)


class LeftOut(Struct):
    """An item of a list that is left out, and whose path counts as that of an unknown field."""
