"""Infill (fill-in-the-middle) prompts of each family of models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = [
    "INFILL_FAMILIES",
    "InfillFamily",
    "InfillOrder",
    "InfillTemplate",
    "assemble_infill",
    "detect_infill",
    "infill_control_tokens",
]


class InfillOrder(Enum):
    """Order of the parts of a prompt."""

    PREFIX_SUFFIX_MIDDLE = "prefix token, prefix, suffix token, suffix, middle token"
    SUFFIX_PREFIX = "suffix token, suffix, prefix token, prefix"


@dataclass(frozen=True, slots=True)
class InfillFamily:
    """Control tokens of a family of models, as texts."""

    name: str
    order: InfillOrder
    prefix: str
    suffix: str
    middle: str | None = None
    begins_with_bos: bool = False
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InfillTemplate:
    """Control tokens of a family, as ids of one vocabulary."""

    family: str
    order: InfillOrder
    prefix_id: int
    suffix_id: int
    middle_id: int | None
    bos_id: int | None
    stop_ids: tuple[int, ...]

    @property
    def control_count(self) -> int:
        """Number of control tokens in a prompt."""
        return 2 + (self.middle_id is not None) + (self.bos_id is not None)


# tokens from the model cards; detection tries the families in this order
INFILL_FAMILIES: Sequence[InfillFamily] = (
    InfillFamily(
        "qwen",  # and CodeGemma, and the embedded model
        InfillOrder.PREFIX_SUFFIX_MIDDLE,
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        stops=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    InfillFamily(
        "starcoder",  # and Granite
        InfillOrder.PREFIX_SUFFIX_MIDDLE,
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        stops=("<fim_pad>", "<file_sep>"),
    ),
    InfillFamily(
        "codellama",
        InfillOrder.PREFIX_SUFFIX_MIDDLE,
        "▁<PRE>",
        "▁<SUF>",
        "▁<MID>",
        begins_with_bos=True,
        stops=("▁<EOT>",),
    ),
    InfillFamily(
        "deepseek",
        InfillOrder.PREFIX_SUFFIX_MIDDLE,
        "<｜fim▁begin｜>",
        "<｜fim▁hole｜>",
        "<｜fim▁end｜>",
    ),
    InfillFamily(
        "codestral", InfillOrder.SUFFIX_PREFIX, "[PREFIX]", "[SUFFIX]", begins_with_bos=True
    ),
)


def infill_control_tokens() -> frozenset[str]:
    """Return the control tokens of every family."""
    return frozenset(
        token
        for family in INFILL_FAMILIES
        for token in (family.prefix, family.suffix, family.middle, *family.stops)
        if token
    )


def detect_infill(
    vocabulary: Mapping[str, int], bos_id: int | None, families: Sequence[InfillFamily]
) -> InfillTemplate | None:
    """Return the first family whose control tokens are all in the vocabulary."""
    for family in families:
        needed = [family.prefix, family.suffix, *([family.middle] if family.middle else [])]
        if all(token in vocabulary for token in needed):
            return InfillTemplate(
                family=family.name,
                order=family.order,
                prefix_id=vocabulary[family.prefix],
                suffix_id=vocabulary[family.suffix],
                middle_id=vocabulary[family.middle] if family.middle else None,
                bos_id=bos_id if family.begins_with_bos else None,
                stop_ids=tuple(vocabulary[token] for token in family.stops if token in vocabulary),
            )
    return None


def assemble_infill(
    template: InfillTemplate, prefix: Sequence[int], suffix: Sequence[int], limit: int | None = None
) -> list[int]:
    """Return the ids of the prompt, at most `limit` of them.

    The cut takes the ids farthest from the gap: the prefix's start and the suffix's end. The suffix
    keeps a quarter of the room if it needs that much. Control tokens stay.
    """
    if limit is not None and len(prefix) + len(suffix) + template.control_count > limit:
        room = max(0, limit - template.control_count)
        suffix = suffix[: max(room // 4, room - len(prefix))]
        prefix = prefix[max(0, len(prefix) - (room - len(suffix))) :]
    head = [] if template.bos_id is None else [template.bos_id]
    if template.order is InfillOrder.SUFFIX_PREFIX:
        return [*head, template.suffix_id, *suffix, template.prefix_id, *prefix]
    middle = [] if template.middle_id is None else [template.middle_id]
    return [*head, template.prefix_id, *prefix, template.suffix_id, *suffix, *middle]
