"""Policy of a draft model: for which sequences it makes draft tokens, and how many.

Draft tokens of a model cost time before any is accepted. So they are made where they are expected
to save time, by measured times and by the share that was accepted lately. An account bounds the
damage of wrong estimates: it holds the seconds that drafts have saved so far, and drafts are made
only as long as it can pay for them. Where drafts save nothing, a small share of the time of all
steps pays for a trial now and then.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.draft_lengths import DraftLengths, MadeDraft, MadeLengths
from services.engine.scheduling.draft_pages import DraftPages, HeadPages
from services.engine.scheduling.draft_plan import DraftLimits, DraftPart, DraftResult
from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.speculation import Acceptance, Draft, DraftKind
from services.engine.scheduling.step_cost import StepTimes

__all__ = ["ModelDrafts"]

_MOST_MADE = 8
"""Most draft tokens of a sequence, because each takes a pass of the draft model"""
_MOST_LAG = 16
"""Most tokens that the draft model computes in the pass that makes the first draft token"""
_FIRST_CHUNK = 32
"""Tokens of a prompt that it computes at once before the time of such a pass is known, and least"""
_WORTH_TOKENS = 128
"""Tokens of an answer over which the draft model's time for the prompt has to pay off"""
_COMMON_MEMORY = 0.97
"""Weight of earlier drafts of all sequences against the newest: some thirty are remembered"""
_MOST_STEPS = 64
"""Steps without drafts whose time an account holds at most; that of drafts holds it at first"""
_ALLOWANCE = 0.01
"""Share of the time of all steps that trials may take"""
_TRIAL_STEPS, _TRIAL_LENGTH, _TRIAL_RATE = 64, 4, 0.8
"""Steps without drafts before a trial, the number of its draft tokens, and the acceptance that must
be worth its time"""
_NEAR = 4
"""Most size classes between a pass and a measured one that stands for it"""
_REST = 4
"""Steps between two decisions as long as no draft is worth its time: a decision takes time, too"""


