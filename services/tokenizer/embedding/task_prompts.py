"""Instructions of the tasks for which a checkpoint holds adapters (Jina v3 and v5)."""

from collections.abc import Mapping
from pathlib import Path

from services.common.settings import StartupError
from services.tokenizer.embedding.sentence_prompts import SentencePrompt
from services.tokenizer.text.checkpoint_files import read_json
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.errors import invalid

__all__ = ["TaskPrompts"]

_FILE = "config.json"


class TaskPrompts:
    """The tasks of a checkpoint, by name."""

    def __init__(self, directory: Path, vocabulary: Vocabulary) -> None:
        """Read the names; a checkpoint without them has no tasks. Raises StartupError."""
        config = read_json(directory / _FILE)
        tasks = config.get("lora_adaptations") or config.get("task_names") or []
        texts = config.get("task_instructions") or {}
        if (
            not isinstance(tasks, list)
            or not isinstance(texts, dict)
            or not all(isinstance(each, str | None) for each in (*tasks, *texts.values()))
        ):
            raise StartupError(
                f"{directory / _FILE}: lora_adaptations and task_names must be lists of names, "
                "and task_instructions must be texts by name."
            )
        self._prompts: Mapping[str, SentencePrompt | None] = {
            str(task): SentencePrompt.of(str(texts.get(task) or ""), vocabulary) for task in tasks
        }

    def __contains__(self, name: str) -> bool:
        return name in self._prompts

    def named(self, task: str) -> SentencePrompt | None:
        """Return the instruction of a task; None if it is empty. Raises INVALID_ARGUMENT."""
        if task not in self._prompts:
            if not self._prompts:
                raise invalid("task", "The model has no adapters of tasks. Leave the field out.")
            known = ", ".join(self._prompts)
            raise invalid("task", f"The model has no adapter of this task. It has: {known}.")
        return self._prompts[task]
