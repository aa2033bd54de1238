"""Block tables and slots of states that one sequence holds."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

__all__ = ["BlockTable", "PlannedState", "SequenceStates", "Snapshot", "StateRun"]


@dataclass(slots=True, eq=False)
class BlockTable:
    """Blocks of one sequence in one group of layers."""

    blocks: list[int] = field(default_factory=list)
    """Blocks by token index // block size. The list only grows; a sequence that starts again gets
    a new list. Entries before `first` are stale, because no token reads them any more"""
    first: int = 0
    """Index of the first block that the sequence holds"""

    @property
    def held(self) -> list[int]:
        """Blocks that the sequence holds, in order."""
        return self.blocks[self.first :] if self.first else self.blocks


class Snapshot(Enum):
    """Reason to keep a state in the prefix cache."""

    PROMPT = "prompt"
    ANSWER = "answer"
    """State behind generated tokens, which replaces the answer's previous snapshot"""


@dataclass(slots=True, eq=False)
class PlannedState:
    """A state that the newest step writes."""

    end: int
    """Number of tokens that the state stands for"""
    slot: int
    snapshot: Snapshot | None
    """Reason to cache the state once its tokens are certain; None = it is not cached"""


class StateRun(NamedTuple):
    """Consecutive tokens of a step between two states."""

    length: int
    """Number of tokens"""
    source: int
    """Slot of the state before the run; -1 = zeros"""
    target: int
    """Slot of the state behind the run"""


@dataclass(slots=True, eq=False)
class SequenceStates:
    """State slots of one sequence. No step changes a state in place, so steps can be undone."""

    prompt_end: int = 0
    """Number of tokens of the sequence when it started; snapshots of these count as a prompt's"""
    source: int = -1
    """Slot of the state that the newest step begins with; -1 = zeros"""
    source_end: int = 0
    """Number of tokens that the state in `source` stands for"""
    planned: list[PlannedState] = field(default_factory=list)
    """States that the newest step writes, in order"""
    reserved: int | None = None
    """Slot for the last state of the next step"""
    answer: bytes | None = None
    """Hash of the newest snapshot of the answer"""

    @property
    def runs(self) -> list[StateRun]:
        """Runs of the newest step, in order."""
        runs: list[StateRun] = []
        start, source = self.source_end, self.source
        for state in self.planned:
            runs.append(StateRun(state.end - start, source, state.slot))
            start, source = state.end, state.slot
        return runs

    @property
    def held(self) -> list[int]:
        """Slots that the sequence holds."""
        slots = [state.slot for state in self.planned]
        if self.source >= 0:
            slots.append(self.source)
        if self.reserved is not None:
            slots.append(self.reserved)
        return slots

    def slot_at(self, tokens: int) -> int:
        """Return the slot of the state behind `tokens` tokens, which the sequence must hold."""
        if self.source_end == tokens:
            return self.source
        return next(state.slot for state in self.planned if state.end == tokens)
