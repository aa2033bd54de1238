"""All operations of the API but Ollama's."""

from collections.abc import Sequence

from services.http_shim.documentation.file_operations import FILE_OPERATIONS
from services.http_shim.documentation.generation_operations import GENERATION_OPERATIONS
from services.http_shim.documentation.operation import Operation
from services.http_shim.documentation.server_operations import SERVER_OPERATIONS
from services.http_shim.documentation.vector_operations import VECTOR_OPERATIONS

__all__ = ["OPERATIONS"]

OPERATIONS: Sequence[Operation] = (
    *GENERATION_OPERATIONS,
    *VECTOR_OPERATIONS,
    *FILE_OPERATIONS,
    *SERVER_OPERATIONS,
)
