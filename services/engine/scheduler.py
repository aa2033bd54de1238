"""Decides what each step computes. Policy alone: no tensors, no clock, no input or output.

One step is a flat batch under a token budget. Sequences that decode come first, so that a long
prompt never stalls running streams; the rest of the budget goes to prompts, in chunks. When blocks
run out, the sequence that is last in order gives up its own and is computed again later.
"""

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from operator import attrgetter

from services.engine.block_pool import BlockPool
from services.engine.sequence import Sequence, SequenceState
from services.engine.speculation import propose

__all__ = ["Chunk", "Scheduler", "SchedulerLimits", "StepPlan"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step may hold."""

    max_running: int
    """Sequences that hold blocks at once"""
    max_step_tokens: int
    """Tokens of a step without decodes"""
    mixed_step_tokens: int
    """Tokens of a step that also decodes: what running streams wait for"""
    block_size: int
    max_draft_tokens: int = 0
    """Tokens that are guessed in one step, over all sequences; 0 = no speculation"""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence that a step computes."""

    sequence: Sequence
    start: int
    count: int
    draft: Items[int] = ()
    """Guessed tokens, the last of `count`; they are not part of the sequence yet"""

    @property
    def end(self) -> int:
        """One past the last token computed."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The batch of one step."""

    chunks: Items[Chunk]
    """Decodes first"""
    num_decodes: int
    """Chunks that hold just the newest token of their sequence, after all others were computed"""


class Scheduler:
    """Owns the order of sequences and, through the pool, their blocks."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.queued_tokens = 0
        self.preemptions = 0

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

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens can ever run."""
        return self._blocks_for(tokens) <= self.pool.num_blocks

    def plan(self) -> StepPlan:
        """Choose the next batch, allocate its blocks, and count its tokens as computed."""
        preempted = self.preemptions
        newest = list(self._plan_decodes())
        decodes = [chunk for chunk in newest if not chunk.draft]
        drafts = [chunk for chunk in newest if chunk.draft]
        budget = self._prefill_budget(len(newest))
        prefills = [*drafts, *self._plan_prefills(budget)]
        if self.preemptions == preempted:
            budget -= sum(chunk.count for chunk in prefills[len(drafts) :])
            prefills += self._admit(budget)
        return StepPlan(chunks=[*decodes, *prefills], num_decodes=len(decodes))

    def accept(self, chunk: Chunk, kept: int) -> None:
        """Count the first guesses of a chunk as computed: they turned out right.

        What was computed for the others is written again when their places are.
        """
        sequence = chunk.sequence
        sequence.draft_width.learn(len(chunk.draft), kept)
        if sequence.state is SequenceState.RUNNING:
            self._compute(sequence, kept)

    def _plan_decodes(self) -> Iterator[Chunk]:
        guesses = self.limits.max_draft_tokens
        # `running` is in order, so that whoever is preempted comes after those already planned
        for sequence in list(self.running):
            if sequence.state is not SequenceState.RUNNING or sequence.uncomputed != 1:
                continue
            if sequence.credit == 0 or not self._make_room(sequence):
                continue
            chunk = self._compute(sequence, 1)
            if guesses and (draft := self._draft(sequence, guesses)):
                guesses -= len(draft)
                chunk = Chunk(sequence, chunk.start, 1 + len(draft), draft)
            yield chunk

    def _plan_prefills(self, budget: int) -> Iterator[Chunk]:
        for sequence in self.running:
            count = min(budget, sequence.uncomputed)
            if sequence.uncomputed > 1 and count > 0:
                budget -= count
                yield self._compute(sequence, count)

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
            yield self._compute(sequence, count)
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

    def _compute(self, sequence: Sequence, count: int) -> Chunk:
        """Count tokens as computed, and make the blocks they fill known to the prefix cache.

        Known at once: keys and values of a step are written, layer by layer, before any sequence of
        the step reads them.
        """
        chunk = Chunk(sequence, sequence.num_computed, count)
        sequence.num_computed += count
        size = self.limits.block_size
        for index in range(chunk.start // size, chunk.end // size):
            self.pool.name(sequence.blocks[index], sequence.block_name(index))
        return chunk

    def _draft(self, sequence: Sequence, most: int) -> list[int]:
        """Guesses for what follows the newest token, with blocks for them; none without."""
        if sequence.request.command.constrained:
            return []
        room = sequence.max_tokens - sequence.position - 1
        if sequence.credit is not None:
            room = min(room, sequence.credit - 1)
        width = min(sequence.draft_width.next(), most, room)
        draft = propose(sequence.tokens, width)
        missing = self._blocks_for(sequence.length + len(draft)) - len(sequence.blocks)
        if not draft or missing > self.pool.num_free:
            return []
        sequence.blocks += self.pool.allocate(missing)
        return draft

    def _make_room(self, sequence: Sequence) -> bool:
        """Get the block for the sequence's newest token, by preemption if need be."""
        while len(sequence.blocks) < self._blocks_for(sequence.length):
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

    def _prefill_budget(self, num_decodes: int) -> int:
        if num_decodes == 0:
            return self.limits.max_step_tokens
        # prompts go on, if slowly, however many streams run
        return max(self.limits.mixed_step_tokens - num_decodes, self.limits.block_size)

    def _promised_blocks(self) -> set[bytes]:
        return {name for sequence in self.running for name in self._promised_by(sequence)}

    def _promised_by(self, sequence: Sequence) -> Iterator[bytes]:
        """Names of the full blocks that a sequence still has to compute."""
        size = self.limits.block_size
        for index in range(sequence.num_computed // size, sequence.length // size):
            yield sequence.block_name(index)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)
