"""Refusal of a model that transformers' code can't serve here."""

from services.engine.model.checkpoint.config import CheckpointError

__all__ = ["UnsupportedError", "refusal"]


class UnsupportedError(Exception):
    """A model needs something that attention over pages can't do. The message is a clause."""


def refusal(file: str, architecture: str, reason: str) -> CheckpointError:
    """Return the error for a model. reason: a clause, such as "its layers are recurrent"."""
    return CheckpointError(
        f"{file}: {architecture} can't be served on transformers' code: {reason}."
    )
