"""Benchmarks: Tokenwire and its peers, measured the same way from outside."""

from pathlib import Path

__all__ = ["CACHE"]

CACHE = Path.home() / ".cache" / "tokenwire-bench"
"""Where peers are installed, checkpoints are made and servers log."""
