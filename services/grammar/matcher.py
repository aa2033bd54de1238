"""One sequence's place in its grammar."""

from collections.abc import Sequence

from llguidance import LLMatcher

from services.grammar.prototype import reason_of

__all__ = ["Matcher", "RefusedTokenError"]

_MOST_FORCED = 64  # ids reported at once; a grammar can force without end


class RefusedTokenError(Exception):
    """A token was fed that the grammar does not allow there."""


class Matcher:
    """Follows a sequence. End-of-sequence ids are kept out of the grammar.

    They are allowed wherever it may end, and only counted when they are fed.
    """

    __slots__ = ("_ended", "end_ids", "inner")

    def __init__(self, inner: LLMatcher, end_ids: tuple[int, ...]) -> None:
        self.inner = inner
        self.end_ids = end_ids
        self._ended = 0  # end ids fed

    @property
    def terminated(self) -> bool:
        """Nothing may follow but the end. Right once the mask has been computed."""
        return self._ended > 0 or bool(self.inner.is_stopped())

    @property
    def may_end(self) -> bool:
        """Whether an end id is allowed next."""
        return self.terminated or bool(self.inner.is_accepting())

    def accept(self, ids: Sequence[int], vocabulary_size: int) -> None:
        """Feed tokens, each checked first; raises RefusedTokenError at the first misfit."""
        body, ends = self._split(ids)
        for position, token in enumerate(body):
            if token >= vocabulary_size:
                raise RefusedTokenError(
                    f"Token {position} is {token}, outside the vocabulary of {vocabulary_size}."
                )
        if self._ended and body:
            raise RefusedTokenError(f"Token 0, id {body[0]}, follows the end of the sequence.")
        taken = self.inner.try_consume_tokens(body) if body else 0
        if taken < len(body):
            if self.inner.is_error():
                raise RefusedTokenError(f"The grammar can't be followed: {reason_of(self.inner)}")
            raise RefusedTokenError(f"Token {taken}, id {body[taken]}, does not fit the grammar.")
        if ends and not self.may_end:
            raise RefusedTokenError(f"Token {taken}, id {ends[0]}, ends an unfinished sequence.")
        if any(token not in self.end_ids for token in ends):
            raise RefusedTokenError("A token follows the end of the sequence.")
        self._ended += len(ends)

    def rollback(self, count: int) -> None:
        """Take the last tokens back; raises RefusedTokenError for more than were fed."""
        ends = min(count, self._ended)
        self._ended -= ends
        if count > ends and not self.inner.rollback(count - ends):
            raise RefusedTokenError(f"{count} tokens can't be taken back; fewer were fed.")

    def fork(self) -> "Matcher":
        """Another matcher in the same state."""
        copy = Matcher(self.inner.deep_copy(), self.end_ids)
        copy._ended = self._ended
        return copy

    def forced(self, vocabulary_size: int) -> list[int]:
        """The ids that must follow, the first of them at least."""
        if self.terminated:
            return []
        forced: list[int] = self.inner.compute_ff_tokens()[:_MOST_FORCED]
        for position, token in enumerate(forced):
            if token >= vocabulary_size:
                return forced[:position]
        return forced

    def _split(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The ids before the first end id, and the rest."""
        for position, token in enumerate(ids):
            if token in self.end_ids:
                return list(ids[:position]), list(ids[position:])
        return list(ids), []
