"""A tenant that queues much delays another one by one item, and gains nothing by an absence."""

from hypothesis import given
from hypothesis import strategies as st

from services.common.sharing.fair_queue import FairQueue


def taken(queue: FairQueue[str]) -> str:
    items = []
    while queue:
        items.append(queue.take())
    return " ".join(items)


def test_a_newcomer_is_next() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.put("a", f"a{number}")
    assert queue.take() == "a0"
    queue.put("b", "b0")
    assert taken(queue) == "b0 a1 a2 a3"


def test_cheap_items_pass_costly_ones_of_another_tenant() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        queue.put("a", f"a{number}", 10)
        queue.put("b", f"b{number}", 1)
    assert taken(queue) == "a0 b0 b1 b2 a1 a2"


def test_what_an_item_took_beyond_its_cost_is_charged() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        queue.put("a", f"a{number}")
        queue.put("b", f"b{number}")
    assert queue.take() == "a0"
    queue.charge("a", 5)
    assert taken(queue) == "b0 b1 b2 a1 a2"


def test_an_absence_gives_no_claim() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(6):
        queue.put("a", f"a{number}")
    for _ in range(4):
        queue.take()
    queue.put("b", "b0")
    queue.put("b", "b1")
    queue.put("b", "b2")
    assert taken(queue) == "b0 a4 b1 a5 b2"


def test_one_tenant_keeps_its_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(5):
        queue.put("", str(number), 5 - number)
    assert taken(queue) == "0 1 2 3 4"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=60))
def test_no_waiting_tenant_gets_less_than_another_by_more_than_one_item(
    items: list[tuple[str, int]],
) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for tenant, cost in items:
        queue.put(tenant, (tenant, cost), cost)
    left = [tenant for tenant, _ in items]
    served = dict.fromkeys("abc", 0)
    while queue:
        tenant, cost = queue.take()
        left.remove(tenant)
        served[tenant] += cost
        waiting = set(left)
        assert all(served[tenant] - served[other] <= 9 for other in waiting)
