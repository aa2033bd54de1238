"""Drafter: a draft source that fails must not end the drafts of another one."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from services.engine.scheduling.cache_limits import CacheLimits, GroupLimits
from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import Request, TokenSequence
from services.engine.scheduling.speculation import DraftKind
from services.engine.scheduling.step_plan import SchedulerLimits
from services.engine.scheduling.token_ids import Prompt
from tests.unit.engine.tiny import make_request

BLOCK = 16
PLAIN, DRAFTING = 1.0, 1.5
"""Seconds of a step without draft tokens, and of one with them"""


class Machine:
    """A scheduler whose sequences get known answers, one sequence after another."""

    def __init__(self) -> None:
        limits = SchedulerLimits(8, 256, 1.7, rows_at_once=16, speculate=True)
        pools = CachePools(CacheLimits(BLOCK, (GroupLimits(64),)))
        self.scheduler = Scheduler(limits, pools)
        self._handles = count()

    def answer(self, text: Sequence[int], prediction: Sequence[int] = ()) -> int:
        """Generate `text`. Return the number of steps. prediction: what the client expects."""
        request = make_request(next(self._handles), [[1]], max_tokens=len(text))
        checked = replace(request.checked, prediction=prediction)
        entered = Request(replace(request, checked=checked))
        sequence = TokenSequence(entered, 0, Prompt([1], b"", BLOCK), None, len(text))
        self.scheduler.add(sequence)
        steps = 0
        while sequence.position < len(text):
            self._step(sequence, text)
            steps += 1
        self.scheduler.remove(sequence)
        return steps

    def _step(self, sequence: TokenSequence, text: Sequence[int]) -> None:
        plan = self.scheduler.plan(0.0)
        draft = plan.chunks[0].draft if plan.chunks else ()
        for token in (*draft, None):
            drawn = text[sequence.position]
            sequence.append(drawn)
            if drawn != token or sequence.position == len(text):
                break
        if draft:
            self.scheduler.accept(sequence, draft)
        self.scheduler.learn(plan, DRAFTING if draft else PLAIN)


NEW_TEXT = range(100, 140)
"""Text without repetitions"""
WRONG_PREDICTION = [5, *(token for i in range(100, 140, 2) for token in (i, i + 1, 5))]
"""Text that goes on in another way behind each two tokens of `NEW_TEXT`"""
REPETITIONS = [*range(60, 68)] * 20


def test_rejected_predictions_do_not_end_the_search_for_repetitions() -> None:
    """Else clients with wrong predictions would slow down those whose texts repeat."""
    machine, alone = Machine(), Machine()
    for _ in range(20):
        machine.answer(NEW_TEXT, WRONG_PREDICTION)
        alone.answer(NEW_TEXT)
    totals = machine.scheduler.drafter.totals
    assert totals[DraftKind.PREDICTION].drafts > 20
    assert totals[DraftKind.PREDICTION].accepted == 0
    assert totals[DraftKind.NGRAM].drafts == 0
    steps = alone.answer(REPETITIONS)
    assert steps < len(REPETITIONS) / 2
    assert machine.answer(REPETITIONS) == steps
