"""Slots agree between service and engine; a mix-up would corrupt output."""

from hypothesis import given
from hypothesis import strategies as st

from services.grammar.matching.mask_slots import MaskSlots


@given(st.integers(0, 4), st.lists(st.integers(0, 7), max_size=60))
def test_the_engine_has_the_mask_of_every_slot_that_is_named(slots: int, masks: list[int]) -> None:
    server, engine = MaskSlots(slots), dict[int, bytes]()
    for mask in (bytes([value]) * 9 for value in masks):
        slot, held = server.place(mask)
        if slot is None:
            assert slots == 0
        elif held:
            assert engine[slot] == mask
        else:
            assert 0 <= slot < slots
            engine[slot] = mask


def test_the_least_recently_used_slot_is_replaced() -> None:
    slots = MaskSlots(2)
    assert slots.place(b"a") == (0, False)
    assert slots.place(b"b") == (1, False)
    assert slots.place(b"a") == (0, True)
    assert slots.place(b"c") == (1, False)
    assert slots.place(b"a") == (0, True)
