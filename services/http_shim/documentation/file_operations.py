"""Operations on files and batches."""

from collections.abc import Sequence
from typing import Any

from services.http_shim.documentation.operation import Operation, get, post
from services.http_shim.endpoints.batches import BatchBody, BatchList, BatchObject
from services.http_shim.endpoints.files import DeletedFile, FileList, FileObject

__all__ = ["FILE_OPERATIONS"]


def _kept(kind: str, *, rest: str = "", **fields: Any) -> Operation:
    """Return an operation on one file or batch; rest: of its path."""
    folder = {"file": "files", "batch": "batches"}[kind]
    parameter = {"name": f"{kind}_id", "in": "path", "required": True, "schema": {"type": "string"}}
    errors = fields.pop("errors", (401, 404))
    path = f"/v1/{folder}/{{{kind}_id}}{rest}"
    return Operation(path=path, parameters=[parameter], errors=errors, **fields)


FILE_OPERATIONS: Sequence[Operation] = (
    post(
        path="/v1/files",
        name="createFile",
        summary="Upload a file of batch requests or a document, as multipart/form-data.",
        form={"purpose": "`batch`, or `user_data` for a document.", "file": "The file's content."},
        answer=FileObject,
    ),
    get(
        path="/v1/files",
        name="listFiles",
        summary="List files; `limit`, `after` and `order` page through, `purpose` selects.",
        answer=FileList,
        errors=(400, 401),
    ),
    _kept(
        "file",
        method="get",
        name="getFile",
        summary="Describe a file.",
        answer=FileObject,
    ),
    _kept(
        "file",
        method="delete",
        name="deleteFile",
        summary="Drop a file, unless a batch that has not ended reads it.",
        answer=DeletedFile,
        errors=(400, 401, 404),
    ),
    _kept(
        "file",
        method="get",
        rest="/content",
        name="getFileContent",
        summary="Return a file's content.",
        media=("application/jsonl",),
    ),
    post(
        path="/v1/batches",
        name="createBatch",
        summary="Run the requests of a file in the background, behind all others.",
        body=BatchBody,
        required=("input_file_id", "endpoint"),
        answer=BatchObject,
        example={"input_file_id": "file-0", "endpoint": "/v1/completions"},
    ),
    get(
        path="/v1/batches",
        name="listBatches",
        summary="List batches; `limit`, `after` and `order` page through.",
        answer=BatchList,
        errors=(400, 401),
    ),
    _kept(
        "batch",
        method="get",
        name="getBatch",
        summary="Describe a batch.",
        answer=BatchObject,
    ),
    _kept(
        "batch",
        method="post",
        rest="/cancel",
        name="cancelBatch",
        summary="End a batch with the answers that it has.",
        answer=BatchObject,
    ),
)
