"""One choice: generated ids in, deltas of text out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile

import grpc

from services.tokenizer.completion.columns import Columns, Score, read_scores
from services.tokenizer.completion.echo import Echo
from services.tokenizer.completion.plan import ChoicePlan
from services.tokenizer.completion.stops import StopMatcher, StopStringMatch
from services.tokenizer.text.detokenizer import Detokenizer
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["Choice", "Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a choice ended."""

    reason: "types_pb2.FinishReason.ValueType"
    match: types_pb2.StopMatch | None


class _HeldToken:
    """A token some of whose text is held, or whose text is not known in full."""

    __slots__ = ("candidate_texts", "name", "score", "start", "text", "token")

    def __init__(
        self,
        token: int,
        start: int,
        score: Score | None,
        candidate_texts: Sequence[str],
        name: str | None,
    ) -> None:
        """`name` is its own text, where the choice's text leaves it out."""
        self.token = token
        self.text = ""
        self.start = start
        self.score = score
        self.candidate_texts = candidate_texts
        self.name = name


class Choice:
    """Decodes, matches stop strings, and gathers what may be sent until `write` takes it."""

    def __init__(
        self, index: int, plan: ChoicePlan, detokenizer: Detokenizer, echo_length: int | None
    ) -> None:
        """`echo_length` is that of the prompt's text, in code points, where an echo will be put;
        nothing is ready before."""
        self.index = index
        self.outcome: Outcome | None = None
        self.received: list[int] = []
        """The ids so far, through the one that completed a stop string."""
        self.sent = 0
        """How many of them were written."""
        self._plan = plan
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(plan.stops) if plan.stops is not None else None
        self._tracked = plan.scored or plan.stops is not None
        self._echo: Echo | None = None
        self._awaits_echo = self._has_echo = echo_length is not None
        self._base = echo_length or 0  # code points in front of the generated text
        self._ends_prompt = False  # no token goes on with the prompt's last character
        self._logprobs: list[float] = []  # of all that was received, for best_of
        self._text = ""  # ready to be sent, as are the columns
        self._columns = Columns()
        # held back, when tokens are tracked; offsets in code points of the generated text
        self._held: list[_HeldToken] = []
        self._unsettled = 0  # how many at the end of _held may still get text
        self._held_text = ""
        self._decoded = 0
        self._finish_written = False

    @property
    def is_large(self) -> bool:
        """Whether `write` may write megabytes: a prompt, or many scores at once."""
        return self._echo is not None or (self._plan.scored and len(self._columns.ids) > 1_000)

    @property
    def has_output(self) -> bool:
        """Whether `write` has something to write."""
        if self._awaits_echo or self._finish_written:
            return False
        if self._echo is not None and self._detokenizer.is_inherited:
            return False  # how the echo ends is not known
        return bool(self._columns.ids or self._text or self._echo or self.outcome)

    @property
    def kept_logprobs(self) -> Sequence[float]:
        """Of the tokens that the answer keeps, with best_of, once the choice has ended."""
        return self._logprobs[: self.sent + len(self._columns.ids)]

    def put_echo(self, echo: Echo) -> None:
        """The prompt, which is written first."""
        self._echo = echo
        self._awaits_echo = False

    def add(self, position: int, tokens: types_pb2.TokenColumns) -> None:
        """Generated tokens. What was received before is skipped, and so is what follows a stop
        string. Raises INTERNAL when tokens are missing in between."""
        if self.outcome is not None:
            return
        skip = len(self.received) - position
        if skip < 0:
            raise ServiceError(
                grpc.StatusCode.INTERNAL, "TOKENS_LOST", "Tokens of the engine were lost."
            )
        ids: Sequence[int] = tokens.ids[skip:] if skip else tokens.ids
        if self._plan.ranked:
            self._logprobs.extend(tokens.logprobs[skip:])
        if self._tracked:
            scores = read_scores(tokens)[skip:] if self._plan.scored else None
            self._add_tracked(ids, scores)
            return
        enders, feed, text = self._plan.enders, self._detokenizer.feed, ""
        for token in ids:
            if token not in enders:
                text += feed(token)
        self.received.extend(ids)
        self._columns.ids.extend(ids)
        self._text += text

    def end(
        self, reason: "types_pb2.FinishReason.ValueType", match: types_pb2.StopMatch | None
    ) -> None:
        """The engine ended the sequence."""
        if self.outcome is not None:
            return
        if not self._tracked:
            self._text += self._rest()
        elif not self._flush():
            self._release(self._decoded)
        if self.outcome is None:
            self.outcome = Outcome(reason, match)

    def write(self, add: Callable[[], completion_pb2.CompleteResponse]) -> None:
        """Write what is ready as events."""
        if self._echo is not None:
            ended = self._echo.ended if self._ends_prompt else None
            self._write_echo(add().delta, ended or self._echo)
            self._echo = None
        ids = self._columns.ids
        if ids or self._text:
            delta = add().delta
            delta.index = self.index
            delta.text = self._text
            delta.position = self.sent
            if self._plan.scored:
                self._columns.write(delta)
                self._columns = Columns()
                self.sent += len(ids)
            elif ids:
                delta.tokens.ids.extend(ids)
                self.sent += len(ids)
                ids.clear()
            self._text = ""
        if self.outcome is not None and not self._finish_written:
            self._write_end(add, self.outcome)

    def _write_echo(self, delta: completion_pb2.ChoiceDelta, echo: Echo) -> None:
        delta.index = self.index
        delta.text = echo.text
        delta.is_prompt = True
        echo.columns.write(delta)

    def _write_end(
        self, add: Callable[[], completion_pb2.CompleteResponse], outcome: Outcome
    ) -> None:
        if self._plan.suffix:
            delta = add().delta
            delta.index = self.index
            delta.text = self._plan.suffix
            delta.position = self.sent
        finished = add().finished
        finished.index = self.index
        finished.reason = outcome.reason
        finished.completion_tokens = len(self.received)
        if outcome.match is not None:
            finished.match.CopyFrom(outcome.match)
        self._finish_written = True

    def _add_tracked(self, ids: Sequence[int], scores: Sequence[Score] | None) -> None:
        detokenizer = self._detokenizer
        for place, token in enumerate(ids):
            ends = token in self._plan.enders
            if ends and self._flush():
                return
            score, name = None, None
            candidates: Sequence[str] = ()
            if scores is not None:
                score = scores[place]
                candidates = score.candidate_texts(detokenizer)
                if ends or detokenizer.leaves_out(token):
                    name = detokenizer.peek(token)
            text = "" if ends else detokenizer.feed(token)
            self.received.append(token)
            self._held.append(_HeldToken(token, self._decoded, score, candidates, name))
            if not detokenizer.holds_back:
                self._unsettled = 0
            elif text:
                self._unsettled = 1
            else:
                self._unsettled += 1
            if text and self._grow(self._held[-1], text):
                return
            self._release(self._decoded - (self._matcher.held if self._matcher is not None else 0))

    def _flush(self) -> bool:
        """Decode what the detokenizer holds back; whether that completed a stop string."""
        rest = self._rest()
        unsettled = self._held[len(self._held) - self._unsettled :]
        self._unsettled = 0
        if not rest:
            return False
        is_silent = self._detokenizer.is_silent
        began, *others = dropwhile(lambda held: is_silent(held.token), unsettled)
        for held in others:
            held.start += len(rest)
        return self._grow(began, rest)

    def _rest(self) -> str:
        """What the unfinished character at the end adds to the generated text. One that only the
        prompt began is the echo's, if there is any."""
        is_prompts = self._detokenizer.is_inherited
        rest = self._detokenizer.flush()
        if not is_prompts:
            return rest
        if self._has_echo:
            self._ends_prompt = True
            self._base += len(rest)
        return ""

    def _grow(self, held: _HeldToken, text: str) -> bool:
        """The token adds text; whether that completed a stop string."""
        held.text += text
        self._held_text += text
        self._decoded += len(text)
        if self._matcher is None:
            return False
        match = self._matcher.feed(text, len(self.received) >= self._plan.min_tokens)
        if match is None:
            return False
        self._stop_at(match)
        return True

    def _stop_at(self, match: StopStringMatch) -> None:
        """Cut text and tokens: those that start before the cut stay, the last one clipped, and so
        do those just before it that add no bytes at all."""
        cut = match.end if self._plan.include_stop else match.start
        self._held_text = self._held_text[: len(self._held_text) - (self._decoded - cut)]
        is_silent = self._detokenizer.is_silent
        # up to the first that goes: one without bytes behind it would leave a gap
        self._held = list(
            takewhile(
                lambda held: held.start < cut or (held.start == cut and is_silent(held.token)),
                self._held,
            )
        )
        for held in self._held:
            held.text = held.text[: cut - held.start]
        self._decoded, self._unsettled = cut, 0
        self._release(cut)
        self.outcome = Outcome(
            types_pb2.FINISH_REASON_STOP, types_pb2.StopMatch(stop_string=match.string)
        )

    def _begins_held_text(self, held: _HeldToken, limit: int) -> bool:
        """Whether the token's bytes are text of a later one that is held from `limit` on."""
        if not held.start == limit < self._decoded:
            return False
        return not self._detokenizer.is_silent(held.token)

    def _release(self, limit: int) -> None:
        """Make ready what ends at `limit` or before: whole tokens and, without scores, the text up
        to there."""
        count = 0
        for held in self._held[: len(self._held) - self._unsettled]:
            if held.start + len(held.text) > limit or self._begins_held_text(held, limit):
                break
            count += 1
        ready, self._held = self._held[:count], self._held[count:]
        if not self._plan.scored:
            self._columns.ids.extend([held.token for held in ready])
            size = len(self._held_text) - (self._decoded - limit)
            self._text += self._held_text[:size]
            self._held_text = self._held_text[size:]
            return
        for held in ready:
            if held.score is not None:
                offset = self._base + held.start
                shown = held.text if held.name is None else held.name
                self._columns.append(held.token, shown, offset, held.score, held.candidate_texts)
            self._text += held.text
            self._held_text = self._held_text[len(held.text) :]
