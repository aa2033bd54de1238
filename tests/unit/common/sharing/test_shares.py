"""No tenant takes what all need: a newcomer always finds room."""

from hypothesis import given
from hypothesis import strategies as st

from services.common.sharing.shares import Shares


def fill(shares: Shares, tenant: str) -> int:
    """Let a tenant hold as much as it may, one by one; return how much."""
    while shares.has_room(tenant, 1):
        shares.add(tenant, 1)
    return shares.of(tenant)


def test_each_newcomer_gets_half_of_what_is_left() -> None:
    shares = Shares(120)
    assert [fill(shares, name) for name in ("a", "b", "c")] == [60, 30, 15]
    assert not shares.has_room("a", 1)


def test_a_reserve_lets_a_lone_tenant_hold_the_total() -> None:
    shares = Shares(100, reserve=100)
    assert [fill(shares, name) for name in ("a", "b", "c")] == [100, 50, 25]


def test_the_empty_tenant_may_hold_the_total() -> None:
    shares = Shares(100, reserve=100)
    assert fill(shares, "") == 100


def test_what_a_tenant_gives_back_is_free() -> None:
    shares = Shares(100)
    fill(shares, "a")
    shares.add("a", -50)
    assert shares.held == 0
    assert shares.has_room("b", 50)


def test_the_least_is_granted_whatever_the_share() -> None:
    shares = Shares(100, least=80)
    assert shares.has_room("a", 80)
    shares.add("a", 80)
    assert shares.has_room("b", 20)
    assert not shares.has_room("b", 21)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", ""]), st.integers(1, 40))))
def test_the_total_and_its_reserve_hold(wants: list[tuple[str, int]]) -> None:
    shares = Shares(50, reserve=30)
    for tenant, more in wants:
        if shares.has_room(tenant, more):
            shares.add(tenant, more)
    assert shares.held == sum(shares.of(tenant) for tenant in ("a", "b", "")) <= 80
