"""Load plan: which models leave the memory."""

from hypothesis import given
from hypothesis import strategies as st

from tokenwire.serving.load_plan import LoadPlan, Resident, Room, plan_load


def _resident(name: str, size: int, last_used: float, *, is_used: bool = False) -> Resident[str]:
    return Resident(name, size, last_used, is_used)


def test_the_least_recently_used_model_leaves_first() -> None:
    residents = [_resident("new", 4, 2.0), _resident("old", 4, 1.0)]
    assert plan_load(4, residents, Room(8, 9)) == LoadPlan(unload=("old",))


def test_a_model_stays_if_there_is_room_with_it() -> None:
    residents = [_resident("small", 1, 1.0), _resident("large", 6, 2.0)]
    assert plan_load(6, residents, Room(8, 9)) == LoadPlan(unload=("large",))
    assert plan_load(1, residents, Room(8, 9)) == LoadPlan()


def test_a_used_model_is_waited_for_only_if_unused_ones_are_not_enough() -> None:
    residents = [_resident("used", 4, 1.0, is_used=True), _resident("unused", 4, 2.0)]
    assert plan_load(4, residents, Room(8, 9)) == LoadPlan(unload=("unused",))
    assert plan_load(8, residents, Room(8, 9)) == LoadPlan(
        unload=("unused",), await_unused=("used",)
    )


def test_the_number_of_models_is_bounded_too() -> None:
    assert plan_load(1, [_resident("a", 1, 1.0)], Room(8, 1)) == LoadPlan(unload=("a",))


def test_a_model_that_never_fits_is_refused() -> None:
    assert plan_load(9, [], Room(8, 9)) is None


_RESIDENTS = st.lists(
    st.tuples(st.integers(0, 10), st.integers(0, 5), st.booleans()), max_size=8
).map(
    lambda rows: [
        Resident(number, size, last_used, is_used)
        for number, (size, last_used, is_used) in enumerate(rows)
    ]
)


@given(_RESIDENTS, st.integers(0, 12), st.integers(1, 40), st.integers(1, 9))
def test_used_models_stay_and_the_rest_fits(
    residents: list[Resident[int]], needed: int, memory: int, most: int
) -> None:
    plan = plan_load(needed, residents, Room(memory, most))
    if plan is None:
        assert needed > memory
        return
    used = {each.name for each in residents if each.is_used}
    assert not used & set(plan.unload)
    assert used >= set(plan.await_unused)
    gone = {*plan.unload, *plan.await_unused}
    staying = [each for each in residents if each.name not in gone]
    assert sum(each.memory_bytes for each in staying) + needed <= memory
    assert len(staying) < most
    for name in gone:  # none leaves for nothing
        back = [*staying, next(each for each in residents if each.name == name)]
        is_full = sum(each.memory_bytes for each in back) + needed > memory
        assert is_full or len(back) >= most
