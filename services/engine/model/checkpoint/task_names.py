"""Tasks for which a checkpoint holds adapters, by the names in config.json."""

from pathlib import Path

from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["STACKED_TASKS", "TASKS_IN_DIRECTORIES", "adapter_directory", "read_tasks"]

STACKED_TASKS = "lora_adaptations"
"""Key of the tasks whose adapters are stacked beside the weights (Jina v3)"""
TASKS_IN_DIRECTORIES = "task_names"
"""Key of the tasks that have a directory each (Jina v5)"""


def read_tasks(config: Config, key: str) -> tuple[str, ...]:
    """Return the tasks; none if the key is missing. Raises CheckpointError for odd names."""
    if not config.has(key):
        return ()
    tasks = config.texts(key)
    are_names = all(task not in ("", "..") and Path(task).name == task for task in tasks)
    if not are_names or len(set(tasks)) < len(tasks):
        raise CheckpointError(f"{config.file}: {key} must hold names of directories, each once.")
    return tasks


def adapter_directory(checkpoint: Path, task: str) -> Path:
    """Return the directory of a task's adapter, in PEFT's format."""
    return checkpoint / "adapters" / task
