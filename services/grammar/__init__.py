"""The grammar service: structured output as token masks."""

__all__ = ["GrammarError"]


class GrammarError(Exception):
    """A grammar is refused. The message gives its author the place and the reason."""
