"""The one error a checkpoint can cause."""

__all__ = ["CheckpointError"]


class CheckpointError(Exception):
    """A checkpoint cannot be served. The message is one sentence naming the file and the cause."""
