"""Scheduler, which chooses the tokens of each step. Pure policy, without tensors, clock or I/O.

A step is one flat batch. Decoding sequences come first. Chunks of prompts follow, limited so that
they delay the streams little. When blocks or places run out, sequences are preempted and computed
again later: paused sequences, sequences of lower priority, then sequences of the tenant or request
that holds most.
"""

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter

from services.engine.scheduling.cache_pools import BlockCopy, CachePools, Prefix
from services.engine.scheduling.drafter import Drafter
from services.engine.scheduling.preemption import Preemption
from services.engine.scheduling.prompt_budget import Allowance, Backlog, PromptBudget
from services.engine.scheduling.sequence import SequenceState, TokenSequence
from services.engine.scheduling.speculation import Draft
from services.engine.scheduling.step_cost import StepCost
from services.engine.scheduling.step_plan import Chunk, SchedulerLimits, StepPlan
from services.engine.scheduling.tenants import GENERATED_WEIGHT, Tenants
from services.engine.scheduling.waiting_queue import PrefillCandidates, PromptOrder, WaitingQueue

__all__ = ["Scheduler"]

_LONG_PROMPT_RATIO = 4
"""Multiple of the others' mean length from which on a prompt leaves them half of each step"""
_MOST_NEWCOMERS = 4
"""Number of sequences at the head of the queue for which others may be preempted"""
_MEASURABLE_TOKENS = 32
"""Fewest prompt tokens whose time can be measured, even on a machine with larger tiles"""
_SECONDS_PER_CHOICE = 0.25
"""Seconds of queueing delay of each choice behind the choice before it, so that requests of few
choices pass the later choices of large requests"""


