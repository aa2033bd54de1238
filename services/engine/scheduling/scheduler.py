"""Decides what each step computes. Policy alone: no tensors, no clock, no input or output.

One step is a flat batch. Sequences that decode come first; prompts are added in chunks, as far as
that does not slow the streams down too much. When blocks or places run out, a sequence gives up
its own and is computed again later: one that is paused, that has a lower priority, or whose owner
holds the most.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import attrgetter
from typing import TypeVar

from services.engine.scheduling.block_pool import BlockPool
from services.engine.scheduling.prompt_budget import Allowance, Crowd, PromptBudget
from services.engine.scheduling.sequence import Sequence, SequenceState
from services.engine.scheduling.step_cost import StepCost
from services.engine.scheduling.tenants import GENERATED_WEIGHT, Tenants
from services.engine.scheduling.waiting_queue import Turn, Turns, WaitingQueue

__all__ = ["Chunk", "Scheduler", "SchedulerLimits", "StepPlan"]

K = TypeVar("K", bound=Hashable)

_PAUSE_SECONDS = 1.0
"""A sequence without credit for so long may be preempted for another one; less is a round trip"""
_MUCH_LONGER = 4
"""A prompt so many times as long as the others on average leaves them a half of each step"""
_NEWCOMERS = 4
"""Waiting sequences for which others may be preempted: the first in turn"""
_SECONDS_PER_CHOICE = 0.25
"""Each choice of a request queues as if it had come so much later than the one before it: requests
of few choices pass the later ones of requests that have many"""
_GUARANTEED_SHARE = 8
"""A tenant with newcomers gets one in so many places at once, however many another one holds"""
_MOST_ALONE = 15
"""Guesses of a stream that no other one runs beside"""
_MOST_FORCED = 16
"""Tokens without a choice that are computed together where each is scored"""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step may hold."""

    max_running: int
    """Sequences that hold blocks at once"""
    max_step_tokens: int
    """Tokens of a step without decodes"""
    mixed_step_factor: float
    """How many times as long as without prompts a step may take that also decodes"""
    block_size: int
    rows_at_once: int
    """A product of fewer rows takes as long as one of so many: steps are filled up to a multiple"""
    speculate: bool = False
    """Whether tokens are guessed"""
    max_logit_rows: int = 256
    """Rows of a step whose logits there is memory for"""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence that a step computes."""

    sequence: Sequence
    start: int
    count: int
    draft: Items[int] = ()
    """Guessed tokens, the last of `count`; they are not part of the sequence yet"""
    kept: int = 1
    """Of how many tokens, the last of `count`, somebody looks at the hidden states"""

    @property
    def end(self) -> int:
        """One past the last token computed."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The batch of one step: first `decodes`, then `chunks`."""

    decodes: Items[Sequence]
    """Their newest token is computed, after all others were; a row each"""
    chunks: Items[Chunk]
    """Newest tokens with guesses behind them, then prompts"""
    decode_tokens: int
    """Newest tokens, and guesses behind them"""
    prompt_tokens: int
    """All others"""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.decodes and not self.chunks


