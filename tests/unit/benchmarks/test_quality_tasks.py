"""The tasks of the quality benchmark have answers that their own check accepts."""

import json

import jsonschema

from benchmarks.constrained_quality import first_object
from benchmarks.quality_tasks import tasks


def test_each_task_accepts_its_answer_and_no_other() -> None:
    every = tasks()
    assert len(every) == 200
    for task in every:
        assert task.is_right(task.answer)
        assert not task.is_right(dict.fromkeys(task.answer, "other"))
        assert not task.is_right(None)
        if task.schema is not None:
            jsonschema.validate(task.answer, task.schema)


def test_answers_may_differ_in_case_and_in_the_spelling_of_numbers() -> None:
    [first, *_] = tasks()
    shouted = {name.upper(): str(value).upper() for name, value in first.answer.items()}
    assert first.is_right(shouted)


def test_the_first_object_of_a_text_is_found() -> None:
    value = {"a": [1, {"b": "}"}]}
    assert first_object(f"Here {{is}} it:\n```json\n{json.dumps(value)}\n```") == value
    assert first_object("{no") is None
