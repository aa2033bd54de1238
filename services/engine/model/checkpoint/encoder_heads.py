"""Heads that several encoders have."""

from services.engine.model.checkpoint.family import HeadStage

__all__ = ["ROBERTA_HEAD", "language_head"]

ROBERTA_HEAD = (
    HeadStage("classifier.dense", "tanh"),
    HeadStage("classifier.out_proj", narrows=True),
)
"""Stages of ForSequenceClassification's head"""


def language_head(dense: str, norm: str, logits: str) -> tuple[HeadStage, ...]:
    """Return the stages of ForMaskedLM's head."""
    return (
        HeadStage(dense, "gelu"),
        HeadStage(norm, is_norm=True),
        HeadStage(logits, narrows=True),
    )
