"""Drafter, which chooses the draft tokens that a step computes behind the newest tokens."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TypeAlias

from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.draft_account import ComputedStep
from services.engine.scheduling.draft_lengths import DraftLengths
from services.engine.scheduling.draft_plan import DraftPart, DraftResult
from services.engine.scheduling.model_drafts import ModelDrafts
from services.engine.scheduling.search_budget import SearchBudget
from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.speculation import MOST_DRAFTED, Draft, DraftKind, DraftTotals
from services.engine.scheduling.step_plan import SchedulerLimits, StepPlan

__all__ = ["Drafter"]

_MISSES, _MOST_REST = 4, 8
"""Decisions in a row without a draft after which each as many more skip one more, up to a bound:
a decision takes time"""
_QUIET_STEPS = 16
"""Steps for which nothing is done for drafts that are learned together: learning takes time"""
_MAX_FORCED = 16
"""Most forced tokens of one stream in a step, because each of them takes a row of logits"""


class Drafter:
    """Draft tokens of the running sequences: forced by a grammar, or proposed by `Speculation`."""

    def __init__(
        self,
        running: Sequence[TokenSequence],
        limits: SchedulerLimits,
        caches: CachePools,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """running: the scheduler's list of running sequences. clock: returns seconds."""
        self._running = running
        self._limits = limits
        self._clock = clock
        self._lengths = DraftLengths(limits.rows_at_once)
        self._budget = SearchBudget(self._lengths)
        self._model: ModelDrafts | None = None
        """Drafts of the draft model; None = there is none"""
        if limits.draft is not None:
            self._model = ModelDrafts(limits.draft, self._lengths, caches)
        self._predicted = self._constrained = 0
        """Numbers of running sequences whose client expects a text, and of constrained ones"""
        self._misses = self._rest = 0
        """Number of decisions in a row without a draft, and of decisions to skip"""
        self._quiet: list[float] = []
        """Durations of the newest steps for which nothing was done for drafts"""
        self._waiting_drafts = 0
        """Number of drafts that were made or reported for the next step"""
        self.totals = {kind: DraftTotals() for kind in DraftKind}
        """Drafts since the start, by their source"""

    def enter(self, sequence: TokenSequence) -> None:
        """Note that a sequence runs now."""
        self._predicted += sequence.speculation.has_prediction
        self._constrained += sequence.request.command.checked.constrained
        self._rest = 0
        if self._model is not None:
            self._model.enter()

    def leave(self, sequence: TokenSequence) -> None:
        """Note that a sequence has left the running ones."""
        self._predicted -= sequence.speculation.has_prediction
        self._constrained -= sequence.request.command.checked.constrained
        if self._model is not None:
            self._model.leave(sequence)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Take the time of a step, which includes the search for its draft tokens."""
        if self._is_quiet(plan) and len(self._quiet) < _QUIET_STEPS:
            self._quiet.append(seconds)
            return
        step = ComputedStep(
            streams=plan.streams,
            rows=plan.decode_tokens,
            drafted=sum(len(chunk.draft) for chunk in plan.chunks),
            has_prompts=plan.prompt_tokens > 0,
            seconds=max(seconds - self._budget.search_seconds, 0.0),
            quiet_steps=len(self._quiet),
            quiet_seconds=sum(self._quiet),
        )
        self._quiet.clear()
        if not step.has_prompts:
            self._lengths.learn(step.rows, step.drafted, step.seconds, step.quiet_steps + 1)
        if self._limits.speculate:
            self._budget.settle(step)
        if self._model is not None:
            self._model.settle(step)

    def _is_quiet(self, plan: StepPlan) -> bool:
        """Return whether nothing was done for drafts in a step."""
        if plan.chunks or self._budget.search_seconds:
            return False
        return self._model is None or self._model.is_quiet

    def awaits_tokens(self) -> bool:
        """Decide whether the next step waits for the tokens in flight, on which drafts depend.

        The decision counts as one of the draft model, and may turn its drafts off.
        """
        looks_up = self._looks_up and not self._rest
        if not looks_up and not self.is_model_due:
            return False
        able = [each for each in self._running if each.may_draft_behind_flight]
        if not able:
            return False
        streams = sum(each.uncomputed == 1 for each in self._running)
        if looks_up and self._may_gain(streams, able):
            return True
        return self._model is not None and self._model.awaits_tokens(streams, able, self._most_rows)

    def end_model(self) -> None:
        """Go on without the draft model, which has failed."""
        self._model = None

    @property
    def is_model_due(self) -> bool:
        """True if `plan_model` may return anything."""
        return self._model is not None and self._model.is_due

    def plan_model(self, *, constrained: bool) -> Sequence[DraftPart]:
        """Return what the draft model is to compute before the next step, if there is one.

        constrained: plan for the sequences whose drafts need masks, or for all others.
        """
        if self._model is None or not self.is_model_due:
            return ()
        if self._constrained == (0 if constrained else len(self._running)):
            return ()
        streams = [each for each in self._running if each.uncomputed == 1]
        if self._model.only_estimates:
            return self._reconsider_model(constrained=constrained)
        due = [
            each
            for each in streams
            if each.request.command.checked.constrained is constrained
            and _may_draft(each)
            and not each.forced
            and (not constrained or _awaits_draft(each))
            and not self._has_better(each)
        ]
        return self._model.plan(len(streams), due, self._most_rows)

    def _reconsider_model(self, *, constrained: bool) -> Sequence[DraftPart]:
        """Have the model estimate whether drafts would save time. Tokens may be in flight."""
        assert self._model is not None
        # a constrained sequence may wait for a mask
        decoding = (0, 1) if constrained else (1,)
        streams = [each for each in self._running if each.uncomputed in decoding]
        able = [
            each
            for each in streams
            if each.request.command.checked.constrained is constrained
            and each.request.draws_independently
            and not self._has_better(each)
        ]
        return self._model.plan(len(streams), able, self._most_rows)

    def take_made(self, parts: Sequence[DraftPart], result: DraftResult) -> None:
        """Take the draft tokens that the draft model has made of a plan."""
        assert self._model is not None
        self._waiting_drafts += sum(map(bool, result.tokens))
        self._model.take(parts, result)

    def add_overhead(self, seconds: float) -> None:
        """Book what the host has done for the draft model besides its passes."""
        if self._model is not None:
            self._model.add_overhead(seconds)

    def wants_states(self, plan: StepPlan) -> Collection[TokenSequence] | None:
        """Return the sequences of a step whose hidden states a head will read; None = all."""
        return () if self._model is None else self._model.wants_states(plan)

    def note_states(self, firsts: Mapping[TokenSequence, int]) -> None:
        """Take the index of the first token whose hidden states are kept, by sequence."""
        if self._model is not None:
            self._model.note_states(firsts)

    def forced(self, sequence: TokenSequence) -> Sequence[int]:
        """Return tokens that a grammar forces behind a sequence's newest token."""
        if not sequence.forced or not _may_draft(sequence):
            return ()
        return sequence.forced[: min(_MAX_FORCED, self._most_rows, sequence.room)]

    def choose(self) -> Mapping[TokenSequence, Draft]:
        """Return the drafts of the next step: as many tokens as are expected to save time."""
        waiting, self._waiting_drafts = self._waiting_drafts, 0
        looks_up = self._looks_up
        if not waiting:
            if not looks_up and not self._predicted:
                return {}
            if self._rest:
                self._rest -= 1
                return {}
        began = self._clock()
        streams = [each for each in self._running if each.uncomputed == 1]
        drafting = [each for each in streams if _may_draft(each) and not each.forced]
        chosen = self._chosen(len(streams), drafting, _reported_or_proposed, looks_up)
        if looks_up:
            self._budget.add_search(self._clock() - began)
        self._misses = 0 if chosen else self._misses + 1
        self._rest = min(self._misses // _MISSES, _MOST_REST)
        return chosen

    def report(self) -> Iterator[tuple[TokenSequence, Sequence[int]]]:
        """Propose tokens for constrained sequences, which need masks before they are computed."""
        looks_up = self._looks_up
        if not self._constrained or not (looks_up or self._predicted or self._model is not None):
            return
        began = self._clock()
        streams = [each for each in self._running if each.uncomputed == 1]
        due = [
            each
            for each in streams
            if each.request.command.checked.constrained and _awaits_draft(each) and _may_draft(each)
        ]
        chosen = self._chosen(len(streams), due, _proposed, looks_up)
        if looks_up:
            self._budget.add_search(self._clock() - began)
        self._waiting_drafts += len(chosen)
        for sequence in due:
            draft = chosen.get(sequence)
            sequence.speculation.reported = sequence.position, draft
            if draft is not None:
                yield sequence, draft.tokens

    def count_accepted(self, sequence: TokenSequence, draft: Sequence[int]) -> int:
        """Return how many draft tokens were drawn and computed. The newest token never counts."""
        drawn = sequence.tokens[sequence.num_computed : -1].tolist()
        pairs = zip(draft, drawn, strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        kind = sequence.speculation.computed
        if kind is not None:
            before = sequence.length - accepted - 1
            sequence.speculation.learn(kind, len(draft), accepted, before)
            self.totals[kind].add(len(draft), accepted)
            if self._model is not None and kind is self._model.kind:
                self._model.learn(sequence, len(draft), accepted)
            elif kind is DraftKind.NGRAM:
                self._budget.add_outcome(len(draft), accepted)
        return accepted

    @property
    def _looks_up(self) -> bool:
        """True if n-grams may propose draft tokens."""
        return self._limits.speculate and self._budget.is_open(len(self._running))

    @property
    def _most_rows(self) -> int:
        """Most draft tokens of each sequence, so that the rows of logits of all of them fit."""
        return self._limits.max_logit_rows // len(self._running) - 1

    def _chosen(
        self,
        streams: int,
        sequences: Sequence[TokenSequence],
        propose: "_Propose",
        looks_up: bool,
    ) -> Mapping[TokenSequence, Draft]:
        """Return the drafts of some of the sequences that are worth their time."""
        if not sequences:
            return {}
        least = self._least_rate(streams, sequences)
        most = min(MOST_DRAFTED, self._most_rows)
        found = [
            (each, draft)
            for each in sequences
            if self._best_rate(each) > least
            and (draft := propose(each, min(most, each.room), looks_up)) is not None
        ]
        if not found:
            return {}
        rated = [(self._rate(s, draft.kind), len(draft.tokens)) for s, draft in found]
        lengths = self._lengths.choose(streams, rated)
        return {
            sequence: Draft(draft.kind, draft.tokens[:length])
            for (sequence, draft), length in zip(found, lengths, strict=True)
            if length
        }

    def _may_gain(self, streams: int, sequences: Sequence[TokenSequence]) -> bool:
        """Return whether drafts of some of the sequences can be worth their time."""
        least = self._least_rate(streams, sequences)
        return any(self._best_rate(each) > least for each in sequences)

    def _least_rate(self, streams: int, sequences: Sequence[TokenSequence]) -> float:
        """Return the acceptance above which draft tokens of the sequences can be worth their time.

        streams: sequences of the step.
        """
        most = min(MOST_DRAFTED, self._most_rows) if sequences else 0
        return self._lengths.least_rate(streams, most * len(sequences))

    def _rate(self, sequence: TokenSequence, kind: DraftKind) -> float:
        """Return the estimated probability that a source's next draft token is accepted."""
        if self._model is not None and kind is self._model.kind:
            return self._model.rate(sequence)
        return sequence.speculation.rate_of(kind, sequence.length)

    def _best_rate(self, sequence: TokenSequence) -> float:
        """Return the highest such probability among the sources that may have a draft."""
        rate = sequence.speculation.rate(sequence.length)
        if self._model is not None and sequence.speculation.made[0] == sequence.length:
            return max(rate, self._model.rate(sequence))
        return rate

    def _has_better(self, sequence: TokenSequence) -> bool:
        """Return whether a draft that takes no model is as good as that of the draft model."""
        assert self._model is not None
        speculation = sequence.speculation
        looks_up = self._looks_up
        if not looks_up and not speculation.has_prediction:
            return False
        draft = speculation.propose_free(sequence.tokens, 1, looks_up=looks_up)
        if draft is None:
            return False
        return speculation.rate_of(draft.kind, sequence.length) >= self._model.rate(sequence)


_Propose: TypeAlias = Callable[[TokenSequence, int, bool], Draft | None]


def _may_draft(sequence: TokenSequence) -> bool:
    return not sequence.in_flight and sequence.request.draws_independently


def _awaits_draft(sequence: TokenSequence) -> bool:
    """Return whether a constrained sequence has no mask yet, and no draft at its position."""
    return sequence.speculation.reported[0] != sequence.position and sequence.mask is None


def _reported_or_proposed(sequence: TokenSequence, most: int, looks_up: bool) -> Draft | None:
    """Return a draft for the next step: that of a constrained sequence must have its masks."""
    if not sequence.request.command.checked.constrained:
        return _proposed(sequence, most, looks_up)
    position, draft = sequence.speculation.reported
    if draft is None or position != sequence.position or not most:
        return None
    return Draft(draft.kind, draft.tokens[:most])


def _proposed(sequence: TokenSequence, most: int, looks_up: bool) -> Draft | None:
    if not most:
        return None
    return sequence.speculation.propose(sequence.tokens, most, looks_up=looks_up)
