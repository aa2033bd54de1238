"""Fairness among prompts, streams and tenants: scheduling policy on a fake clock."""

from statistics import median

import pytest

from services.engine.loop.request_table import LoopLimits, RequestTable
from services.engine.messages import GrantCredit, Refused
from services.engine.scheduling.cache_limits import CacheLimits, GroupLimits
from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.step_plan import SchedulerLimits, StepPlan
from tests.unit.engine.tiny import make_request

CONTEXT = 1 << 20


class Machine:
    """A scheduler whose steps take 12 ms, and 0.6 ms per row, as on two cores."""

    def __init__(self, running: int = 256, blocks: int = 10_000, waiting: int = 10_000) -> None:
        limits = SchedulerLimits(running, 4096, 1.7, rows_at_once=16)
        self.scheduler = Scheduler(limits, CachePools(CacheLimits(16, (GroupLimits(blocks),))))
        self.now = 1000.0
        self.requests = RequestTable(
            self.scheduler, LoopLimits(frozenset(), waiting, 30.0), lambda: self.now
        )
        self.refused: list[int] = []
        self.firsts: dict[int, float] = {}
        """Time of each request's first token"""
        self.tokens: dict[int, int] = {}
        """Tokens generated for each request"""
        self._handles = 0

    def add(
        self,
        prompt: int,
        output: int,
        *,
        n: int = 1,
        priority: int = 0,
        tenant: bytes = b"",
        credit: int | None = None,
    ) -> int:
        self._handles += 1
        handle = self._handles
        command = make_request(
            handle,
            [[handle] * prompt],
            n=n,
            max_tokens=output,
            priority=priority,
            salt=tenant,
            credit=credit,
            context=CONTEXT,
            arrival=self.now,
        )
        self.requests.carry_out(command)
        self._note()
        return handle

    def grant(self, handle: int, tokens: int) -> None:
        self.requests.carry_out(GrantCredit(handle, tokens))

    def step(self) -> StepPlan:
        self.requests.cut_starved()
        plan = self.scheduler.plan(self.now)
        self.requests.note_started(chunk.sequence for chunk in plan.chunks)
        rows = plan.decode_tokens + plan.prompt_tokens
        took = 0.012 + 0.0006 * -(-rows // 16) * 16
        self.now += took
        self.scheduler.learn(plan, took)
        ready = [*plan.decodes, *(c.sequence for c in plan.chunks if c.end == c.sequence.length)]
        for sequence in ready:
            if sequence.has_credit:
                handle = sequence.request.command.handle
                self.firsts.setdefault(handle, self.now)
                self.tokens[handle] = self.tokens.get(handle, 0) + 1
                self.requests.append(sequence, 1, None)
        self._note()
        self.scheduler.caches.check(self.scheduler.running)
        return plan

    def steps_until(self, *handles: int, most: int = 3000) -> int:
        """Return the steps until all these requests have a token."""
        for step in range(most):
            if all(handle in self.firsts for handle in handles):
                return step
            self.step()
        raise AssertionError(f"no token for some of {handles} in {most} steps")

    def decode(self, streams: int) -> list[int]:
        """Start streams, and run some of their steps."""
        handles = [self.add(40, 100_000) for _ in range(streams)]
        self.steps_until(*handles)
        for _ in range(5):
            self.step()
        return handles

    def running_of(self, handle: int) -> list[TokenSequence]:
        running = self.scheduler.running
        return [s for s in running if s.request.command.handle == handle]

    def _note(self) -> None:
        outputs = self.requests.take_outputs()
        self.refused += [o.handle for o in outputs if isinstance(o, Refused)]


def test_queued_request_is_served_before_lower_priority_prompt() -> None:
    machine = Machine()
    machine.decode(64)
    long = machine.add(32_000, 1)
    machine.step()
    urgent = machine.add(16, 4, priority=10)
    assert machine.steps_until(urgent) <= 3
    assert long not in machine.firsts


def test_short_prompt_passes_long_one() -> None:
    machine = Machine()
    machine.decode(8)
    long = machine.add(32_000, 1)
    for _ in range(20):
        machine.step()
    short = machine.add(16, 1)
    assert machine.steps_until(short) <= 3
    assert machine.steps_until(long)


def test_long_prompt_ends_while_short_ones_keep_arriving() -> None:
    machine = Machine()
    machine.decode(4)
    long = machine.add(4_000, 1)
    waits = []
    for _ in range(400):
        short = machine.add(64, 1)
        waits.append(machine.steps_until(short))
        if long in machine.firsts:
            break
    assert long in machine.firsts
    assert max(waits) <= 12  # in its turn, the long prompt leaves them a share


def test_low_priority_prompt_ends_while_higher_ones_keep_arriving() -> None:
    machine = Machine(running=4)
    low = machine.add(100, 1)
    for _ in range(2000):
        machine.add(400, 2, priority=3)
        machine.step()
        if low in machine.firsts:
            return
    raise AssertionError("the low-priority prompt starved")


def test_first_request_of_a_tenant_passes_the_thousand_of_another() -> None:
    machine = Machine(running=32)
    crowd = [machine.add(128, 64, tenant=b"many") for _ in range(1000)]
    machine.steps_until(*crowd[:40])
    single = machine.add(128, 64, tenant=b"one")
    assert machine.steps_until(single) <= 4


def test_tenants_share_evenly_however_many_requests_each_sends() -> None:
    machine = Machine(running=16)
    for _ in range(600):
        machine.add(64, 32, tenant=b"many")
    for _ in range(100):
        machine.add(64, 32, tenant=b"some")
    for _ in range(400):
        machine.step()
    done = {b"many": 0, b"some": 0}
    for handle, tokens in machine.tokens.items():
        done[b"many" if handle <= 600 else b"some"] += tokens
    assert done[b"some"] == pytest.approx(done[b"many"], rel=0.2)


def test_full_queue_refuses_the_tenant_that_fills_it() -> None:
    machine = Machine(running=1, waiting=10)
    first = machine.add(16, 1000, tenant=b"many")
    machine.steps_until(first)
    crowd = [machine.add(16, 1, tenant=b"many") for _ in range(12)]
    assert machine.refused == crowd[10:]
    others = [machine.add(16, 1, tenant=b"one") for _ in range(6)]
    assert machine.refused == [*crowd[10:], others[5]]
    many = [machine.add(16, 1, tenant=str(i).encode()) for i in range(40)]
    assert set(many) & set(machine.refused), "all tenants together can fill the queue"


def test_requests_of_many_choices_yield_a_place_to_a_newcomer() -> None:
    machine = Machine()
    hogs = [machine.add(20, 5_000, n=128) for _ in range(2)]
    for _ in range(100):
        machine.step()
    assert machine.scheduler.free_places == 0
    bystander = machine.add(16, 4)
    assert machine.steps_until(bystander) <= 3
    assert min(len(machine.running_of(hog)) for hog in hogs) >= 126


def test_paused_streams_yield_their_places_to_waiting_ones() -> None:
    machine = Machine(running=6)
    paused = [machine.add(40, 100, credit=2) for _ in range(6)]
    machine.steps_until(*paused)
    for _ in range(80):
        machine.step()
    assert len(machine.scheduler.running) == 6, "no sequence waits for their places"
    others = [machine.add(40, 8) for _ in range(6)]
    machine.steps_until(*others, most=20)
    before = dict(machine.tokens)
    for handle in paused:
        machine.grant(handle, 5)
    for _ in range(40):
        machine.step()
    assert [machine.tokens[handle] - before[handle] for handle in paused] == [5] * 6


def test_paused_streams_yield_their_blocks_to_a_waiting_one() -> None:
    machine = Machine(blocks=40)
    paused = [machine.add(140, 100, credit=1) for _ in range(4)]
    machine.steps_until(*paused)
    for _ in range(200):
        machine.step()
    newcomer = machine.add(300, 8)
    machine.steps_until(newcomer, most=5)


def test_paused_stream_without_a_place_is_cut_in_time() -> None:
    machine = Machine(running=1)
    paused = machine.add(40, 100, credit=1)
    machine.steps_until(paused)
    for _ in range(80):
        machine.step()
    machine.add(40, 10_000)
    for _ in range(2000):
        machine.step()
    assert machine.refused == [paused]


def test_few_long_prompts_slow_streams_down_by_the_factor_alone() -> None:
    machine = Machine()
    machine.decode(5)
    began = machine.now
    machine.step()
    alone = machine.now - began
    prompts = [machine.add(2_000, 1) for _ in range(5)]
    while not machine.firsts.keys() & set(prompts):
        began = machine.now
        machine.step()
        assert machine.now - began <= 1.7 * alone


def test_prompts_that_arrive_together_get_first_tokens_one_by_one() -> None:
    """A single step for all prompts would delay every first token to its end."""
    machine = Machine()
    machine.decode(2)
    began = machine.now
    crowd = [machine.add(128, 64) for _ in range(32)]
    machine.steps_until(*crowd)
    waits = [machine.firsts[handle] - began for handle in crowd]
    assert median(waits) < 0.65 * max(waits)
    assert max(waits) < 3.7  # the prompts alone take 2.5 s
