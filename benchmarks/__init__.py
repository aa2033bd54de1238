"""Benchmarks of Tokenwire and its peers, measured by the same client."""

from pathlib import Path

__all__ = ["CACHE"]

CACHE = Path.home() / ".cache" / "tokenwire-bench"
"""Directory of the peers' environments, the checkpoints and the servers' logs."""
