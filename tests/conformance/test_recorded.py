"""Recorded shapes of every route's answers: their fields, their errors and their events.

After a change that is meant, `python -m tests.conformance.recorded` records the answers anew.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.recorded.__main__ import RECORDED
from tests.conformance.recorded.calls import all_calls
from tests.conformance.recorded.recorder import answers
from tests.conformance.recorded.shapes import shape_of
from tests.stack import served_stack

_NAMES = [call.name for call in all_calls()]


@pytest.fixture(scope="module")
def now(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The shapes of all answers by the name of the call, of a stack that nobody else calls."""
    with served_stack(embedded_model, tmp_path_factory.mktemp("logs")) as stack:
        return dict(answers(stack.url, all_calls(), shape_of))


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    entries = map(json.loads, RECORDED.read_text().splitlines())
    return {entry.pop("call"): entry for entry in entries}


@pytest.mark.parametrize("name", _NAMES)
def test_answer_keeps_its_fields(name: str, now: Any, recorded: Any) -> None:
    # As text, because the order of keys counts, too.
    assert json.dumps(now[name], indent=1) == json.dumps(recorded[name], indent=1)


def test_nothing_else_is_recorded(recorded: Any) -> None:
    assert sorted(recorded) == sorted(_NAMES)
