"""One choice of a completion: text and token columns from generated ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile

import grpc

from services.tokenizer.completion.columns import Columns, Score, read_scores
from services.tokenizer.completion.echo import Echo
from services.tokenizer.completion.plan import ChoicePlan
from services.tokenizer.completion.stops import StopMatcher, StopStringMatch
from services.tokenizer.text.detokenizer import Detokenizer
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["Choice", "ChoiceOutput", "Outcome", "SkippedOutput"]

_LARGE_COLUMNS = 1_000  # scored tokens, whose columns take megabytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a choice."""

    reason: "types_pb2.FinishReason.ValueType"
    match: types_pb2.StopMatch | None
    completion_tokens: int

    def write(self, index: int, finished: completion_pb2.ChoiceFinished) -> None:
        """Put the end of the choice with this index into an event."""
        finished.index = index
        finished.reason = self.reason
        finished.completion_tokens = self.completion_tokens
        if self.match is not None:
            finished.match.CopyFrom(self.match)


@dataclass(frozen=True, slots=True)
class SkippedOutput:
    """Output that the client of a resumed choice has received before."""

    text: str
    columns: Columns


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """Output of one choice since the last output: an echo, then new tokens, then the end."""

    index: int
    skipped: "SkippedOutput"
    echo: Echo | None
    position: int
    """Number of the choice's tokens before those of `columns`"""
    text: str
    columns: Columns
    suffix: str
    """Text to append behind the last token"""
    outcome: Outcome | None

    @property
    def has_tokens(self) -> bool:
        """True if there are new tokens or text."""
        return bool(self.columns.ids or self.text)

    @property
    def is_large(self) -> bool:
        """True if a response may take megabytes: it has a prompt, or many scored tokens."""
        return self.echo is not None or (
            bool(self.columns.scores) and len(self.columns.ids) > _LARGE_COLUMNS
        )


@dataclass(slots=True)
class _HeldToken:
    """A token whose text is held back in part, or not yet known in full."""

    token: int
    start: int
    score: Score | None
    candidate_texts: Sequence[str]
    name: str | None
    """Text of a special token that the choice's text leaves out; None = any other token"""
    text: str = ""