class ModelDrafts:
    """Drafts of a draft model: their plan, their acceptance and their costs."""

    def __init__(self, limits: DraftLimits, lengths: DraftLengths, caches: CachePools) -> None:
        self._limits = limits
        self._lengths = lengths
        self._caches = caches
        self._heads = HeadPages(caches.block_size)
        is_head = limits.kind is not DraftKind.MODEL
        self._pages = self._heads if is_head else DraftPages(caches.block_size)
        self._passes = StepTimes()
        self._token_seconds = 0.0
        """Seconds of a token of the longest pass so far; 0 = no pass of a prompt was measured"""
        self._longest = 0
        self._common = Acceptance(_COMMON_MEMORY)
        self._balance: float | None = None
        """Seconds that drafts may take; None = no step was measured"""
        self._trial_balance = 0.0
        """Seconds that trials may take"""
        self._spent = 0.0
        """Seconds of the draft model's passes since the last step"""
        self._drafted = self._accepted = 0
        """Draft tokens that the newest step has verified, and the accepted ones"""
        self._idle = 0
        """Number of steps since the last draft"""
        self._rest = 0
        """Number of decisions to skip"""
        self._trial: TokenSequence | None = None
        """Sequence whose next draft is a trial"""
        self._pays_trial = False
        """True if the newest passes are part of a trial"""

    @property
    def kind(self) -> DraftKind:
        """Source of these drafts."""
        return self._limits.kind

    def note_states(self, firsts: Mapping[TokenSequence, int]) -> None:
        """Do `HeadPages.note_states`."""
        self._heads.note_states(firsts)

    def leave(self, sequence: TokenSequence) -> None:
        """Note that a sequence gives its blocks back."""
        self._pages.leave(sequence)
        if self._trial is sequence:
            self._trial = None

    def rate(self, sequence: TokenSequence) -> float:
        """Return the probability with which a sequence's next draft token is accepted.

        A trial counts as good, so that its draft is computed.
        """
        if sequence is self._trial:
            return _TRIAL_RATE
        return self._estimate(sequence)

    def plan(
        self, streams: int, sequences: Sequence[TokenSequence], most: int
    ) -> Sequence[DraftPart]:
        """Return what the draft model is to compute before the next step. Allocates blocks.

        streams: sequences of the step. sequences: those that may have a draft. most: most tokens of
        each draft.
        """
        if not sequences or self._balance is None:
            return ()
        if self._rest and self._trial is None:
            self._rest -= 1
            return ()
        if self._caches.num_free <= len(sequences):
            return ()  # drafts would have sequences preempted
        able = filter(self._pages.can_continue, sequences)
        drafts = {each: self._draft(each, most) for each in able}
        if not drafts:
            return ()
        parts = self._parts(streams, drafts)
        self._pays_trial = not parts
        if not parts:
            parts = self._trial_parts(streams, drafts)
        if not parts:
            self._rest = _REST
        return [part for part in parts if self._has_room(part)]

    def take(self, parts: Sequence[DraftPart], result: DraftResult) -> None:
        """Take what the draft model has made of a plan."""
        for part, made in zip(parts, result.tokens, strict=True):
            self._pages.write(part.sequence, part.end, made[:-1])
            if made:
                draft = Draft(self.kind, made)
                part.sequence.speculation.made = part.sequence.length, draft
        for tokens, seconds in result.passes:
            known = self._passes.nearest(tokens, _NEAR)
            # other programs make single passes longer, which says nothing about drafts
            self._spent += seconds if known is None else min(seconds, 2 * known)
            self._passes.learn(tokens, seconds)
            if tokens >= self._longest:
                self._longest = tokens
                self._token_seconds = (self._passes.nearest(tokens) or 0.0) / tokens

    def learn(self, sequence: TokenSequence, drafted: int, accepted: int) -> None:
        """Take the outcome of a draft."""
        self._common.learn(drafted, accepted)
        self._drafted += drafted
        self._accepted += accepted
        self._idle = 0
        if sequence is self._trial:
            self._trial = None

    def settle(self, streams: int, rows: int, drafted: int, seconds: float) -> None:
        """Book a step.

        streams: sequences whose newest token it computed; rows: these tokens, with draft tokens;
        drafted: draft tokens of all sources.
        """
        self._idle += 1
        plain = self._lengths.plain_seconds(streams) if streams else None
        if plain is not None:
            most = _MOST_STEPS * plain
            balance = most if self._balance is None else self._balance
            saved = -self._spent
            if self._drafted:
                share = min(self._drafted / max(drafted, 1), 1.0)
                saved += self._accepted / streams * plain
                saved -= share * (self._lengths.slowdown(streams, rows) - 1) * plain
            if self._pays_trial:
                self._trial_balance += min(saved, 0.0)
                saved = max(saved, 0.0)
            self._balance = min(max(balance + saved, 0.0), most)
            self._trial_balance = min(self._trial_balance + _ALLOWANCE * seconds, most)
            self._pays_trial = self._trial is not None
            self._spent = 0.0
        self._drafted = self._accepted = 0

    def _draft(self, sequence: TokenSequence, most: int) -> MadeDraft:
        """Return the draft that a sequence may have once the draft model has reached its end."""
        room = min(most, _MOST_MADE, sequence.room)
        room = min(room, self._limits.context_length - sequence.length)
        return MadeDraft(self._estimate(sequence), max(room, 0), 2)

    def _estimate(self, sequence: TokenSequence) -> float:
        return sequence.speculation.model_rate(self.kind, self._common.rate())

    def _parts(self, streams: int, drafts: Mapping[TokenSequence, MadeDraft]) -> list[DraftPart]:
        """Return the parts that are expected to save time.

        The expectation is that of a step in which the draft model has reached the ends of all
        sequences but those whose prompts take it too long.
        """
        together = self._made(streams, drafts)
        if not any(together.lengths):
            return []
        lags = self._lags(drafts)
        each_saves = together.saved / sum(length > 0 for length in together.lengths)
        hopeful = {
            each: draft
            for each, draft in drafts.items()
            if lags[each] <= _MOST_LAG or self._repays(each, draft, lags[each], each_saves)
        }
        steady = together if len(hopeful) == len(drafts) else self._made(streams, hopeful)
        ready = {each: draft for each, draft in hopeful.items() if lags[each] <= _MOST_LAG}
        made = steady if len(ready) == len(hopeful) else self._made(streams, ready)
        parts = [
            self._part(each, each.length - lags[each], each.length, length)
            for each, length in zip(ready, made.lengths, strict=True)
            if length
        ][: self._limits.pass_tokens // (2 * _MOST_LAG)]
        late = {
            each: lags[each]
            for each, length in zip(hopeful, steady.lengths, strict=True)
            if length and each not in ready
        }
        if made.seconds > self._funds:
            return []
        return parts + self._chunks(streams, late, self._funds - made.seconds)

    def _made(self, streams: int, drafts: Mapping[TokenSequence, MadeDraft]) -> MadeLengths:
        return self._lengths.choose_made(streams, [*drafts.values()], self._pass_seconds)

    def _lags(self, sequences: Iterable[TokenSequence]) -> dict[TokenSequence, int]:
        """Return the number of tokens of each sequence that the draft model lacks."""
        return {each: each.length - self._pages.count_computed(each) for each in sequences}

    def _repays(self, sequence: TokenSequence, draft: MadeDraft, lag: int, saved: float) -> bool:
        """Return whether the answer may repay the time for the tokens that the draft model lacks.

        saved: seconds that a draft of the sequence saves in each step.
        """
        tokens = sum(draft.rate**depth for depth in range(draft.most + 1))
        steps = min(sequence.room, _WORTH_TOKENS) / tokens
        return steps * saved > lag * self._token_seconds

    def _chunks(
        self, streams: int, lags: Mapping[TokenSequence, int], seconds: float
    ) -> list[DraftPart]:
        """Return chunks of prompts that take about as long as a step.

        lags: number of tokens that the draft model lacks, more than it computes with a draft. Those
        that lack least come first. seconds: most seconds.
        """
        plain = self._lengths.plain_seconds(streams) or 0.0
        left = min(plain, seconds)
        count = self._limits.pass_tokens // 2
        if self._token_seconds:
            count = min(count, max(int(left / self._token_seconds), _FIRST_CHUNK))
        else:
            count = min(count, _FIRST_CHUNK)
        parts: list[DraftPart] = []
        for sequence, lag in sorted(lags.items(), key=lambda item: item[1]):
            if left <= 0 or count <= 0:
                break
            start = sequence.length - lag
            parts.append(self._part(sequence, start, start + min(count, lag - 1), 0))
            count -= parts[-1].count
        return parts

    def _trial_parts(
        self, streams: int, drafts: Mapping[TokenSequence, MadeDraft]
    ) -> list[DraftPart]:
        """Return a part of a trial, if one is due and could show that drafts save time."""
        if self._trial not in drafts:
            self._trial = self._choose_trial(streams, drafts)
        trial = self._trial
        if trial is None:
            return []
        [lag] = self._lags([trial]).values()
        if lag > _MOST_LAG:
            return self._chunks(streams, {trial: lag}, self._trial_balance)
        length = min(_TRIAL_LENGTH, drafts[trial].most)
        return [self._part(trial, trial.length - lag, trial.length, length)] if length else []

    def _choose_trial(
        self, streams: int, drafts: Mapping[TokenSequence, MadeDraft]
    ) -> TokenSequence | None:
        """Return the sequence of a trial; None = none is due, or none can be paid for."""
        if self._idle < _TRIAL_STEPS:
            return None
        good = {each: replace(draft, rate=_TRIAL_RATE) for each, draft in drafts.items()}
        if not any(self._made(streams, good).lengths):
            return None
        lags = self._lags(drafts)
        trial = min(lags, key=lambda each: lags[each])
        passes = (lags[trial] - 1) * self._token_seconds
        passes += _TRIAL_LENGTH * self._pass_seconds(1)
        return trial if passes <= self._trial_balance else None

    @property
    def _funds(self) -> float:
        """Seconds that drafts may take."""
        return max(self._balance or 0.0, 0.0)

    def _part(self, sequence: TokenSequence, start: int, end: int, length: int) -> DraftPart:
        """Return a part with these fields. `count_computed` of the pages comes before it."""
        return DraftPart(sequence, start, end, length, self._pages.first_block(sequence))

    def _pass_seconds(self, tokens: int) -> float:
        """Return the estimated seconds of a pass of so many tokens.

        The estimate is low until a pass of about this size was measured, so that one is tried.
        """
        measured = self._passes.nearest(tokens, _NEAR)
        return tokens * self._token_seconds if measured is None else measured

    def _has_room(self, part: DraftPart) -> bool:
        """Make room for a part's draft tokens. Return False if blocks are too few."""
        return not part.length or self._caches.grow(part.sequence, part.end + part.length)
