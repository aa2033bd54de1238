"""Benchmarks: Tokenwire and its peers, measured the same way from outside."""

from pathlib import Path

__all__ = ["CACHE", "ENGINE_ENVIRONMENT"]

CACHE = Path.home() / ".cache" / "tokenwire-bench"
"""Where peers are installed, checkpoints are made and servers log."""

ENGINE_ENVIRONMENT = {"GOMP_SPINCOUNT": "20000"}
"""What the engine sets before it imports torch, for those that run its step loop themselves."""
