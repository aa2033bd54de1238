"""Load plan: the models that must leave the memory before another one is loaded."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["LoadPlan", "Resident", "Room", "plan_load"]

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Room:
    """Room for the models of a server."""

    memory_bytes: int
    most_models: int


@dataclass(frozen=True, slots=True)
class Resident(Generic[Name]):
    """A model that takes memory: it is loaded, or is being loaded."""

    name: Name
    memory_bytes: int
    last_used: float
    """Time of the last use; the lowest comes first"""
    is_used: bool
    """True if a request uses the model or waits for it"""


@dataclass(frozen=True, slots=True)
class LoadPlan(Generic[Name]):
    """Steps before a load."""

    unload: tuple[Name, ...] = ()
    """Unused models to unload; with them gone, and `await_unused` empty, there is room"""
    await_unused: tuple[Name, ...] = ()
    """Used models that must become unused before there is room"""


def plan_load(
    needed_bytes: int, residents: Sequence[Resident[Name]], room: Room
) -> LoadPlan[Name] | None:
    """Return the plan of a load that needs so many bytes; None if it never fits.

    Models leave in the order of their last use, unused ones first. A model stays if there is room
    with it. A used model is never unloaded.
    """
    if needed_bytes > room.memory_bytes or room.most_models < 1:
        return None
    leaving: list[Resident[Name]] = []
    for resident in sorted(residents, key=lambda each: (each.is_used, each.last_used)):
        if _has_room(needed_bytes, residents, leaving, room):
            break
        leaving.append(resident)
    for resident in [*reversed(leaving)]:
        others = [each for each in leaving if each is not resident]
        if _has_room(needed_bytes, residents, others, room):
            leaving = others
    return LoadPlan(
        unload=tuple(each.name for each in leaving if not each.is_used),
        await_unused=tuple(each.name for each in leaving if each.is_used),
    )


def _has_room(
    needed_bytes: int,
    residents: Sequence[Resident[Name]],
    leaving: Sequence[Resident[Name]],
    room: Room,
) -> bool:
    gone = {each.name for each in leaving}
    staying = [each for each in residents if each.name not in gone]
    taken = sum(each.memory_bytes for each in staying)
    return taken + needed_bytes <= room.memory_bytes and len(staying) < room.most_models
