"""A device without tensors: it notes what each block and state slot holds, and checks each read."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

from services.common.block_hash import prefix_hashes
from services.common.cached_prefix import CachedGroup, longest_prefix, window_start
from services.engine.scheduling.cache_limits import CacheLimits
from services.engine.scheduling.cache_pools import BlockCopy, CachePools
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import Request, SequenceState, TokenSequence
from services.engine.scheduling.step_plan import Chunk, SchedulerLimits, StepPlan
from services.engine.scheduling.token_ids import Prompt
from tests.unit.engine.tiny import make_request

__all__ = ["History"]

Tokens = tuple[int, ...]
Hashes = list[int]
"""Hash of the first n tokens, by n"""


@dataclass
class Device:
    """Contents of the caches: each place holds a hash of the tokens that its value depends on."""

    limits: CacheLimits
    keys: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """By group, block and offset"""
    states: dict[int, int] = field(default_factory=dict)
    """By slot"""

    def run(self, rows: Sequence[tuple[TokenSequence, int, Tokens]]) -> None:
        """Compute a step. rows: each sequence, its first token, and its tokens up to the last."""
        hashed = [(sequence, start, _hashes(tokens)) for sequence, start, tokens in rows]
        self._write_keys(hashed)
        for row in hashed:
            self._read_keys(*row)
        if self.limits.state_slots:
            self._run_states(hashed)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        for group, source, target in copies:
            for offset in range(self.limits.block_size):
                self.keys[group, target, offset] = self.keys.get((group, source, offset), 0)

    def _place(self, group: int, sequence: TokenSequence, index: int) -> tuple[int, int, int]:
        block, offset = divmod(index, self.limits.block_size)
        table = sequence.tables[group]
        assert block >= table.first, "a token reads or writes a block that was given back"
        return group, table.blocks[block], offset

    def _write_keys(self, rows: Sequence[tuple[TokenSequence, int, Hashes]]) -> None:
        written: dict[tuple[int, int, int], int] = {}
        for sequence, start, hashes in rows:
            for group in range(len(self.limits.groups)):
                for index in range(start, len(hashes) - 1):
                    place, value = self._place(group, sequence, index), hashes[index + 1]
                    assert written.setdefault(place, value) == value, "two writers of a place"
        self.keys |= written

    def _read_keys(self, sequence: TokenSequence, start: int, hashes: Hashes) -> None:
        for number, group in enumerate(self.limits.groups):
            for index in range(window_start(start, group.window), len(hashes) - 1):
                place = self._place(number, sequence, index)
                assert self.keys[place] == hashes[index + 1], "keys of other tokens"

    def _run_states(self, rows: Sequence[tuple[TokenSequence, int, Hashes]]) -> None:
        written: dict[int, int] = {}
        read: set[int] = set()
        for sequence, start, hashes in rows:
            assert sequence.states is not None
            end = start
            own = {-1: 0}
            for run in sequence.states.runs:
                if run.source not in own:
                    own[run.source] = self.states[run.source]
                    read.add(run.source)
                assert own[run.source] == hashes[end], "a state of other tokens"
                end += run.length
                assert run.target not in written, "two writers of a slot"
                own[run.target] = written[run.target] = hashes[end]
            assert end == len(hashes) - 1, "the runs are not the tokens of the step"
        assert read.isdisjoint(written), "a step reads a state that it writes"
        self.states |= written


class History:
    """Requests, steps, failures and ends in a random order."""

    def __init__(
        self, limits: CacheLimits, seed: int, *, speculate: bool = False, overlaps: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.caches = CachePools(limits)
        self.caches.follow()
        running = self.random.randint(1, 6)
        chunk = limits.chunk_tokens
        self.scheduler = Scheduler(SchedulerLimits(running, chunk, 2.0, 4, speculate), self.caches)
        self.device = Device(limits)
        self.limits = limits
        self.overlaps = overlaps
        self.sequences: list[TokenSequence] = []
        self.reported = [set[bytes]() for _ in range(len(limits.groups) + 1)]
        self._handles = count(1)
        self._pending: list[tuple[TokenSequence, int, int]] = []
        """Sequences of the last step with their drawn tokens, assumed and final"""
        self.prompts: list[list[int]] = [[1] * 3]

    def play(self, steps: int) -> None:
        """Run steps among which requests come and go, and then until all have ended."""
        for _ in range(steps):
            if self.random.random() < 0.4:
                self._add()
            if self.sequences and self.random.random() < 0.05:
                self._end(self.random.choice(self.sequences))
            self.step()
        for _ in range(20_000):
            if not self.sequences:
                break
            self.step()
        assert not self.sequences, "a sequence waits forever"
        assert self.caches.num_free == self.caches.num_blocks

    def step(self) -> None:
        """Plan and run one step, and check the caches."""
        plan = self.scheduler.plan(0.0)
        if not plan.is_empty and not self.overlaps and self.random.random() < 0.05:
            self._fail(plan)
        elif self.overlaps:
            self._launch(plan)
        else:
            self.device.run([*self._rows(plan)])
            self._draw(plan)
        self.caches.check(self.scheduler.running)
        self._check_report()

    def _add(self) -> None:
        prompt = list(self.random.choice(self.prompts))
        del prompt[self.random.randint(1, len(prompt)) :]
        prompt += [self.random.randint(0, 1) for _ in range(self.random.randint(1, 40))]
        self.prompts.append(prompt)
        length = self.random.randint(1, 30)
        if not self.scheduler.fits(len(prompt) + length):
            return
        choices = self.random.choice((1, 1, 2))
        command = make_request(
            next(self._handles), [prompt], n=choices, max_tokens=length, arrival=0.0
        )
        request = Request(command)
        shared = Prompt(prompt, b"", self.limits.block_size)
        for index in range(choices):
            sequence = TokenSequence(request, index, shared, None, length)
            request.sequences.append(sequence)
            self.scheduler.add(sequence)
            self.sequences.append(sequence)

    def _rows(self, plan: StepPlan) -> Iterator[tuple[TokenSequence, int, Tokens]]:
        drawn = {sequence: assumed for sequence, assumed, _ in self._pending}
        for sequence in plan.decodes:
            tokens = _ids(sequence)
            if sequence.in_flight:
                tokens += (drawn[sequence],)
            yield sequence, len(tokens) - 1, tokens
        for chunk in plan.chunks:
            known = chunk.end - len(chunk.draft)
            tokens = _ids(chunk.sequence)[:known] + tuple(chunk.draft)
            yield chunk.sequence, chunk.start, tokens

    def _draw(self, plan: StepPlan) -> None:
        for sequence in plan.decodes:
            self._append(sequence, ())
        for chunk in plan.chunks:
            if chunk.end - len(chunk.draft) >= chunk.sequence.length:
                self._append(chunk.sequence, chunk.draft)
                if chunk.draft:
                    self.scheduler.accept(chunk.sequence, chunk.draft)

    def _append(self, sequence: TokenSequence, draft: Sequence[int]) -> None:
        """Append the token that follows, and those that follow accepted draft tokens."""
        for assumed in (*draft, None):
            if sequence.state is SequenceState.FINISHED:
                return
            token = _next_token(_ids(sequence))
            sequence.append(token)
            if sequence.position >= sequence.max_tokens:
                self._end(sequence)
            if token != assumed:
                return

    def _end(self, sequence: TokenSequence) -> None:
        self.scheduler.remove(sequence)
        self.sequences.remove(sequence)

    def _launch(self, plan: StepPlan) -> None:
        """Run a step whose tokens come after the launch of the next one."""
        self.device.run([*self._rows(plan)])
        assumed = {sequence: token for sequence, token, _ in self._pending}
        launched: list[tuple[TokenSequence, int, int]] = []
        sequences = [*plan.decodes, *(c.sequence for c in plan.chunks if _is_complete(c))]
        for sequence in sequences:
            ids = _ids(sequence)
            if sequence.in_flight:
                ids += (assumed[sequence],)
            token = _next_token(ids)
            guess = token if self.random.random() < 0.8 else 9
            launched.append((sequence, guess, token))
            sequence.in_flight += 1
        withdrawn: list[TokenSequence] = []
        for sequence, guess, token in self._pending:
            if sequence.state is SequenceState.FINISHED:
                continue
            sequence.append(token)
            if sequence.position >= sequence.max_tokens:
                self._end(sequence)
            elif guess != token and sequence in sequences:
                self.scheduler.withdraw(sequence)
                sequence.in_flight -= 1
                withdrawn.append(sequence)
            self.scheduler.settle(sequence)
        self._pending = [each for each in launched if each[0] not in withdrawn]

    def _fail(self, plan: StepPlan) -> None:
        """Let a step write rubbish, repeat it sequence by sequence, and let some fail again."""
        self.scheduler.uncache(plan)
        rows = [*self._rows(plan)]
        for sequence, start, tokens in rows:
            self._spoil(sequence, start, len(tokens))
        chunks = {chunk.sequence: chunk for chunk in plan.chunks}
        for sequence, start, tokens in rows:
            if sequence.state is not SequenceState.RUNNING:
                continue
            if self.random.random() < 0.3:
                self.scheduler.invalidate(sequence, start)
                self._end(sequence)
                continue
            self.device.run([(sequence, start, tokens)])
            if sequence in chunks:
                self._draw(StepPlan([], [chunks[sequence]], 0, 0))
            else:
                self._draw(StepPlan([sequence], [], 0, 0))

    def _spoil(self, sequence: TokenSequence, start: int, end: int) -> None:
        size = self.limits.block_size
        for group, table in enumerate(sequence.tables):
            for index in range(start, end):
                self.device.keys[group, table.blocks[index // size], index % size] = -1
        for run in sequence.states.runs if sequence.states is not None else ():
            self.device.states[run.target] = -1

    def _check_report(self) -> None:
        """Check that a reader of the changes finds as much of a prompt as the engine."""
        for held, change in zip(self.reported, self.caches.take_changes(), strict=False):
            if change is not None:
                held.difference_update(change.removed)
                held.update(change.stored)
        groups = [
            CachedGroup(held, group.window)
            for held, group in zip(self.reported, self.limits.groups, strict=False)
        ]
        if self.limits.state_slots:
            groups.append(CachedGroup(self.reported[len(groups)], holds_states=True))
        size = self.limits.block_size
        hashes = prefix_hashes(self.random.choice(self.prompts), b"", size)
        assert self.caches.find(hashes).tokens == longest_prefix(hashes, groups, size) * size


def _is_complete(chunk: Chunk) -> bool:
    return chunk.end >= chunk.sequence.length and chunk.sequence.max_tokens > 0


def _hashes(tokens: Tokens) -> Hashes:
    return [*accumulate(tokens, lambda before, token: hash((before, token)), initial=0)]


def _ids(sequence: TokenSequence) -> Tokens:
    return tuple(sequence.tokens.tolist())


def _next_token(ids: Tokens) -> int:
    """Return a token that often repeats what came before, so that drafts are often accepted."""
    return ids[-2] if len(ids) % 7 and len(ids) > 1 else sum(ids) % 2
