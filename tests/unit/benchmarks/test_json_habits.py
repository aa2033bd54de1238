"""The quality benchmark finds the forms of JSON that a model prefers to ours."""

import json
from collections.abc import Sequence

from benchmarks.json_habits import habits_of, likeliest_option
from benchmarks.quality_tasks import tasks

_ASKED = [(task, [1, 2]) for task in tasks()]


def _shortest(prompt: Sequence[int], text: str) -> float:
    return -float(len(text))


def _age_first(prompt: Sequence[int], text: str) -> float:
    return float(next(iter(json.loads(text))) == "age")


def test_a_model_that_writes_short_texts_prefers_no_escapes() -> None:
    habits = {habit.form: habit for habit in habits_of(_ASKED, _shortest)}
    letters = habits["letters as \\u escapes (people)"]
    assert letters.advantage > 0
    assert letters.preferred == 0
    assert habits["slashes as \\/ (people)"].advantage == 1
    assert habits["other orders of the members (people)"].advantage == 0
    assert all(0 < habit.texts <= 10 for habit in habits.values())


def test_a_model_that_prefers_another_order_is_counted() -> None:
    habits = {habit.form: habit for habit in habits_of(_ASKED, _age_first)}
    orders = habits["other orders of the members (people)"]
    assert orders.advantage == -1
    assert orders.preferred == orders.texts
    assert habits["the second member last (people)"].preferred == 0


def test_the_likeliest_option_is_one_of_the_classes() -> None:
    options = {
        task.kind: likeliest_option(task, prompt, _shortest)
        for task, prompt in _ASKED
        if task.schema is not None
    }
    assert options["topic"] == {"topic": "food"}
    assert options["people"] is None
