"""Probabilities of JSON as constraints allow it, beside other forms of the same answer.

Each right answer is scored behind its question in our form and in another one. The advantage is
ln(probability of ours / probability of the other) over the whole text: where it is negative, a
constraint pushes the model away from its own form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, cast

from benchmarks.quality_tasks import Task

__all__ = ["Habit", "habits_of", "likeliest_option"]

_TEXTS = 10
"""Answers of each kind that are scored in each form"""

Score = Callable[[Sequence[int], str], float]
"""Returns the log-probability of a text behind the ids of a prompt"""


@dataclass
class Habit:
    """A form of JSON beside ours."""

    form: str
    texts: int = 0
    advantage: float = 0.0
    """Mean of ln(probability of ours / probability of the other form)"""
    preferred: int = 0
    """Texts in which the model prefers the other form"""


def habits_of(asked: Sequence[tuple[Task, Sequence[int]]], score: Score) -> list[Habit]:
    """Return the habits of a model by its answers to tasks, each with the ids of its prompt."""
    found: dict[str, Habit] = {}
    for task, prompt in asked:
        for form, ours, others in _forms(task):
            habit = found.setdefault(f"{form} ({task.kind})", Habit(f"{form} ({task.kind})"))
            if habit.texts == _TEXTS:
                continue
            advantage = score(prompt, ours) - max(score(prompt, other) for other in others)
            habit.texts += 1
            habit.advantage += advantage
            habit.preferred += advantage < 0
    for habit in found.values():
        habit.advantage /= habit.texts
    return list(found.values())


def likeliest_option(task: Task, prompt: Sequence[int], score: Score) -> dict[str, Any] | None:
    """Return the likeliest whole answer to a classification; None for other tasks."""
    [(name, member), *others] = cast(Any, task.schema)["properties"].items()
    if others or "enum" not in member:
        return None
    answers = [{name: option} for option in member["enum"]]
    return max(answers, key=lambda answer: score(prompt, _written(answer)))


def _forms(task: Task) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield the other forms of an answer: their name, our text, and theirs."""
    if task.schema is None:
        return
    members = dict(task.answer)
    ours = _written(members)
    if not ours.isascii():
        yield "letters as \\u escapes", ours, [json.dumps(members)]
    if "city" in members:
        crossed = _written(members | {"city": f"{members['city']}/Bergen"})
        yield "slashes as \\/", crossed, [crossed.replace("/", "\\/")]
    orders = [dict(order) for order in permutations(members.items())][1:]
    if orders:
        yield "other orders of the members", ours, list(map(_written, orders))
    if len(members) > 2:
        first, moved, *rest = members.items()
        yield "the second member last", ours, [_written(dict([first, *rest, moved]))]


def _written(members: dict[str, Any]) -> str:
    return json.dumps(members, ensure_ascii=False)