class Scheduler:
    """Owns the order of sequences and, through the pool, their blocks."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue()
        self.tenants = Tenants()
        self.queued_tokens = 0
        self.preemptions = 0
        self._cost = StepCost(limits.rows_at_once)
        self._budget = PromptBudget(
            self._cost, limits.max_step_tokens, limits.mixed_step_factor, limits.rows_at_once
        )

    def add(self, sequence: Sequence) -> int:
        """Queue a sequence. Returns how many of its tokens the prefix cache holds now."""
        found = len(self.pool.find(sequence.readable_names())) * self.limits.block_size
        sequence.queued_tokens = sequence.length - found
        self.queued_tokens += sequence.queued_tokens
        command = sequence.request.command
        sequence.tenant = self.tenants.enter(command.cache_salt)
        sequence.tenant.waiting += 1
        delay = self._cost.prompt_seconds(sequence.queued_tokens)
        sequence.due = command.arrival + delay + _SECONDS_PER_CHOICE * sequence.index
        self.waiting.add(sequence)
        return found

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended, and free its blocks."""
        if sequence.state is SequenceState.WAITING:
            self._leave_queue(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self._leave_place(sequence)
        self.tenants.leave(sequence.tenant)
        sequence.blocks = []
        sequence.held_logits = None
        sequence.state = SequenceState.FINISHED

    @property
    def free_places(self) -> int:
        """Sequences that could run beside those that do, if there are blocks for them."""
        return self.limits.max_running - len(self.running)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens can ever run."""
        return self._blocks_for(tokens) <= self.pool.num_blocks

    def plan(self, now: float) -> StepPlan:
        """Choose the next batch, allocate its blocks, and count its tokens as computed.

        now: seconds, on the clock of the requests' arrivals.
        """
        if len(self.waiting):
            self._make_place(now)
        preempted = self.preemptions
        decodes, drafts = self._plan_decodes()
        decode_tokens = len(decodes) + sum(chunk.count for chunk in drafts)
        prompts = [s for s in self.running if s.uncomputed > 1]
        crowd = self._crowd(prompts)
        allowance = self._budget.allow(len(decodes) + len(drafts), decode_tokens, crowd)
        prefills: list[Chunk] = []
        if allowance.tokens:
            turns = Turns(prompts, self.waiting, self._turn(now, prompts))
            if self.preemptions > preempted:
                turns.end_starts()
            prefills += self._plan_prefills(turns, allowance, crowd)
        if len(self.tenants) > 1:
            self._count_service(decodes, drafts, prefills)
        return StepPlan(
            decodes=decodes,
            chunks=[*drafts, *prefills],
            decode_tokens=decode_tokens,
            prompt_tokens=sum(chunk.count for chunk in prefills),
        )

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """What a step took: later ones are planned accordingly."""
        self._cost.learn(plan.decode_tokens, plan.prompt_tokens, seconds)

    def accept(self, sequence: Sequence, draft: Items[int]) -> None:
        """Count guesses as computed that have come true, but never the newest token.

        What was computed for the others is written again when their places are.
        """
        came = sequence.tokens[sequence.num_computed : -1].tolist()
        pairs = zip(draft, came, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        sequence.draft_width.learn(len(draft), kept)
        if sequence.state is SequenceState.RUNNING:
            self._compute(sequence, kept)

    def guess_ahead(self) -> Iterator[Sequence]:
        """Guess for constrained sequences, whose masks must be asked for; those that got some."""
        if not self.limits.speculate:
            return
        most = self._draft_room()
        for sequence in self.running if most else ():
            is_new = sequence.guesses[0] != sequence.position and sequence.mask is None
            if sequence.request.command.constrained and is_new and sequence.uncomputed == 1:
                guesses = self._guess(sequence, most)
                sequence.guesses = sequence.position, guesses
                if guesses:
                    yield sequence

    def settle(self, sequence: Sequence) -> None:
        """A token that was in flight has been appended: its block can be named, if that is full."""
        sequence.in_flight -= 1
        if sequence.state is SequenceState.RUNNING:
            self._name_blocks(sequence, (sequence.length - 1) // self.limits.block_size)

    def withdraw(self, sequence: Sequence) -> None:
        """Take back what was computed for the newest token: it turned out to be another one."""
        if sequence.state is SequenceState.RUNNING:
            sequence.num_computed -= 1

    def void(self, sequence: Sequence, start: int) -> None:
        """Forget the blocks that hold tokens from `start` on: a step failed to write them.

        Another sequence of that step may have found them in the prefix cache: it is preempted.
        """
        blocks = sequence.blocks[start // self.limits.block_size :]
        self.pool.void(blocks)
        unwritten = set(blocks)
        for other in list(self.running):
            if other is not sequence and not unwritten.isdisjoint(other.blocks):
                self._preempt(other)

    def _plan_decodes(self) -> tuple[list[Sequence], list[Chunk]]:
        """Sequences whose newest token is computed: those without guesses, and those with them."""
        decodes: list[Sequence] = []
        drafts: list[Chunk] = []
        width = self._draft_room() if self.limits.speculate else 0
        # `running` is in order, so that whoever is preempted comes after those already planned
        for sequence in list(self.running):
            if sequence.uncomputed == 0 or sequence.state is not SequenceState.RUNNING:
                continue
            is_next = sequence.uncomputed == 1  # else it is a prompt, or has forced tokens
            if is_next and not sequence.has_credit:
                continue
            if not self._make_room(sequence) or not is_next:
                continue
            start = sequence.num_computed
            self._compute(sequence, 1)
            if draft := self._draft(sequence, width):
                rows = 1 + len(draft)
                drafts.append(Chunk(sequence, start, rows, draft, kept=rows))
            else:
                decodes.append(sequence)
        return decodes, drafts

    def _plan_prefills(self, turns: Turns, allowance: Allowance, crowd: Crowd) -> Iterator[Chunk]:
        """Continue prompts and start waiting sequences, while allowance, places and blocks last.

        One whose next block is about to be computed by another sequence waits for it, so that a
        prefix that arrives many times together is computed once.
        """
        left = allowance.tokens
        promised = self._promised_blocks() if len(self.waiting) else set()
        for sequence in turns:
            if left <= 0:
                return
            if sequence.state is SequenceState.WAITING:
                if len(self.running) >= self.limits.max_running:
                    turns.end_starts()
                    continue
                if sequence.awaited_block in promised:
                    continue
                names = sequence.readable_names()
                found = self.pool.find(names)
                sequence.awaited_block = names[len(found)] if len(found) < len(names) else None
                if sequence.awaited_block in promised:
                    continue
                if not self._start(sequence, found):
                    turns.end_starts()
                    continue
            count = _share(sequence.uncomputed, left, allowance.slack, crowd)
            left -= count
            yield self._chunk(sequence, count)
            promised.update(self._promised_by(sequence))

    def _crowd(self, prompts: Items[Sequence]) -> Crowd:
        """Prompts under way, and as many of those that wait as there are places for."""
        places = min(len(self.waiting), max(self.free_places, 0))
        tokens = sum(sequence.uncomputed for sequence in prompts)
        if places:
            tokens += self.queued_tokens * places // len(self.waiting)
        return Crowd(len(prompts) + places, tokens)

    def _turn(self, now: float, prompts: Items[Sequence]) -> Turn:
        priorities = [sequence.request.command.priority for sequence in prompts]
        if self.waiting.highest is not None:
            priorities.append(self.waiting.highest)
        return Turn(now, max(priorities, default=0))

    def _count_service(
        self, decodes: Items[Sequence], drafts: Items[Chunk], prefills: Items[Chunk]
    ) -> None:
        """Charge the tenants with a step."""
        for sequence in decodes:
            sequence.tenant.served += GENERATED_WEIGHT
        for chunk in drafts:
            chunk.sequence.tenant.served += GENERATED_WEIGHT
        for chunk in prefills:
            chunk.sequence.tenant.served += chunk.count

    def _make_place(self, now: float) -> None:
        """Start a sequence whose turn it is by preempting others, if some should yield to it."""
        turn = self._turn(now, ())
        for newcomer in islice(self.waiting.in_turn(turn), _NEWCOMERS):
            found = self.pool.find(newcomer.readable_names())
            missing = self._missing(newcomer, found) - self.pool.num_free
            if missing <= 0 < self.free_places:
                return  # it starts as it is
            if victims := self._enough_victims(newcomer, missing, now):
                for victim in victims:
                    self._preempt(victim)
                self._start(newcomer, found)
                return

    def _enough_victims(self, newcomer: Sequence, missing: int, now: float) -> list[Sequence]:
        """Sequences whose blocks and places a newcomer can start with; none where they are too few.

        missing: blocks beyond those that are free.
        """
        places = 1 - self.free_places
        victims: list[Sequence] = []
        for victim in self._victims(newcomer, now):
            victims.append(victim)
            # one runs less beside the newcomer, for which room to grow need not be left
            missing -= self.pool.count_freed(victim.blocks) + 1
            places -= 1
            if missing <= 0 and places <= 0:
                return victims
        return []

    def _victims(self, newcomer: Sequence, now: float) -> Iterator[Sequence]:
        """Running sequences that should yield to a newcomer, in the order in which they do."""
        priority = newcomer.request.command.priority
        last_first = self.running[::-1]
        paused = [
            s
            for s in last_first
            if s.starved_since is not None
            and s.starved_since <= now - _PAUSE_SECONDS
            and s.uncomputed <= 1
        ]
        yield from paused
        others = [s for s in last_first if s not in paused]
        yield from (s for s in others if s.request.command.priority < priority)
        if newcomer.cached_tokens is None:  # it has never run: none is preempted to and fro
            peers = [s for s in others if s.request.command.priority == priority]
            yield from self._greediest(newcomer, peers)

    def _greediest(self, newcomer: Sequence, peers: list[Sequence]) -> Iterator[Sequence]:
        """Sequences of the tenants, or of the newcomer's own tenant's requests, that hold most."""
        tenant = newcomer.tenant
        held = Counter(s.tenant.name for s in peers)
        guaranteed = max(1, self.limits.max_running // _GUARANTEED_SHARE)
        if tenant.running < guaranteed:
            del held[tenant.name]
            yield from _from_largest(held, peers, tenant.running + 1, lambda s: s.tenant.name)
        if newcomer.request.running == 0:
            own = [s for s in peers if s.tenant is tenant]
            requests = Counter(id(s.request) for s in own)
            yield from _from_largest(requests, own, 1, lambda s: id(s.request))

    def _missing(self, sequence: Sequence, found: Items[int]) -> int:
        """Free blocks that a waiting sequence needs to start, beside those found in the cache: room
        for every running sequence to grow once, too, or the newcomer would soon be preempted."""
        held_by_none = self.pool.count_unheld(found)
        return self._blocks_for(sequence.length) - len(found) + held_by_none + len(self.running)

    def _start(self, sequence: Sequence, found: list[int]) -> bool:
        """Give a waiting sequence its blocks; False if there are too few."""
        if self.running and self._missing(sequence, found) > self.pool.num_free:
            return False
        self.pool.hold(found)
        sequence.blocks = found + self.pool.allocate(self._blocks_for(sequence.length) - len(found))
        sequence.num_computed = len(found) * self.limits.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_length)
        self._leave_queue(sequence)
        sequence.state = SequenceState.RUNNING
        sequence.tenant.running += 1
        sequence.request.running += 1
        insort(self.running, sequence, key=attrgetter("order"))
        return True

    def _leave_queue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.queued_tokens -= sequence.queued_tokens
        sequence.tenant.waiting -= 1

    def _leave_place(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.tenant.running -= 1
        sequence.request.running -= 1

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        start = sequence.num_computed
        self._compute(sequence, count)
        # a token is scored by what was computed for the one before it
        is_scored = sequence.scored < min(start + count + 1, sequence.prompt_length)
        return Chunk(sequence, start, count, kept=count if is_scored else 1)

    def _compute(self, sequence: Sequence, count: int) -> None:
        """Count tokens as computed, and make the blocks they fill known to the prefix cache.

        Known at once: keys and values of a step are written, layer by layer, before any sequence of
        the step reads them. But a block is named after its tokens: not before the last is here.
        """
        size = self.limits.block_size
        first = sequence.num_computed // size
        sequence.num_computed += count
        if sequence.num_computed // size > first:
            self._name_blocks(sequence, first)

    def _name_blocks(self, sequence: Sequence, first: int) -> None:
        """Make the full blocks from `first` on known."""
        known = min(sequence.num_computed, sequence.length)
        for index in range(first, known // self.limits.block_size):
            self.pool.name(sequence.blocks[index], sequence.block_name(index))

    def _draft_room(self) -> int:
        """Guesses that each stream may make: as many as cost the others next to nothing.

        A step over half of the rows that products compute at once takes little longer than over
        one: 5 % with AMX. A stream that is alone guesses as many as have come true of late.
        """
        streams = sum(sequence.uncomputed == 1 for sequence in self.running)
        if streams == 1:
            return _MOST_ALONE
        return max(self.limits.rows_at_once // 2 - streams, 0) // max(streams, 1)

    def _forced_room(self) -> int:
        """Forced tokens that each stream may have computed at once, beside its newest one."""
        return min(_MOST_FORCED, self.limits.max_logit_rows // len(self.running) - 1)

    def _draft(self, sequence: Sequence, most: int) -> list[int]:
        """Guesses for what follows the newest token, with blocks for them; none without."""
        if sequence.in_flight or not (most or sequence.forced) or not sequence.is_guessable:
            return []
        if sequence.forced:
            draft = list(sequence.forced[: min(self._forced_room(), _room(sequence))])
        elif sequence.request.command.constrained:
            position, guesses = sequence.guesses
            draft = list(guesses[:most]) if position == sequence.position else []
        else:
            draft = self._guess(sequence, most)
        missing = self._blocks_for(sequence.length + len(draft)) - len(sequence.blocks)
        if not draft or missing > self.pool.num_free:
            return []
        sequence.blocks += self.pool.allocate(missing)
        return draft

    def _guess(self, sequence: Sequence, most: int) -> list[int]:
        if not sequence.is_guessable:
            return []
        width = min(sequence.draft_width.next(), most, _room(sequence))
        return sequence.precedents.propose(sequence.tokens, width) if width else []

    def _make_room(self, sequence: Sequence) -> bool:
        """Get the block for the sequence's newest token, by preemption if need be."""
        tokens = sequence.length + sequence.in_flight
        while len(sequence.blocks) * self.limits.block_size < tokens:
            if self.pool.num_free:
                sequence.blocks += self.pool.allocate(1)
                continue
            # whoever is paused is in no plan, and the last comes after those already planned
            paused = (s for s in reversed(self.running) if s.is_paused and s.uncomputed <= 1)
            victim = next(paused, self.running[-1])
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._leave_place(sequence)
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.held_logits = None
        sequence.state = SequenceState.WAITING
        self.preemptions += 1
        self.add(sequence)

    def _promised_blocks(self) -> set[bytes]:
        return {name for sequence in self.running for name in self._promised_by(sequence)}

    def _promised_by(self, sequence: Sequence) -> Iterator[bytes]:
        """Names of the full blocks that a sequence still has to compute."""
        size = self.limits.block_size
        for index in range(sequence.num_computed // size, sequence.length // size):
            yield sequence.block_name(index)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)


def _share(wanted: int, left: int, slack: int, crowd: Crowd) -> int:
    """How many of the tokens that a prompt wants it gets of those left in a step."""
    others = crowd.count - 1
    if others and wanted > _MUCH_LONGER * (crowd.tokens - wanted) / others:
        left -= min(left // 2, max(crowd.tokens - wanted, 0))
    return wanted if wanted <= left + slack else left


def _from_largest(
    held: Counter[K], sequences: Items[Sequence], least: int, holder: Callable[[Sequence], K]
) -> Iterator[Sequence]:
    """Sequences of the holders that have most, while these have more than `least`."""
    mine: dict[K, list[Sequence]] = {}
    for sequence in reversed(sequences):
        mine.setdefault(holder(sequence), []).append(sequence)
    while held:
        name, count = held.most_common(1)[0]
        if count <= least:
            return
        held[name] -= 1
        yield mine[name].pop()


def _room(sequence: Sequence) -> int:
    """Tokens that may still be drawn behind the next one."""
    room = sequence.max_tokens - sequence.position - 1
    if sequence.credit is not None:
        room = min(room, sequence.credit - 1)
    return max(room, 0)