class Choice:
    """State of one choice, which decodes ids, matches stop strings, and gathers output."""

    def __init__(
        self, index: int, plan: ChoicePlan, detokenizer: Detokenizer, echo_length: int | None
    ) -> None:
        """echo_length: length of the prompt's text in code points; None = no echo.

        With an echo, there is no output before `put_echo`.
        """
        self.index = index
        self.outcome: Outcome | None = None
        self.received: list[int] = []
        """Generated ids, up to the id that completed a stop string"""
        self.sent = 0
        """Number of tokens that were taken, or received before the choice was resumed"""
        self._plan = plan
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(plan.stops) if plan.stops is not None else None
        self._tracked = plan.scored or plan.stops is not None
        self._echo: Echo | None = None
        self._awaits_echo = self._has_echo = echo_length is not None
        self._base = echo_length or 0  # code points before the generated text
        self._ends_prompt = False  # True if no token completes the prompt's last character
        self._logprobs: list[float] = []  # logprobs of all received tokens, for best_of
        self._text = ""  # text that is ready to be taken
        self._columns = Columns()
        self._skip: Sequence[int] = ()  # tokens at the start that the client has received
        self._skipped_text = ""
        self._skipped_columns = Columns()
        # tokens that are held back; their offsets are in code points of the generated text
        self._held: list[_HeldToken] = []
        self._released = 0  # number of tokens that were held and released
        self._unsettled = 0  # tokens at the end of _held that may still get text
        self._decoded = 0
        self._is_end_taken = False

    @property
    def has_output(self) -> bool:
        """True if `take` returns anything."""
        if self._awaits_echo or self._is_end_taken:
            return False
        if self._echo is not None and self._detokenizer.is_inherited:
            return False  # the echo's last character is not known yet
        return bool(self._columns.ids or self._text or self._echo or self.outcome)

    @property
    def completion_tokens(self) -> int:
        """Number of generated tokens, for the usage."""
        return self.outcome.completion_tokens if self.outcome else len(self.received)

    @property
    def awaits_echo(self) -> bool:
        """True before `put_echo`, if there is an echo that the client has not received."""
        return self._awaits_echo

    @property
    def is_taken(self) -> bool:
        """True if the end was taken, or received before the choice was resumed."""
        return self._is_end_taken

    @property
    def kept_logprobs(self) -> Sequence[float]:
        """Logprobs of the tokens that a stop string has not cut, once the choice has ended."""
        return self._logprobs[: self.sent + len(self._columns.ids)]

    def put_echo(self, echo: Echo) -> None:
        """Set the echo, which comes before all other output, unless the client has received it."""
        if self._awaits_echo:
            self._echo = echo
            self._awaits_echo = False

    def skip(self, ids: Sequence[int]) -> None:
        """Put the echo and the first tokens, `ids`, into the `skipped` part of the output.

        The client has received them before its stream was lost. Call it before any token is added.
        """
        self._skip = ids
        self.sent = len(ids)
        self._awaits_echo = False

    def skip_all(self, completion_tokens: int) -> None:
        """End the choice without output: the client has received all of it."""
        reason = types_pb2.FINISH_REASON_UNSPECIFIED  # the client has received the end
        self.outcome = Outcome(reason, None, completion_tokens)
        self._awaits_echo = False
        self._is_end_taken = True

    def replay(self) -> None:
        """Add the skipped tokens without scores, to restore the state behind them."""
        self._feed(self._skip, None)

    def add(self, position: int, tokens: types_pb2.TokenColumns) -> None:
        """Add generated tokens, the first of which is number `position` of the choice.

        Tokens that were received before are skipped, and so are those behind a stop string.
        Raises INTERNAL if tokens are missing in between, INVALID_ARGUMENT if they differ from those
        to skip.
        """
        if self.outcome is not None:
            return
        known = len(self.received) - position
        if known < 0:
            raise ServiceError(
                grpc.StatusCode.INTERNAL, "TOKENS_LOST", "Tokens from the engine were lost."
            )
        ids: Sequence[int] = tokens.ids[known:] if known else tokens.ids
        if known:
            self._require_equal(tokens.ids, self.received[position:])
        if len(self.received) < len(self._skip):
            self._require_equal(ids, self._skip[len(self.received) :])
        if self._plan.ranked:
            self._logprobs.extend(tokens.logprobs[known:])
        self._feed(ids, read_scores(tokens)[known:] if self._plan.scored else None)

    def _require_equal(self, ids: Sequence[int], expected: Sequence[int]) -> None:
        """Raise INVALID_ARGUMENT if the engine generates other ids than it did before."""
        if any(token != before for token, before in zip(ids, expected, strict=False)):
            message = (
                f"Choice {self.index} can't be resumed: the model does not generate these ids with "
                "this seed, or rounding changed a draw. Repeat the whole request."
            )
            raise invalid("resume.choices", message, reason="OTHER_TOKENS")

    def _feed(self, ids: Sequence[int], scores: Sequence[Score] | None) -> None:
        if self._tracked:
            self._add_tracked(ids, scores)
            return
        if (left := len(self._skip) - len(self.received)) > 0:
            self._skipped_text += self._decode(ids[:left])
            ids = ids[left:]
        self._text += self._decode(ids)
        self._columns.ids.extend(ids)

    def _decode(self, ids: Sequence[int]) -> str:
        end_ids, feed, text = self._plan.end_ids, self._detokenizer.feed, ""
        for token in ids:
            if token not in end_ids:
                text += feed(token)
        self.received.extend(ids)
        return text

    def end(
        self, reason: "types_pb2.FinishReason.ValueType", match: types_pb2.StopMatch | None
    ) -> None:
        """End the choice, unless a stop string ended it before."""
        if self.outcome is not None:
            return
        if not self._tracked:
            self._text += self._rest()
        elif not self._flush():
            self._release(self._decoded)
        if self.outcome is None:
            self.outcome = Outcome(reason, match, len(self.received))

    def take(self) -> ChoiceOutput:
        """Return the output that is ready, and remove it. `has_output` must be true."""
        echo, self._echo = self._echo, None
        if echo is not None and self._ends_prompt:
            echo = echo.ended or echo
        skipped = SkippedOutput(self._skipped_text, self._skipped_columns)
        if skipped.text or skipped.columns.ids:
            self._skipped_text, self._skipped_columns = "", Columns()
        text, self._text = self._text, ""
        columns, self._columns = self._columns, Columns()
        position, self.sent = self.sent, self.sent + len(columns.ids)
        self._is_end_taken = self.outcome is not None
        suffix = self._plan.suffix if self._is_end_taken else ""
        return ChoiceOutput(
            self.index, skipped, echo, position, text, columns, suffix, self.outcome
        )

    def _add_tracked(self, ids: Sequence[int], scores: Sequence[Score] | None) -> None:
        detokenizer = self._detokenizer
        for place, token in enumerate(ids):
            ends = token in self._plan.end_ids
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
        """Decode the held bytes. Returns whether they complete a stop string."""
        rest = self._rest()
        unsettled = self._held[len(self._held) - self._unsettled :]
        self._unsettled = 0
        if not rest:
            return False
        is_silent = self._detokenizer.is_silent
        first, *others = dropwhile(lambda held: is_silent(held.token), unsettled)
        for held in others:
            held.start += len(rest)
        return self._grow(first, rest)

    def _rest(self) -> str:
        """Return the text that an unfinished character at the end adds to the generated text.

        If all its bytes come from the prompt, it belongs to the echo, if there is an echo.
        """
        is_prompts = self._detokenizer.is_inherited
        rest = self._detokenizer.flush()
        if not is_prompts:
            return rest
        if self._has_echo:
            self._ends_prompt = True
            self._base += len(rest)
        return ""

    def _grow(self, held: _HeldToken, text: str) -> bool:
        """Add text to a held token. Returns whether the text completes a stop string."""
        held.text += text
        self._decoded += len(text)
        if self._matcher is None:
            return False
        match = self._matcher.feed(text, len(self.received) >= self._plan.min_tokens)
        if match is None:
            return False
        self._stop_at(match)
        return True

    def _stop_at(self, match: StopStringMatch) -> None:
        """Cut text and tokens at a stop string, and end the choice.

        Tokens that start before the cut stay, the last one clipped. Tokens without bytes that
        stand directly before the cut stay too.
        """
        cut = match.end if self._plan.include_stop else match.start
        is_silent = self._detokenizer.is_silent
        # end at the first token that is cut: a later token without bytes would leave a gap
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
        stop_match = types_pb2.StopMatch(stop_string=match.string)
        self.outcome = Outcome(types_pb2.FINISH_REASON_STOP, stop_match, len(self.received))

    def _begins_held_text(self, held: _HeldToken, limit: int) -> bool:
        """Return whether the token's bytes belong to text that is held from `limit` on."""
        if not held.start == limit < self._decoded:
            return False
        return not self._detokenizer.is_silent(held.token)

    def _release(self, limit: int) -> None:
        """Make the tokens ready that end at `limit` or before, with their text."""
        count = 0
        for held in self._held[: len(self._held) - self._unsettled]:
            if held.start + len(held.text) > limit or self._begins_held_text(held, limit):
                break
            count += 1
        ready, self._held = self._held[:count], self._held[count:]
        for held in ready:
            is_skipped = self._released < len(self._skip)
            self._released += 1
            if is_skipped:
                self._skipped_text += held.text
            else:
                self._text += held.text
            columns = self._skipped_columns if is_skipped else self._columns
            if held.score is None:
                columns.ids.append(held.token)
                continue
            offset = self._base + held.start
            shown = held.text if held.name is None else held.name
            columns.append(held.token, shown, offset, held.score, held.candidate_texts)
