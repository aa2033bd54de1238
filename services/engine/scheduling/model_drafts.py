"""Policy of a draft model: for which sequences it makes draft tokens, and how many.

Draft tokens of a model cost time before any is accepted. So they are made where they are expected
to save time, by measured times and by the share that was accepted lately. An account bounds the
damage of wrong estimates: it holds the seconds that drafts have saved so far, and drafts are made
only as long as it can pay for them.

Where drafts save nothing, they are off: nothing is decided, and no hidden states are kept for a
head. A small share of the time of all steps pays for a trial now and then.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.draft_account import ComputedStep, DraftAccount
from services.engine.scheduling.draft_lengths import DraftLengths, MadeDraft, MadeLengths
from services.engine.scheduling.draft_pages import DraftPages, HeadPages, SharedPages
from services.engine.scheduling.draft_plan import DraftLimits, DraftPart, DraftResult
from services.engine.scheduling.draft_trials import TRIAL_LENGTH, TRIAL_RATE, DraftTrials
from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.speculation import Acceptance, Draft, DraftKind
from services.engine.scheduling.step_cost import StepTimes
from services.engine.scheduling.step_plan import StepPlan

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
_NEAR = 4
"""Most size classes between a pass and a measured one that stands for it"""
_FIRST_STEPS, _TRIAL_STEPS = 32, 64
"""Steps without drafts whose time drafts may take at first, and trials at once"""
_REST, _MOST_REST = 4, 64
"""Fewest and most steps between two decisions as long as no draft is worth its time"""
_MOST_FAILURES = 6
"""Decisions in a row without drafts after which drafts are off"""
_TRIAL_CONTEXT = 16
"""Fewest tokens that a head must have seen in a trial whose context begins late"""


class ModelDrafts:
    """Drafts of a draft model: their plan, their acceptance and their costs."""

    def __init__(self, limits: DraftLimits, lengths: DraftLengths, caches: CachePools) -> None:
        self._limits = limits
        self._lengths = lengths
        self._caches = caches
        pages_of_head = SharedPages if limits.shares_pages else HeadPages
        self._heads = pages_of_head(caches.block_size, limits.layers)
        is_head = limits.kind is not DraftKind.MODEL or limits.shares_pages
        self._pages = self._heads if is_head else DraftPages(caches.block_size)
        self._passes = StepTimes()
        self._token_seconds = 0.0
        """Seconds of a token of the longest pass so far; 0 = no pass of a prompt was measured"""
        self._longest = 0
        self._common = Acceptance(_COMMON_MEMORY)
        self._account = DraftAccount(lengths, _FIRST_STEPS, _TRIAL_STEPS, makes_passes=True)
        self._trials = DraftTrials()
        self._is_on = True
        """False while nothing is drafted but in trials"""
        self._begin_funds = 0.0
        """Seconds that drafts were allowed when they went on"""
        self._off_streams = 0
        """Fewest sequences of a step since drafts are off"""
        self._failures = 0
        """Number of decisions in a row without drafts"""
        self._rest, self._next_rest = 0, _REST
        """Steps until the next decision, and from that one to the one after it"""

    @property
    def kind(self) -> DraftKind:
        """Source of these drafts."""
        return self._limits.kind

    @property
    def is_due(self) -> bool:
        """True if `plan` may have passes compute. Steps cost nothing else while drafts are off."""
        if self._trials.is_on:
            return self._trials.sequence is not None
        return not self._rest and (self._is_on or self._account.trial_balance > 0)

    @property
    def only_estimates(self) -> bool:
        """True if `plan` can at most turn drafts on or begin a trial: it reads no newest token."""
        return not self._is_on and self._trials.sequence is None

    def awaits_tokens(self, streams: int, sequences: Sequence[TokenSequence], most: int) -> bool:
        """Return whether the next step is expected to have drafts if tokens in flight come first.

        The parameters are those of `plan`; the sequences have a token in flight.
        """
        if not self.is_due or self.only_estimates or not self._may_plan(sequences):
            return False
        trial = self._trials.sequence
        if trial is not None:
            return trial in sequences and self._pages.can_continue(trial)
        return bool(self._decide(streams, sequences, most))

    @property
    def is_quiet(self) -> bool:
        """True if steps may be booked together, since no draft and no trial goes on."""
        return not self._is_on and not self._trials.is_on

    def wants_states(self, plan: StepPlan) -> Collection[TokenSequence] | None:
        """Return the sequences of a step whose hidden states a head will read; None = all."""
        if self._is_on:
            return None
        if not self._trials.is_on:
            return ()
        trial = self._trials.choose(plan)
        return () if trial is None else (trial,)

    def note_states(self, firsts: Mapping[TokenSequence, int]) -> None:
        """Do `HeadPages.note_states`."""
        self._heads.note_states(firsts)

    def add_overhead(self, seconds: float) -> None:
        """Book what the host has done for drafts besides passes."""
        self._account.add_overhead(seconds)

    def enter(self) -> None:
        """Note that a sequence runs now, whose drafts may be better than those of others."""
        self._rest = min(self._rest, _REST)

    def leave(self, sequence: TokenSequence) -> None:
        """Note that a sequence gives its blocks back."""
        self._pages.leave(sequence)
        if self._trials.sequence is sequence:
            self._trials.end()

    def rate(self, sequence: TokenSequence) -> float:
        """Return the probability with which a sequence's next draft token is accepted.

        A trial counts as good, so that its draft is computed.
        """
        if sequence is self._trials.sequence:
            return TRIAL_RATE
        return self._estimate(sequence)

    def plan(
        self, streams: int, sequences: Sequence[TokenSequence], most: int
    ) -> Sequence[DraftPart]:
        """Return what the draft model is to compute before the next step. Allocates blocks.

        streams: sequences of the step. sequences: those that may have a draft. most: most tokens of
        each draft.
        """
        if not self._may_plan(sequences):
            return ()
        trial = self._trials.sequence
        if trial is not None:
            parts = self._trial_parts(streams, trial, most) if trial in sequences else []
        else:
            parts = self._decide(streams, sequences, most)
        return [part for part in parts if self._has_room(part)]

    def _may_plan(self, sequences: Sequence[TokenSequence]) -> bool:
        """Return whether sequences may have drafts at all."""
        # with too few blocks, drafts would have sequences preempted
        is_measured = self._account.balance is not None
        return is_measured and 0 < len(sequences) < self._caches.num_free

    def _decide(
        self, streams: int, sequences: Sequence[TokenSequence], most: int
    ) -> list[DraftPart]:
        """Return the parts that are expected to save time, and turn drafts on or off."""
        if not self._is_on:
            self._reconsider(streams, sequences, most)
            return []
        able = filter(self._pages.can_continue, sequences)
        drafts = {each: self._draft(each, most) for each in able}
        if not drafts:
            return []
        parts = self._parts(streams, drafts)
        if parts:
            self._failures = 0
            return parts
        self._rest = _REST
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
            self._turn_off(streams)
        return []

    def _reconsider(self, streams: int, sequences: Sequence[TokenSequence], most: int) -> None:
        """Turn drafts on if estimates speak for it, or begin a trial that could show that."""
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _MOST_REST)
        drafts = {each: self._draft(each, most) for each in sequences}
        made = self._made(streams, drafts)
        if any(made.lengths) and made.seconds <= self._account.funds:
            self._is_on, self._failures, self._rest = True, 0, 0
            self._begin_funds = self._account.funds
        elif self._trials.is_due:
            good = {each: replace(draft, rate=TRIAL_RATE) for each, draft in drafts.items()}
            if any(self._made(streams, good).lengths):
                self._begin_trial(sequences)

    def _begin_trial(self, sequences: Sequence[TokenSequence]) -> None:
        """Begin a trial if its passes can be paid for."""
        trial = None
        if self._limits.layers > 1:
            passes = self._pass_seconds(1 + self._limits.layers)
        else:
            passes = TRIAL_LENGTH * self._pass_seconds(1)
        if self._pages is not self._heads:
            lags = self._lags(sequences)
            trial = min(lags, key=lambda each: lags[each])
            passes += (lags[trial] - 1) * self._token_seconds
        if passes <= self._account.trial_balance:
            self._trials.begin(trial)

    def _turn_off(self, streams: int) -> None:
        """Stop drafts and decisions until they are expected to save time."""
        self._is_on, self._off_streams, self._next_rest = False, streams, _REST
        self._heads.forget_states()
        if self._account.funds > self._begin_funds:
            self._trials.repeat_soon()

    def take(self, parts: Sequence[DraftPart], result: DraftResult) -> None:
        """Take what the draft model has made of a plan."""
        for part, made in zip(parts, result.tokens, strict=True):
            self._pages.write(part, made[:-1])
            if made:
                draft = Draft(self.kind, made)
                part.sequence.speculation.made = part.sequence.length, draft
        for tokens, seconds in result.passes:
            known = self._passes.nearest(tokens, _NEAR)
            # other programs make single passes longer, which says nothing about drafts
            self._account.add_pass(seconds if known is None else min(seconds, 2 * known))
            self._passes.learn(tokens, seconds)
            if tokens >= self._longest:
                self._longest = tokens
                self._token_seconds = (self._passes.nearest(tokens) or 0.0) / tokens

    def learn(self, sequence: TokenSequence, drafted: int, accepted: int) -> None:
        """Take the outcome of a draft."""
        self._common.learn(drafted, accepted)
        self._account.add_outcome(drafted, accepted)
        if sequence is self._trials.sequence:
            self._trials.learn(accepted)
            self._rest = 0

    def settle(self, step: ComputedStep) -> None:
        """Book a step."""
        self._account.settle(step, is_trial=not self._is_on)
        steps = step.quiet_steps + 1
        self._rest = max(self._rest - steps, 0)
        if self._is_on:
            if self._account.balance == 0:
                self._turn_off(step.streams)
            return
        self._trials.step(steps)
        if 0 < 2 * step.streams <= self._off_streams:
            self._off_streams, self._rest, self._next_rest = step.streams, 0, _REST
            self._trials.repeat_soon()

    def _draft(self, sequence: TokenSequence, most: int) -> MadeDraft:
        """Return the draft that a sequence may have once the draft model has reached its end."""
        layers = self._limits.layers
        room = min(most, _MOST_MADE if layers == 1 else layers, sequence.room)
        room = min(room, self._limits.context_length - sequence.length)
        further_rows = int(layers == 1)
        return MadeDraft(self._estimate(sequence), max(room, 0), 1 + layers, further_rows)

    def _estimate(self, sequence: TokenSequence) -> float:
        return sequence.speculation.rate_of(self.kind, sequence.length, self._common.rate())

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
        left = self._account.funds - made.seconds
        return parts + self._chunks(streams, late, left) if left >= 0 else []

    def _made(self, streams: int, drafts: Mapping[TokenSequence, MadeDraft]) -> MadeLengths:
        overhead = self._account.overhead(streams)
        return self._lengths.choose_made(streams, [*drafts.values()], self._pass_seconds, overhead)

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
            if left <= 0 or count < self._limits.layers:
                break  # a head of several layers computes its last rows again
            start = sequence.length - lag
            parts.append(self._part(sequence, start, start + min(count, lag - 1), 0))
            count -= parts[-1].count
        return parts

    def _trial_parts(self, streams: int, trial: TokenSequence, most: int) -> list[DraftPart]:
        """Return a part of a trial, once a head has enough context."""
        if not self._pages.can_continue(trial):
            return []
        [lag] = self._lags([trial]).values()
        if self._pages.first_block(trial) and not self._has_context(trial):
            return []
        if lag > _MOST_LAG:
            return self._chunks(streams, {trial: lag}, self._account.trial_balance)
        length = min(TRIAL_LENGTH, self._draft(trial, most).most)
        if not length or not self._trials.count():
            self._trials.end()
            return []
        return [self._part(trial, trial.length - lag, trial.length, length)]

    def _has_context(self, sequence: TokenSequence) -> bool:
        begin = self._pages.first_block(sequence) * self._caches.block_size
        return sequence.length - begin > _TRIAL_CONTEXT

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
