"""The state of one sequence in its grammar."""

import time
from collections.abc import Sequence

from llguidance import LLMatcher

from services.grammar.matching.initial_state import OutputState
from services.grammar.matching.prototype import reason_of

__all__ = ["Matcher", "RefusedTokenError"]

_MAX_FORCED = 64  # ids at once; a grammar can force an endless sequence
_MAX_COMPUTED = 16_384  # ids; after each forced id, the library computes all that follow anew
_ALLOWANCE, _ALLOWANCE_PER_MASK = 0.25, 0.005  # CPU seconds


class RefusedTokenError(Exception):
    """The grammar does not allow an accepted token."""


class _Cost:
    """CPU seconds and number of the masks of a matcher and all its forks."""

    def __init__(self) -> None:
        self.masks = 0
        self.seconds = 0.0


class Matcher:
    """A matcher of one sequence.

    The grammar does not contain end-of-sequence ids. They are allowed wherever it may end, and
    accepted ones are only counted.
    """

    __slots__ = ("_cost", "_ended", "_json", "end_ids", "inner")

    def __init__(
        self,
        inner: LLMatcher,
        end_ids: tuple[int, ...],
        json: OutputState | None = None,
        cost: _Cost | None = None,
    ) -> None:
        """json: state before the first token; None = the grammar alone is enough."""
        self.inner = inner
        self.end_ids = end_ids
        self._json = json
        self._cost = cost or _Cost()
        self._ended = 0  # accepted end ids

    @property
    def terminated(self) -> bool:
        """True if only the end may follow. Valid once the mask has been computed."""
        return self._ended > 0 or bool(self.inner.is_stopped())

    @property
    def is_too_slow(self) -> bool:
        """True if the masks took more CPU time than other matchers of the batch can wait for."""
        return self._cost.seconds > _ALLOWANCE + _ALLOWANCE_PER_MASK * self._cost.masks

    def charge(self, seconds: float) -> None:
        """Add the CPU seconds of a mask to the matcher's cost."""
        self._cost.masks += 1
        self._cost.seconds += seconds

    @property
    def may_end(self) -> bool:
        """True if an end id is allowed next."""
        return self.terminated or bool(self.inner.is_accepting())

    def accept(self, ids: Sequence[int], vocabulary_size: int) -> None:
        """Accept tokens; raise RefusedTokenError for the first that is not allowed."""
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
            if not self._advance(token):
                raise RefusedTokenError(f"Token {position}, id {token}, repeats a key or an item.")
        if ends and not self.may_end:
            raise RefusedTokenError(f"Token {taken}, id {ends[0]}, ends an unfinished sequence.")
        if any(token not in self.end_ids for token in ends):
            raise RefusedTokenError("A token follows the end of the sequence.")
        self._ended += len(ends)

    def fork(self) -> "Matcher":
        """Return an independent matcher in the same state."""
        copy = Matcher(self.inner.deep_copy(), self.end_ids, self._json, self._cost)
        copy._ended = self._ended
        return copy

    def walk(self, ids: Sequence[int], vocabulary_size: int) -> list["Matcher"]:
        """Return matchers in the states after each guessed id, until one does not fit."""
        states: list[Matcher] = []
        state = self
        for token in self._split(ids)[0]:
            state = state.fork()
            if token >= vocabulary_size or not state.inner.consume_token(token):
                break
            if not state._advance(token):
                break
            states.append(state)
        return states

    def take_forced(self, vocabulary_size: int) -> list[int]:
        """Accept ids as long as only one is allowed; return them.

        They are taken one by one, so that they don't depend on the state in which the call comes.
        Where very long text is forced, this takes few of them: the masks force the others.
        """
        forced: list[int] = []
        computed = 0
        while len(forced) < _MAX_FORCED and computed < _MAX_COMPUTED and not self.terminated:
            started = time.thread_time()
            following = self.inner.compute_ff_tokens()
            if (seconds := time.thread_time() - started) > _ALLOWANCE_PER_MASK:
                self.charge(seconds)
            if not following:
                break
            computed += len(following)
            token = following[0]
            if token >= vocabulary_size or token in self.end_ids:
                break
            state = None if self._json is None else self._json.after(token)
            if self._json is not None and state is None:
                break
            if not self.inner.consume_token(token):
                break  # computing the mask reports the error
            self._json = state
            forced.append(token)
        return forced

    def allowed(self, mask: int) -> int:
        """Return the grammar's mask without the tokens that the state of JSON leaves out."""
        return mask if self._json is None else self._json.narrowed(mask, self.inner)

    def _advance(self, token: int) -> bool:
        """Advance the state of JSON by a token; return False if the token repeats something."""
        if self._json is not None:
            following = self._json.after(token)
            if following is None:
                return False
            self._json = following
        return True

    def _split(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the ids before the first end id, and the rest."""
        for position, token in enumerate(ids):
            if token in self.end_ids:
                return list(ids[:position]), list(ids[position:])
        return list(ids), []
