"""Answers of a published model in JSON, with a schema and without."""

from collections.abc import Callable

import httpx
import pytest

from benchmarks.constrained_quality import Asker, first_object, shots_of
from benchmarks.quality_tasks import tasks
from tests.real.checkpoints import GEMMA, SMOLLM, Package
from tests.stack import Stack

QUESTIONS = 12


@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", [SMOLLM, GEMMA], ids=lambda package: package.name)
def test_schema_costs_no_right_answers(serve: Callable[[Package], Stack], package: Package) -> None:
    """A grammar that forces texts which the model finds unlikely makes its answers wrong."""
    people = [task for task in tasks() if task.kind == "people"]
    with httpx.Client(base_url=serve(package).url, timeout=120) as http:
        asker = Asker(http, shots_of(people))
        is_chat = asker.has_template()

        def right(is_constrained: bool) -> int:
            answers = [
                asker.ask(task, is_chat=is_chat, is_constrained=is_constrained).text
                for task in people[:QUESTIONS]
            ]
            pairs = zip(people[:QUESTIONS], map(first_object, answers), strict=True)
            return sum(task.is_right(answer) for task, answer in pairs)

        free = right(is_constrained=False)
        assert free >= QUESTIONS // 3  # otherwise this test shows nothing
        # one less: processors round differently, so an answer on the brink may change
        assert right(is_constrained=True) >= free - 1
