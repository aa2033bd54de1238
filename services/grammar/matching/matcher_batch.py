"""The matchers of one Masks stream."""

from collections.abc import Mapping, Sequence

import grpc
from llguidance import LLExecutor

from services.common.bounds import check_bounds, most
from services.grammar.matching.cache import CompiledGrammar
from services.grammar.matching.mask_filler import MaskFiller
from services.grammar.matching.mask_slots import MaskSlots
from services.grammar.matching.matcher import Matcher, RefusedTokenError
from services.grammar.matching.prototype import reason_of
from services.grammar.matching.token_index import ids_of
from services.grammar.matching.vocabulary import Vocabulary
from services.grammar.metrics import MASKS
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["MatcherBatch"]

_FEW = 16  # ids; up to this number, a mask is sent as a list
_MAX_PATH = most(grammar_pb2.MatcherPath, "ids")
_ALLOWED, _UNCONSTRAINED, _HELD, _BITMASK = (
    MASKS.labels(form) for form in ("allowed", "unconstrained", "held", "bitmask")
)


class MatcherBatch:
    """All matchers of one engine, which each step advances together."""

    def __init__(
        self,
        configuration: grammar_pb2.MasksConfiguration,
        vocabulary: Vocabulary,
        executor: LLExecutor,
    ) -> None:
        check_bounds(configuration, "configuration")
        width = configuration.vocabulary_size
        self._width = width
        self._known = min(width, vocabulary.size)
        self._every_id = (1 << width) - 1
        self._slots = MaskSlots(configuration.mask_slots)
        self._filler = MaskFiller(vocabulary, executor, width)
        self._matchers: dict[int, Matcher] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def step(
        self,
        commands: Sequence[grammar_pb2.MatcherCommand],
        grammars: Mapping[str, CompiledGrammar],
    ) -> list[grammar_pb2.MatcherState]:
        """Execute the commands, and return the states of the matchers that they touched.

        `grammars`: the cached grammars that the commands name, by id.
        """
        touched: dict[int, ServiceError | None] = {}  # in order of first touch
        for command in commands:
            self._execute(command, grammars, touched)
        paths = {c.matcher: c.path.ids for c in commands if c.HasField("path")}
        forced: dict[int, list[int]] = {}
        lanes: dict[int, list[Matcher]] = {}  # each matcher, then its states along the path
        for number, error in touched.items():
            if error is None:
                matcher = self._matchers[number]
                forced[number] = matcher.take_forced(self._known)
                guesses = _after(forced[number], paths.get(number, ()))
                lanes[number] = [matcher, *matcher.walk(guesses, self._known)]
        masks = iter(self._filler.fill([matcher for lane in lanes.values() for matcher in lane]))
        return [
            self._failed(number, error)
            if error
            else self._state(
                number, forced[number], [(matcher, next(masks)) for matcher in lanes[number]]
            )
            for number, error in touched.items()
        ]

    def _execute(
        self,
        command: grammar_pb2.MatcherCommand,
        grammars: Mapping[str, CompiledGrammar],
        touched: dict[int, ServiceError | None],
    ) -> None:
        number = command.matcher
        if command.WhichOneof("command") == "close":
            self._matchers.pop(number, None)
            touched.pop(number, None)
            return
        if touched.get(number) is not None:
            return  # an earlier command of this step broke it
        try:
            match command.WhichOneof("command"):
                case "open":
                    self._open(number, command.open, grammars)
                case "accept":
                    self._get(number).accept(command.accept.ids, self._known)
                case "path":
                    self._get(number)
                    if len(command.path.ids) > _MAX_PATH:
                        message = f"A path has at most {_MAX_PATH} ids."
                        raise invalid("commands.path.ids", message)
                case _:
                    raise invalid(
                        "commands.command", "A command must be one of those in MatcherCommand."
                    )
            touched.setdefault(number, None)
        except RefusedTokenError as refused:
            touched[number] = invalid("commands", str(refused), reason="TOKEN_REFUSED")
        except ServiceError as error:
            touched[number] = error
        if touched.get(number) is not None:
            self._matchers.pop(number, None)

    def _open(
        self,
        number: int,
        command: grammar_pb2.MatcherOpen,
        grammars: Mapping[str, CompiledGrammar],
    ) -> None:
        compiled = grammars.get(command.grammar_id)
        if compiled is None:
            raise ServiceError(
                grpc.StatusCode.NOT_FOUND,
                "GRAMMAR_NOT_FOUND",
                "The grammar is not cached; compile it again.",
                field="commands.open.grammar_id",
            )
        ends = tuple(command.eos_token_ids)
        matcher = Matcher(compiled.prototype.deep_copy(), ends, compiled.json)
        if number in self._matchers:
            raise invalid("commands.matcher", f"Matcher {number} is open already.")
        self._matchers[number] = matcher
        matcher.accept(command.generated, self._known)

    def _get(self, number: int) -> Matcher:
        matcher = self._matchers.get(number)
        if matcher is None:
            raise ServiceError(
                grpc.StatusCode.NOT_FOUND,
                "MATCHER_NOT_FOUND",
                f"Matcher {number} is not open.",
                field="commands.matcher",
            )
        return matcher

    def _failed(self, number: int, error: ServiceError) -> grammar_pb2.MatcherState:
        self._matchers.pop(number, None)
        return grammar_pb2.MatcherState(matcher=number, error=error.to_status())

    def _state(
        self, number: int, forced: list[int], lane: Sequence[tuple[Matcher, int]]
    ) -> grammar_pb2.MatcherState:
        (matcher, mask), *path = lane
        if matcher.inner.is_error():
            return self._failed(number, _exhausted(reason_of(matcher.inner)))
        if matcher.is_too_slow:
            message = "The grammar is too expensive to match; make it simpler."
            return self._failed(number, invalid("grammar", message, reason="TOO_EXPENSIVE"))
        terminated = matcher.terminated
        if not mask and not terminated:
            return self._failed(number, _exhausted("no id of the vocabulary continues the text"))
        state = grammar_pb2.MatcherState(matcher=number, terminated=terminated, forced=forced)
        self._put_mask(state, mask)
        for guessed, mask in path:
            if guessed.terminated or guessed.inner.is_error() or not mask:
                break
            self._put_mask(state.ahead.add(), mask)
        return state

    def _put_mask(self, state: grammar_pb2.MatcherState, mask: int) -> None:
        """Set the mask of a state in its shortest form."""
        if mask.bit_count() <= _FEW:
            state.allowed.CopyFrom(types_pb2.TokenIds(ids=ids_of(mask)))
            _ALLOWED.inc()
        elif mask == self._every_id:
            state.unconstrained = True
            _UNCONSTRAINED.inc()
        else:
            bits = mask.to_bytes((self._width + 7) // 8, "little")
            slot, held = self._slots.place(bits)
            if slot is not None and held:
                state.held_slot = slot
                _HELD.inc()
                return
            state.bitmask = bits
            if slot is not None:
                state.store_slot = slot
            _BITMASK.inc()


def _after(forced: Sequence[int], path: Sequence[int]) -> Sequence[int]:
    """Return the rest of a path after the forced ids; empty if the path differs from them."""
    return path[len(forced) :] if list(path[: len(forced)]) == forced else ()


def _exhausted(reason: str) -> ServiceError:
    return invalid("grammar", f"The grammar can't be followed here: {reason}.", reason="DEAD_END")