class Scheduler:
    """Owner of the order of sequences and, through `CachePools`, of their blocks and slots."""

    def __init__(self, limits: SchedulerLimits, caches: CachePools) -> None:
        self.limits = limits
        self.caches = caches
        self.running: list[TokenSequence] = []
        """Running sequences, sorted by their `order`"""
        self.waiting = WaitingQueue()
        self.tenants = Tenants()
        self.queued_tokens = 0
        """Number of uncached tokens of the waiting sequences"""
        self._queued_pooled = 0
        """Number of waiting sequences that only make vectors"""
        self.preemptions = 0
        """Number of preemptions since the start"""
        self._cost = StepCost(
            min(limits.rows_at_once, _MEASURABLE_TOKENS), limits.prompts_have_fixed_cost
        )
        self._budget = PromptBudget(self._cost, limits)
        self._preemption = Preemption(self.running, caches, limits)
        self.drafter = Drafter(self.running, limits, caches)
        """Drafter, which chooses the draft tokens of the running sequences"""
        self._searching: dict[tuple[int, int], int] = {}
        """Beams of the running searches, by `search_key`"""
        self._failed: dict[TokenSequence, int] = {}
        """Sequences of the newest failed step, and the index of each one's first token in it"""

    def add(self, sequence: TokenSequence) -> int:
        """Queue a sequence. Return the number of its tokens that the prefix cache holds now."""
        found = self.caches.find(sequence.reusable_hashes()).tokens
        command, queued = sequence.request.command, sequence.queued
        queued.tokens = sequence.length - found
        self.queued_tokens += queued.tokens
        self._queued_pooled += sequence.pooled is not None
        sequence.tenant = self.tenants.enter(command.cache_salt)
        sequence.tenant.waiting += 1
        prompt_seconds = self._cost.prompt_seconds(queued.tokens)
        queued.due = command.arrival + prompt_seconds + _SECONDS_PER_CHOICE * sequence.index
        self.waiting.add(sequence)
        return found

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a sequence that has ended, and free its blocks."""
        if sequence.state is SequenceState.WAITING:
            self._leave_queue(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self._leave_place(sequence)
        self.tenants.leave(sequence.tenant)
        if sequence.search is not None and sequence.search_key in self._searching:
            self._searching[sequence.search_key] -= 1
            if not self._searching[sequence.search_key]:
                del self._searching[sequence.search_key]
        sequence.logits_hold = None
        sequence.state = SequenceState.FINISHED

    @property
    def free_places(self) -> int:
        """Number of sequences that may start if there are blocks for them."""
        return self.limits.max_running - len(self.running)

    def fits(self, tokens: int) -> bool:
        """Return whether a sequence of `tokens` tokens can ever run."""
        return self.caches.fits(tokens)

    def plan(self, now: float) -> StepPlan:
        """Choose the next batch, allocate its blocks, and count its tokens as computed.

        now: seconds, on the clock of the requests' arrivals.
        """
        self.caches.publish()
        if len(self.waiting):
            self._preempt_for_newcomer(now)
        preemptions = self.preemptions
        decodes, drafts, prompts = self._plan_decodes()
        decode_tokens = len(decodes) + sum(chunk.count for chunk in drafts)
        backlog = self._backlog(prompts)
        allowance = self._budget.allow(len(decodes) + len(drafts), decode_tokens, backlog)
        prefills: list[Chunk] = []
        if allowance.tokens:
            candidates = PrefillCandidates(prompts, self.waiting, self._order(now, prompts))
            if self.preemptions > preemptions:
                candidates.skip_waiting()
            prefills += self._plan_prefills(candidates, allowance, backlog)
        if len(self.tenants) > 1:
            _charge_tenants(decodes, drafts, prefills)
        plan = StepPlan(
            decodes=decodes,
            chunks=[*drafts, *prefills],
            decode_tokens=decode_tokens,
            prompt_tokens=sum(chunk.count for chunk in prefills),
        )
        if self._searching and len(self.waiting):
            lacking = self._preempt_held_beams(every=plan.is_empty)
            if lacking and plan.is_empty:
                return self.plan(now)
        return plan

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Update the cost model with the time of a step."""
        self._cost.learn(plan.decode_tokens, plan.prompt_tokens, seconds)
        self.drafter.learn(plan, seconds)

    def accept(self, sequence: TokenSequence, draft: Sequence[int]) -> None:
        """Count accepted draft tokens as computed, but never the newest token.

        The KV of rejected tokens is overwritten when the tokens in their places are computed.
        """
        accepted = self.drafter.count_accepted(sequence, draft)
        if sequence.state is SequenceState.RUNNING:
            self._compute(sequence, accepted)

    def fork(self, beams: Sequence[TokenSequence], parents: Sequence[int]) -> list[BlockCopy]:
        """Let beams continue others: a beam whose parent is another beam gets the parent's tokens.

        beams: sequences of a search, all of whose tokens are computed. parents: index of the beam
        that each beam continues; a parent always continues itself. Full blocks are shared. Returns
        the blocks to copy before the next step. A beam without room waits, and computes its tokens
        again.
        """
        moved = [
            (beam, beams[p]) for beam, p in zip(beams, parents, strict=True) if beam is not beams[p]
        ]
        for beam, _ in moved:
            if beam.state is SequenceState.RUNNING:
                self.caches.release(beam)
        copies: list[BlockCopy] = []
        for beam, parent in moved:
            beam.continue_from(parent)
            if beam.state is not SequenceState.RUNNING:
                continue
            runs = parent.state is SequenceState.RUNNING
            own = self.caches.fork(beam, parent) if runs else None
            if own is None:
                self._preempt(beam)
            else:
                copies += own
        return copies

    def settle(self, sequence: TokenSequence) -> None:
        """Cache the block of a token that was in flight and is now appended, once it is full."""
        sequence.in_flight -= 1
        full, rest = divmod(sequence.length, self.caches.block_size)
        if rest == 0 and sequence.state is SequenceState.RUNNING:
            self._cache_blocks(sequence, full - 1)

    def withdraw(self, sequence: TokenSequence) -> None:
        """Count the newest token as uncomputed: the device computed a wrong token instead."""
        if sequence.state is SequenceState.RUNNING:
            sequence.num_computed -= 1

    def uncache(self, plan: StepPlan) -> None:
        """Remove all that a failed step should have written from the cache.

        Its sequences may run again, each alone. A sequence that holds a prefix which another one
        was to write runs after that one.
        """
        starts = {sequence: sequence.num_computed - 1 for sequence in plan.decodes}
        self._failed = starts | {chunk.sequence: chunk.start for chunk in plan.chunks}
        for sequence, start in self._failed.items():
            self.caches.uncache(sequence, start)

    def invalidate(self, sequence: TokenSequence, start: int) -> None:
        """Preempt the sequences that hold blocks of tokens from `start` on, which stay unwritten.

        Sequences of a failed step hold such blocks as prefix hits.
        """
        for other in self.caches.sharing(sequence, start, self.running):
            if other.state is SequenceState.RUNNING:
                self.invalidate(other, self._failed.get(other, other.num_computed))
                self._preempt(other)

    def _plan_decodes(self) -> tuple[list[TokenSequence], list[Chunk], list[TokenSequence]]:
        """Plan the newest tokens and draft tokens of the running sequences.

        Returns the sequences without draft tokens, the chunks of sequences with draft tokens, and
        the sequences whose prompts or forced tokens are not computed.
        """
        decodes: list[TokenSequence] = []
        drafts: list[Chunk] = []
        prompts: list[TokenSequence] = []
        chosen, running = self.drafter.choose(), SequenceState.RUNNING
        has_states = self.caches.has_states
        # `running` is in order, so victims of preemption come after the sequences already planned
        for sequence in list(self.running):
            uncomputed = sequence.uncomputed
            if uncomputed == 0 or sequence.state is not running:
                continue
            if uncomputed == 1 and not sequence.has_credit:
                continue
            start = sequence.num_computed
            end = start + (1 if uncomputed == 1 else self._least(sequence))
            # most decodes have room, and no recurrent state to advance
            if (end > sequence.capacity or has_states) and not self._grow(sequence, end):
                continue
            if uncomputed > 1:
                prompts.append(sequence)
                continue
            draft = self._draft(sequence, chosen) if chosen or sequence.mask else ()
            self._compute(sequence, 1)
            if has_states:
                start = self.caches.step_start(sequence)
                self.caches.plan(sequence, end + len(draft))
            if draft or end - start > 1:
                rows = 1 + len(draft)
                count = end - start + len(draft)
                drafts.append(Chunk(sequence, start, count, draft, num_outputs=rows))
            else:
                decodes.append(sequence)
        return decodes, drafts, [s for s in prompts if s.state is running]

    def _draft(
        self, sequence: TokenSequence, chosen: Mapping[TokenSequence, Draft]
    ) -> Sequence[int]:
        """Allocate blocks for a sequence's draft tokens. Return no tokens if blocks are too few."""
        draft = chosen.get(sequence)
        tokens = self.drafter.forced(sequence) if draft is None else draft.tokens
        if not tokens or not self.caches.grow(sequence, sequence.length + len(tokens)):
            return ()
        sequence.speculation.computed = None if draft is None else draft.kind
        return tokens

    def _least(self, sequence: TokenSequence) -> int:
        """Return the fewest tokens of a prompt that a step may compute next."""
        if self.limits.keeps_prompts_whole:
            return sequence.length - sequence.num_computed
        if sequence.images is not None and self.limits.keeps_images_whole:
            return sequence.images.whole(sequence.num_computed, 1)
        return 1

    def _plan_prefills(
        self, candidates: PrefillCandidates, allowance: Allowance, backlog: Backlog
    ) -> Iterator[Chunk]:
        """Continue prompts and start waiting sequences as far as allowance, places and blocks go.

        A sequence waits for its next block if another sequence is about to compute it. So a prefix
        that arrives many times at once is computed once.
        """
        left = allowance.tokens
        # whole prompts are not cached, so that waiting for another prompt gains nothing
        whole = self.limits.keeps_prompts_whole
        pending = self._pending_hashes() if len(self.waiting) and not whole else set()
        for sequence in candidates:
            if left <= 0:
                return
            if sequence.state is SequenceState.WAITING:
                if len(self.running) >= self.limits.max_running:
                    candidates.skip_waiting()
                    continue
                if sequence.in_flight:  # this plan preempted it before its newest token came
                    candidates.skip_waiting()
                    continue
                if sequence.awaits_beams or not self._may_search(sequence):
                    continue
                if sequence.queued.awaited_hash in pending:
                    continue
                found = self._find_prefix(sequence, pending)
                if sequence.queued.awaited_hash is not None:
                    continue
                if not self._start(sequence, found):
                    candidates.skip_waiting()
                    continue
            count = _share(sequence.uncomputed, left, allowance.slack, backlog)
            if whole:
                if count < sequence.uncomputed and left < allowance.tokens:
                    return  # the next step begins with this prompt
                count = sequence.uncomputed
            start = sequence.num_computed
            count = self.caches.grow_most(sequence, start + count) - start
            if sequence.images is not None and self.limits.keeps_images_whole:
                count = sequence.images.whole(sequence.num_computed, count)
            left -= count
            yield self._prefill(sequence, count)
            if not whole:
                pending.update(self.caches.pending_hashes(sequence))

    def _prefill(self, sequence: TokenSequence, count: int) -> Chunk:
        start = self.caches.step_start(sequence)
        self._compute(sequence, count)
        end = sequence.num_computed
        self.caches.plan(sequence, end)
        # the row of a token scores the next one
        is_scored = sequence.scored < min(end + 1, sequence.prompt_length)
        return Chunk(sequence, start, end - start, num_outputs=end - start if is_scored else 1)

    def _backlog(self, prompts: Sequence[TokenSequence]) -> Backlog:
        """Return the backlog: the started prompts, and as many waiting ones as there are places."""
        places = min(len(self.waiting), max(self.free_places, 0))
        tokens = sum(sequence.uncomputed for sequence in prompts)
        if places:
            tokens += self.queued_tokens * places // len(self.waiting)
        pooled = sum(sequence.pooled is not None for sequence in prompts)
        return Backlog(len(prompts) + places, tokens, pooled + min(self._queued_pooled, places))

    def _order(self, now: float, prompts: Sequence[TokenSequence]) -> PromptOrder:
        priorities = [sequence.request.command.priority for sequence in prompts]
        if self.waiting.highest is not None:
            priorities.append(self.waiting.highest)
        return PromptOrder(now, max(priorities, default=0))

    def _preempt_for_newcomer(self, now: float) -> None:
        """Start one of the first waiting sequences if others should be preempted for it."""
        order = self._order(now, ())
        waiting = (
            each
            for each in self.waiting.in_order(order)
            if not each.awaits_beams and self._may_search(each)
        )
        for newcomer in islice(waiting, _MOST_NEWCOMERS):
            found = self.caches.find(newcomer.reusable_hashes())
            missing = self.caches.missing(newcomer, found, len(self.running))
            if max(missing) <= 0 < self.free_places:
                return  # `plan` starts it without preemption
            victims = self._preemption.victims_for(newcomer, missing, 1 - self.free_places, now)
            if victims:
                for victim in victims:
                    self._preempt(victim)
                self._start(newcomer, found)
                return

    def _preempt_held_beams(self, *, every: bool) -> bool:
        """Preempt beams that wait for other beams of their search, if these need blocks or places.

        Preempted beams keep their logits, so every search goes on even if few beams run at once.
        every: whether all beams that wait for others are preempted. Return whether there were any.
        """
        held = [sequence for sequence in self.running if sequence.awaits_beams]
        if not every:
            lacking = {id(each.search): self._lacks_room(each) for each in held}
            held = [sequence for sequence in held if lacking[id(sequence.search)]]
        for sequence in held:
            self._preempt(sequence)
        return bool(held)

    def _lacks_room(self, beam: TokenSequence) -> bool:
        """Return whether another beam of the search has no place, or too few blocks."""
        for other in beam.request.sequences:
            if other.search is beam.search and other.state is SequenceState.WAITING:
                if other.awaits_beams:
                    continue
                found = self.caches.find(other.reusable_hashes())
                return self.free_places <= 0 or self._lacks_blocks(other, found)
        return False

    def _may_search(self, sequence: TokenSequence) -> bool:
        """Return True for a sequence that is not a beam, and for a beam whose search may run.

        The beams of all running searches must fit into the places, because each may hold logits.
        """
        if sequence.search is None or sequence.search_key in self._searching:
            return True
        beams = sum(self._searching.values()) + sequence.request.command.checked.n
        return not self._searching or beams <= self.limits.max_running

    def _find_prefix(self, sequence: TokenSequence, pending: set[bytes]) -> Prefix:
        """Find a waiting sequence's cached prefix, and record the hash that it should wait for."""
        hashes = sequence.reusable_hashes()
        found = self.caches.find(hashes)
        sequence.queued.awaited_hash = self.caches.awaited_hash(hashes, found, pending)
        return found

    def _lacks_blocks(self, sequence: TokenSequence, found: Prefix) -> bool:
        """Return whether a waiting sequence has too few blocks to start while others run."""
        return max(self.caches.missing(sequence, found, len(self.running))) > 0

    def _start(self, sequence: TokenSequence, found: Prefix) -> bool:
        """Allocate a waiting sequence's blocks. Return False if too few are free."""
        if self.running and self._lacks_blocks(sequence, found):
            return False
        sequence.num_computed = found.tokens
        self.caches.start(sequence, found, self._least(sequence))
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_length)
        self._leave_queue(sequence)
        if sequence.search is not None:
            self._searching.setdefault(sequence.search_key, sequence.request.command.checked.n)
        sequence.state = SequenceState.RUNNING
        sequence.tenant.running += 1
        sequence.request.running += 1
        insort(self.running, sequence, key=attrgetter("order"))
        self.drafter.enter(sequence)
        return True

    def _leave_queue(self, sequence: TokenSequence) -> None:
        self.waiting.remove(sequence)
        self.queued_tokens -= sequence.queued.tokens
        self._queued_pooled -= sequence.pooled is not None
        sequence.tenant.waiting -= 1

    def _leave_place(self, sequence: TokenSequence) -> None:
        self.running.remove(sequence)
        self.drafter.leave(sequence)
        self.caches.release(sequence)
        sequence.tenant.running -= 1
        sequence.request.running -= 1

    def _preempt(self, sequence: TokenSequence) -> None:
        self._leave_place(sequence)
        sequence.num_computed = 0
        if not sequence.awaits_beams:
            sequence.logits_hold = None
        sequence.state = SequenceState.WAITING
        self.preemptions += 1
        self.add(sequence)

    def _grow(self, sequence: TokenSequence, end: int) -> bool:
        """Make room for tokens up to `end`. Return False if the sequence itself was preempted."""
        while not self.caches.grow(sequence, end):
            victim = self._preemption.victim_for_growth()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _compute(self, sequence: TokenSequence, count: int) -> None:
        """Count tokens as computed, and cache the blocks that they fill.

        Blocks are cached before the step runs: it writes keys and values layer by layer, before any
        of its sequences reads them. A block whose last token is in flight has no hash yet.
        """
        size = self.caches.block_size
        first = sequence.num_computed // size
        sequence.num_computed += count
        if sequence.num_computed // size > first:
            self._cache_blocks(sequence, first)

    def _cache_blocks(self, sequence: TokenSequence, first: int) -> None:
        """Cache the full blocks from index `first` on, unless prompts are computed whole."""
        if not self.limits.keeps_prompts_whole:
            self.caches.cache_blocks(sequence, first)

    def _pending_hashes(self) -> set[bytes]:
        """Return the hashes that running sequences are about to add to the cache."""
        return {each for sequence in self.running for each in self.caches.pending_hashes(sequence)}


def _share(wanted: int, left: int, slack: int, backlog: Backlog) -> int:
    """Return the tokens that a prompt gets of the `left` ones of a step. wanted: its tokens."""
    others = backlog.count - 1
    if others and wanted > _LONG_PROMPT_RATIO * (backlog.tokens - wanted) / others:
        left -= min(left // 2, max(backlog.tokens - wanted, 0))
    return wanted if wanted <= left + slack else left


def _charge_tenants(
    decodes: Sequence[TokenSequence], drafts: Sequence[Chunk], prefills: Sequence[Chunk]
) -> None:
    """Add a step to the service of its tenants."""
    for sequence in (*decodes, *(chunk.sequence for chunk in drafts)):
        sequence.tenant.served += GENERATED_WEIGHT
    for chunk in prefills:
        chunk.sequence.tenant.served += chunk.count
