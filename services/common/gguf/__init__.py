"""Checkpoints in the GGUF format: metadata, and the files of a checkpoint that they describe."""
