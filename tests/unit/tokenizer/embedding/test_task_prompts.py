"""Instructions of the tasks of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.settings import StartupError
from services.tokenizer.embedding.task_prompts import TaskPrompts
from services.tokenizer.text.vocabulary import Vocabulary
from tests.text_models import make_embedder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("checkpoint"))


def read(checkpoint: Path, **config: Any) -> TaskPrompts:
    (checkpoint / "config.json").write_text(json.dumps(config))
    return TaskPrompts(checkpoint, Vocabulary(checkpoint))


def test_task_without_an_instruction_has_none(checkpoint: Path) -> None:
    instructions = {"query": "the key ", "passage": "", "other": None}
    tasks = read(
        checkpoint, lora_adaptations=["query", "passage", "other"], task_instructions=instructions
    )
    first = tasks.named("query")
    assert first is not None
    assert first.text == "the key "
    assert tasks.named("passage") is tasks.named("other") is None


@pytest.mark.parametrize(
    "config",
    [
        {"lora_adaptations": {"query": 1}},
        {"lora_adaptations": [["query"]]},
        {"task_names": "query"},
        {"lora_adaptations": ["query"], "task_instructions": ["the key"]},
        {"lora_adaptations": ["query"], "task_instructions": {"query": {"text": "the key"}}},
    ],
)
def test_other_values_are_refused_by_name(config: dict[str, Any], checkpoint: Path) -> None:
    """Else an object's text would go before each input."""
    with pytest.raises(StartupError, match="task_instructions must be texts by name"):
        read(checkpoint, **config)
