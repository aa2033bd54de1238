"""Admission, priority and credit of requests in the step loop."""

from services.engine.messages import Admitted, GrantCredit, Refused, RequestDone
from services.engine.model.model import Model
from tests.unit.engine.loop.outputs import greedy_tokens
from tests.unit.engine.tiny import BLOCK, CONTEXT, make_loop, make_request, run, tokens_of


def test_sequence_without_credit_waits(decoder: Model) -> None:
    loop = make_loop(decoder)
    loop.apply([make_request(1, [[1, 2, 3]], max_tokens=10, credit=3)])
    tokens = tokens_of([o for _ in range(8) for o in loop.step(list).outputs])
    assert len(tokens[1, 0]) == 3
    assert not loop.progressed
    rest = tokens_of(run(loop, [GrantCredit(1, 100)]))
    assert tokens[1, 0] + rest[1, 0] == [t.id for t in greedy_tokens(decoder, [1, 2, 3], 10)]


def test_prompt_without_credit_is_computed_for_the_prefix_cache(decoder: Model) -> None:
    """Otherwise requests that share the prompt would wait until its client grants credit."""
    prompt = [1 + i % 3 for i in range(4 * BLOCK)]
    loop = make_loop(decoder, step_tokens=BLOCK)
    loop.apply([make_request(1, [prompt], max_tokens=10, credit=0)])
    assert tokens_of([o for _ in range(8) for o in loop.step(list).outputs]) == {}
    loop.apply([make_request(2, [prompt], max_tokens=10)])
    outputs = [o for _ in range(20) for o in loop.step(list).outputs]
    [done] = [output for output in outputs if isinstance(output, RequestDone)]
    assert done.cached_tokens == 3 * BLOCK
    assert tokens_of(run(loop, [GrantCredit(1, 100)]))[1, 0] == tokens_of(outputs)[2, 0]


def test_queue_position_counts_requests_of_no_lower_priority(decoder: Model) -> None:
    """It counts neither their choices nor requests of lower priority."""
    loop = make_loop(decoder, running=1)
    loop.apply([make_request(1, [[1]], n=3), make_request(2, [[2]])])
    loop.apply([make_request(3, [[3]], priority=1), make_request(4, [[4]])])
    admitted = [o for o in loop.step(list).outputs if isinstance(o, Admitted)]
    assert [(a.handle, a.queue_position) for a in admitted] == [(1, 0), (2, 1), (3, 0), (4, 3)]


def test_request_larger_than_the_kv_cache_is_refused(decoder: Model) -> None:
    loop = make_loop(decoder, blocks=4)
    [refused] = run(loop, [make_request(1, [[1] * 10], max_tokens=20)])
    assert isinstance(refused, Refused)
    assert refused.reason == "KV_CACHE_TOO_SMALL"


def test_full_queue_refuses_with_a_time_to_retry(decoder: Model) -> None:
    loop = make_loop(decoder, running=1, waiting=2)
    loop.apply([make_request(i, [[1, 2, i]]) for i in range(4)])
    refused = [o for o in loop.take_output().outputs if isinstance(o, Refused)]
    assert [r.handle for r in refused] == [2, 3]
    assert refused[0].retry_seconds
    assert len([o for o in run(loop, []) if isinstance(o, RequestDone)]) == 2


def test_higher_priority_runs_first(decoder: Model) -> None:
    loop = make_loop(decoder, running=1)
    requests = [make_request(i, [[1, 2, i + 1]], priority=i) for i in range(3)]
    done = [o.handle for o in run(loop, requests) if isinstance(o, RequestDone)]
    assert done == [2, 1, 0]


def test_max_tokens_is_lowered_to_the_rest_of_the_context(decoder: Model) -> None:
    prompt = [1] * (CONTEXT - 5)
    outputs = run(make_loop(decoder), [make_request(1, [prompt], max_tokens=50)])
    [admitted] = [o for o in outputs if isinstance(o, Admitted)]
    assert list(admitted.max_tokens) == [5]
    assert len(tokens_of(outputs)[1, 0]) == 5
