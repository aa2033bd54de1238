"""The error of everything that reads grammars."""

__all__ = ["GrammarError"]


class GrammarError(Exception):
    """A grammar is refused. The message is for its author: the place and the reason."""
