"""Reading of adapters from their directories, with a check of the memory."""

from pathlib import Path

from services.engine.execution.memory_budget import require_memory
from services.engine.model.adapters.adapters import ConvertedAdapter
from services.engine.model.adapters.peft_files import PeftAdapter
from services.engine.model.model import Model

__all__ = ["convert_adapter"]


def convert_adapter(decoder: Model, directory: Path) -> ConvertedAdapter:
    """Read an adapter of a decoder; it may run beside a pass.

    Raises CheckpointError, and StartupError if memory is missing.
    """
    assert decoder.adapters is not None
    adapter = PeftAdapter.read(directory)
    needed = adapter.num_elements * decoder.dtype.itemsize
    require_memory(needed, f"The adapter {directory}", decoder.device)
    return decoder.adapters.convert(adapter)
