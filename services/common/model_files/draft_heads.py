"""Draft heads, which draft for a model and can't be served by themselves."""

__all__ = ["is_draft_head"]


def is_draft_head(architecture: str) -> bool:
    """Return whether an architecture of a config.json is that of an EAGLE-3 head."""
    return "eagle3" in architecture.lower()
