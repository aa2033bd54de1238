"""Slots of recurrent states: those of running sequences, and snapshots in the prefix cache.

A step reads a sequence's state from one slot and writes the next state to another slot. So a failed
step, a withdrawn token and a rejected draft need no copy: the slot of the previous state is still
there. A snapshot is a slot that was cached under the hash of the block that ends at its state. It
is cached when the next step is planned, because the runs of a step must not read states that other
sequences write in the same step.
"""

from collections.abc import Iterator

from services.engine.scheduling.block_pool import BlockPool
from services.engine.scheduling.cache_limits import CacheLimits
from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.sequence_cache import PlannedState, SequenceStates, Snapshot

__all__ = ["SLOTS_OF_A_SEQUENCE", "StatePool"]

SLOTS_OF_A_SEQUENCE = 2
"""Number of slots of a running sequence, for the states before and behind a step"""


class StatePool:
    """Slots of the states of all recurrent layers."""

    def __init__(self, limits: CacheLimits) -> None:
        self.pool = BlockPool(limits.state_slots)
        self._size = limits.block_size
        self.interval = limits.snapshot_interval
        """Number of tokens between two snapshots of a prompt"""
        self._holders = 0
        """Sequences that hold slots"""
        self._unpublished: dict[TokenSequence, None] = {}
        """Sequences whose newest step writes snapshots"""

    def missing(self, found: int) -> int:
        """Return the number of slots that a newcomer lacks.

        found: slot of its snapshot, -1 = none.

        Running sequences that hold fewer slots than they will need have a claim to the rest.
        """
        unheld = self.pool.count_unheld((found,)) if found >= 0 else 0
        return SLOTS_OF_A_SEQUENCE + unheld - self._spare

    def start(self, sequence: TokenSequence, tokens: int, found: int) -> None:
        """Give a sequence the state behind its first `tokens` tokens.

        found: slot of that state, -1 = zeros. Raises OutOfBlocksError if too few slots are free.
        """
        if found >= 0:
            self.pool.hold((found,))
        [reserved] = self.pool.allocate(1)
        sequence.states = SequenceStates(sequence.length, found, tokens, reserved=reserved)
        self._holders += 1

    def advance(self, sequence: TokenSequence) -> bool:
        """Take over the state behind the last computed token, and reserve a slot for the next.

        If the newest step wrote no state there, the previous state stays. Returns False if no slot
        is free.
        """
        states = _states(sequence)
        if states.planned:
            self._publish(sequence)
            reached = [each for each in states.planned if each.end <= sequence.num_computed]
            if reached:
                self._hold_instead(states, reached[-1])
            self.pool.release([each.slot for each in states.planned])
            states.planned = []
        if states.reserved is None:
            if not self.pool.num_free:
                return False
            [states.reserved] = self.pool.allocate(1)
        return True

    def plan(self, sequence: TokenSequence, end: int) -> None:
        """Plan the recurrent states that a step up to the token before `end` writes.

        `advance` must have returned True. A snapshot within the step takes a spare slot.
        """
        states = _states(sequence)
        assert states.reserved is not None
        snapshots = self._snapshots(states, sequence.length, end)
        last = snapshots.pop(end, None)
        for each in sorted(snapshots):
            if self._spare <= 0:
                break
            [slot] = self.pool.allocate(1)
            states.planned.append(PlannedState(each, slot, snapshots[each]))
        states.planned.append(PlannedState(end, states.reserved, last))
        states.reserved = None
        if any(each.snapshot for each in states.planned):
            self._unpublished[sequence] = None

    def publish(self) -> None:
        """Cache the snapshots of the newest step, which the next step may read."""
        for sequence in [*self._unpublished]:
            self._publish(sequence)

    def drop_snapshots(self, sequence: TokenSequence) -> None:
        """Drop the snapshots of a sequence's newest step, because the step failed."""
        self._unpublished.pop(sequence, None)
        for state in sequence.states.planned if sequence.states is not None else ():
            state.snapshot = None

    def pending_hashes(self, sequence: TokenSequence) -> Iterator[bytes]:
        """Yield the hashes of the snapshots that a running sequence is about to write."""
        states = _states(sequence)
        is_written = sequence not in self._unpublished
        start = sequence.num_computed if is_written else states.source_end
        for end in self._prompt_snapshots(start, states.prompt_end, states.prompt_end):
            yield sequence.block_hash(end // self._size - 1)

    def fork(self, beam: TokenSequence, parent: TokenSequence) -> None:
        """Give a beam its parent's state behind the last computed token."""
        slot = _states(parent).slot_at(parent.num_computed)
        if slot >= 0:
            self.pool.hold((slot,))
        beam.states = SequenceStates(parent.length, slot, parent.num_computed)
        self._holders += 1

    def release(self, sequence: TokenSequence) -> None:
        """Release all slots of a sequence. Its snapshots stay cached."""
        if sequence.states is None:
            return
        self._publish(sequence)
        self.pool.release(sequence.states.held)
        sequence.states = None
        self._holders -= 1

    @property
    def _spare(self) -> int:
        """Number of free slots to which no running sequence has a claim."""
        held = self.pool.num_blocks - self.pool.num_free
        return self.pool.num_free - max(0, SLOTS_OF_A_SEQUENCE * self._holders - held)

    def _hold_instead(self, states: SequenceStates, reached: PlannedState) -> None:
        self.pool.hold((reached.slot,))
        if states.source >= 0:
            self.pool.release((states.source,))
        states.source, states.source_end = reached.slot, reached.end

    def _snapshots(self, states: SequenceStates, length: int, end: int) -> dict[int, Snapshot]:
        """Return the snapshots to keep of a step by their ends. length: tokens of the sequence."""
        start, border = states.source_end, end // self._size * self._size
        kept: dict[int, Snapshot] = {}
        if end >= length and border > start:  # the next prompt of a conversation continues from it
            kept[border] = Snapshot.ANSWER
        prompt = self._prompt_snapshots(start, end, states.prompt_end)
        return kept | dict.fromkeys(prompt, Snapshot.PROMPT)

    def _prompt_snapshots(self, start: int, end: int, prompt_end: int) -> Iterator[int]:
        """Yield the ends of a prompt's snapshots after `start`, up to `end`."""
        if start >= prompt_end:
            return
        # an equal prompt computes its last token, so it continues from the block border before
        last = (prompt_end - 1) // self._size * self._size
        first = (start // self.interval + 1) * self.interval
        yield from range(first, min(end + 1, last), self.interval)
        if start < last <= end:
            yield last

    def _publish(self, sequence: TokenSequence) -> None:
        """Cache the snapshots of a sequence whose tokens are computed and certain."""
        if sequence not in self._unpublished:
            return
        del self._unpublished[sequence]
        states = _states(sequence)
        known = min(sequence.num_computed, sequence.length)
        for state in states.planned:
            if state.snapshot is None or state.end > known:
                continue
            block_hash = sequence.block_hash(state.end // self._size - 1)
            self.pool.cache(state.slot, block_hash)
            if state.snapshot is Snapshot.ANSWER:
                if states.answer is not None:
                    self.pool.demote(states.answer)
                states.answer = block_hash


def _states(sequence: TokenSequence) -> SequenceStates:
    assert sequence.states is not None
    return sequence.states
