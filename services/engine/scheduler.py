"""Decides what each step computes. Policy alone: no tensors, no clock, no input or output.

One step is a flat batch. Sequences that decode come first; prompts are added in chunks, as far as
that does not slow the streams down too much. When blocks run out, the sequence that is last in
order gives up its own and is computed again later.
"""

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter

from services.engine.block_pool import BlockPool
from services.engine.sequence import Sequence, SequenceState
from services.engine.step_cost import StepCost

__all__ = ["Chunk", "Scheduler", "SchedulerLimits", "StepPlan"]

_CROWD, _SHORT_CROWD = 4, 12
"""Where prompts and streams share a step, each prompt but the first counts for as many streams: the
first number where prompts are long, the second where they are short. In large chunks a crowd of
prompts is done sooner, and its streams then run together"""
_SHORT_STEPS = 4
"""A prompt that takes more steps beside streams than this is no longer short"""
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
    most_logits: int = 256
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
        self.waiting: list[Sequence] = []
        self.queued_tokens = 0
        self.preemptions = 0
        self._cost = StepCost(limits.rows_at_once)

    def add(self, sequence: Sequence) -> int:
        """Queue a sequence. Returns how many of its tokens the prefix cache holds now."""
        found = len(self.pool.find(sequence.readable_names())) * self.limits.block_size
        sequence.queued_tokens = sequence.length - found
        self.queued_tokens += sequence.queued_tokens
        insort(self.waiting, sequence, key=attrgetter("order"))
        return found

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended, and free its blocks."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            self.queued_tokens -= sequence.queued_tokens
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self.pool.release(sequence.blocks)
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

    def plan(self) -> StepPlan:
        """Choose the next batch, allocate its blocks, and count its tokens as computed."""
        preempted = self.preemptions
        decodes, drafts = self._plan_decodes()
        decode_tokens = len(decodes) + sum(chunk.count for chunk in drafts)
        prompts = [s for s in self.running if s.uncomputed > 1]
        budget = self._prefill_budget(len(decodes) + len(drafts), decode_tokens, prompts)
        prefills = list(self._plan_prefills(prompts, budget))
        if self.preemptions == preempted:
            prefills += self._admit(budget - sum(chunk.count for chunk in prefills))
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

    def _plan_prefills(self, prompts: Items[Sequence], budget: int) -> Iterator[Chunk]:
        for sequence in prompts:
            count = min(budget, sequence.uncomputed)
            if count > 0:
                budget -= count
                yield self._chunk(sequence, count)

    def _admit(self, budget: int) -> Iterator[Chunk]:
        """Start waiting sequences while budget and blocks last.

        One whose next block is about to be computed by another sequence waits for it, so that a
        prefix that arrives many times together is computed once.
        """
        promised = self._promised_blocks() if self.waiting else set()
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.limits.max_running:
                return
            if sequence.awaited_block in promised:
                continue
            names = sequence.readable_names()
            found = self.pool.find(names)
            sequence.awaited_block = names[len(found)] if len(found) < len(names) else None
            if sequence.awaited_block in promised:
                continue
            if not self._start(sequence, found):
                return
            count = min(budget, sequence.uncomputed)
            budget -= count
            yield self._chunk(sequence, count)
            promised.update(self._promised_by(sequence))

    def _start(self, sequence: Sequence, found: list[int]) -> bool:
        """Give a waiting sequence its blocks; False if there are too few."""
        self.pool.hold(found)
        missing = self._blocks_for(sequence.length) - len(found)
        # room for every running sequence to grow once, or the newcomer would soon be preempted
        if missing + len(self.running) > self.pool.num_free and self.running:
            self.pool.release(found)
            return False
        sequence.blocks = found + self.pool.allocate(missing)
        sequence.num_computed = len(found) * self.limits.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_length)
        sequence.state = SequenceState.RUNNING
        self.waiting.remove(sequence)
        self.queued_tokens -= sequence.queued_tokens
        insort(self.running, sequence, key=attrgetter("order"))
        return True

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
        return min(_MOST_FORCED, self.limits.most_logits // len(self.running) - 1)

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
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.held_logits = None
        sequence.state = SequenceState.WAITING
        self.preemptions += 1
        self.add(sequence)

    def _prefill_budget(self, streams: int, decode_tokens: int, prompts: Items[Sequence]) -> int:
        """Prompt tokens for a step in which so many streams decode, and `prompts` go on."""
        if streams == 0:
            return self.limits.max_step_tokens
        crowd = [*prompts, *self.waiting[: self.limits.max_running - len(self.running)]]
        factor = self.limits.mixed_step_factor
        budget = self._cost.prompt_tokens(decode_tokens, factor)
        if budget is None or not crowd:
            return 0
        # where many wait for their first token, those that wait for their next do so in proportion
        steps = sum(sequence.queued_tokens for sequence in crowd) / len(crowd) / max(budget, 1)
        weight = min(max(_SHORT_CROWD * _SHORT_STEPS / steps, _CROWD), _SHORT_CROWD)
        factor *= max(1.0, weight * (len(crowd) - 1) / streams)
        budget = self._cost.prompt_tokens(decode_tokens, factor) or 0
        # so many rows, or more: prompts go on, if slowly, however many streams run
        size = self.limits.rows_at_once
        rows = (decode_tokens + budget) // size * size
        least = (-(-decode_tokens // size) + 1) * size
        return min(max(rows, least) - decode_tokens, self.limits.max_step_tokens)

    def _promised_blocks(self) -> set[bytes]:
        return {name for sequence in self.running for name in self._promised_by(sequence)}

    def _promised_by(self, sequence: Sequence) -> Iterator[bytes]:
        """Names of the full blocks that a sequence still has to compute."""
        size = self.limits.block_size
        for index in range(sequence.num_computed // size, sequence.length // size):
            yield sequence.block_name(index)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)


def _room(sequence: Sequence) -> int:
    """Tokens that may still be drawn behind the next one."""
    room = sequence.max_tokens - sequence.position - 1
    if sequence.credit is not None:
        room = min(room, sequence.credit - 1)
    return max(room, 0)
