"""Documents of many requests at once."""

import asyncio
from pathlib import Path

import pytest

from services.common.contract import MAX_DOCUMENTS, MAX_DOCUMENTS_BYTES
from services.jobs.documents.document_reader import DocumentLimits, DocumentReader
from services.jobs.documents.documents import Documents
from services.jobs.store.file_store import FileStore
from tests.pdfs import pdf, pdf_of_stream
from tokenwire.errors import ServiceError
from tokenwire.pb.jobs.v1.jobs_pb2 import Document


@pytest.fixture
def documents(tmp_path: Path) -> Documents:
    reader = DocumentReader(DocumentLimits(concurrent=2, seconds=60))
    return Documents(reader, FileStore(str(tmp_path), 2**20), 2**30)


async def test_slow_pdfs_of_an_owner_leave_others_a_place(documents: Documents) -> None:
    endless = pdf_of_stream(b"BT /F1 12 Tf " + b"(a) Tj " * 3_000_000 + b"ET")
    slow = [
        asyncio.ensure_future(documents.read([Document(data=endless)], "one")) for _ in range(4)
    ]
    await asyncio.sleep(0)  # they are first
    assert await documents.read([Document(data=pdf("Hello"))], "other") == ["Hello"]
    for each in slow:
        each.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_error_names_the_document_at_fault(documents: Documents) -> None:
    good, bad = Document(data=b"text"), Document(data=b"\xff", field="messages[0]")
    for asked, field in (
        ([good, bad], "messages[0]"),
        ([good, Document(file_id="x")], "documents[1]"),
    ):
        with pytest.raises(ServiceError) as refused:
            await documents.read(asked, "")
        assert refused.value.field == field


async def test_documents_of_a_request_are_bounded(documents: Documents) -> None:
    half = Document(data=bytes(MAX_DOCUMENTS_BYTES // 2 + 1))
    for asked in ([Document(data=b"a")] * (MAX_DOCUMENTS + 1), [half, half]):
        with pytest.raises(ServiceError) as refused:
            await documents.read(asked, "")
        assert refused.value.code.name == "INVALID_ARGUMENT"
