"""One sequence's place in its grammar."""

from collections.abc import Sequence

from llguidance import LLMatcher

from services.grammar.matching.prototype import reason_of
from services.grammar.matching.steering import Steering

__all__ = ["Matcher", "RefusedTokenError"]

_MOST_FORCED = 64  # ids taken at once; a grammar can force without end
_ALLOWANCE, _ALLOWANCE_PER_MASK = 0.25, 0.005  # CPU seconds


class RefusedTokenError(Exception):
    """A token was fed that the grammar does not allow there."""


class _Cost:
    """What the masks of a matcher, and of all that are forked from it, have taken."""

    def __init__(self) -> None:
        self.masks = 0
        self.seconds = 0.0


class Matcher:
    """Follows a sequence. End-of-sequence ids are kept out of the grammar.

    They are allowed wherever it may end, and only counted when they are fed.
    """

    __slots__ = ("_cost", "_ended", "_steering", "end_ids", "inner")

    def __init__(
        self,
        inner: LLMatcher,
        end_ids: tuple[int, ...],
        steering: Steering | None = None,
        cost: _Cost | None = None,
    ) -> None:
        """`steering`: what forbids repetitions; None where the grammar forbids all that it must."""
        self.inner = inner
        self.end_ids = end_ids
        self._steering = steering
        self._cost = cost or _Cost()
        self._ended = 0  # end ids fed

    @property
    def terminated(self) -> bool:
        """Nothing may follow but the end. Right once the mask has been computed."""
        return self._ended > 0 or bool(self.inner.is_stopped())

    @property
    def is_too_slow(self) -> bool:
        """Whether its masks have taken more time than those beside it can be made to wait."""
        return self._cost.seconds > _ALLOWANCE + _ALLOWANCE_PER_MASK * self._cost.masks

    def charge(self, seconds: float) -> None:
        """Count the CPU time of a mask."""
        self._cost.masks += 1
        self._cost.seconds += seconds

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
        for position, token in enumerate(body):
            if not self._steer(token):
                raise RefusedTokenError(
                    f"Token {position}, id {token}, repeats a key or an item that was there."
                )
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
        for _ in range(count - ends):
            self._steering = self._steering and self._steering.previous

    def fork(self) -> "Matcher":
        """Another matcher in the same state."""
        copy = Matcher(self.inner.deep_copy(), self.end_ids, self._steering, self._cost)
        copy._ended = self._ended
        return copy

    def walk(self, ids: Sequence[int], vocabulary_size: int) -> list["Matcher"]:
        """Matchers in the states behind each of some guessed ids, as far as these fit."""
        states: list[Matcher] = []
        state = self
        for token in self._split(ids)[0]:
            state = state.fork()
            if token >= vocabulary_size or not state.inner.consume_token(token):
                break
            if not state._steer(token):
                break
            states.append(state)
        return states

    def take_forced(self, vocabulary_size: int) -> list[int]:
        """Go on to where there is a choice; the ids on the way, each the only one allowed there.

        One by one, so that it makes no difference where a sequence stood when it was asked.
        """
        forced: list[int] = []
        while len(forced) < _MOST_FORCED and not self.terminated:
            ahead = self.inner.compute_ff_tokens()
            if not ahead or ahead[0] >= vocabulary_size or ahead[0] in self.end_ids:
                break
            if self._steering is not None and self._steering.after(ahead[0]) is None:
                break
            if not self.inner.consume_token(ahead[0]):
                break  # the mask tells what is wrong
            self._steer(ahead[0])
            forced.append(ahead[0])
        return forced

    def allowed(self, mask: int) -> int:
        """The tokens of the grammar's mask that repeat nothing, as bits."""
        return mask if self._steering is None else mask & ~self._steering.forbidden(mask)

    def _steer(self, token: int) -> bool:
        """Go on behind a token; false where it repeats something."""
        if self._steering is not None:
            following = self._steering.after(token)
            if following is None:
                return False
            self._steering = following
        return True

    def _split(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The ids before the first end id, and the rest."""
        for position, token in enumerate(ids):
            if token in self.end_ids:
                return list(ids[:position]), list(ids[position:])
        return list(ids), []
