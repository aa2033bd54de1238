"""Documents of many requests at once."""

import asyncio
from pathlib import Path

from services.http_shim.documents.document_reader import DocumentLimits, DocumentReader
from services.http_shim.documents.request_documents import RequestDocument
from services.http_shim.endpoints.documents import Documents
from services.http_shim.http.body import BodyReader
from services.http_shim.stored.file_store import FileStore
from tests.pdfs import pdf, pdf_of_stream


async def test_slow_pdfs_of_an_owner_leave_others_a_place(tmp_path: Path) -> None:
    documents = Documents(
        DocumentReader(DocumentLimits(concurrent=2, seconds=60)), FileStore(str(tmp_path), 2**20)
    )
    bodies = BodyReader(2**20, 2**20)
    endless = pdf_of_stream(b"BT /F1 12 Tf " + b"(a) Tj " * 3_000_000 + b"ET")
    texts: list[str] = []

    async def read(data: bytes, owner: str) -> None:
        with bodies.held() as held:
            document = RequestDocument("file", data, "application/pdf", put=texts.append)
            await documents.read([document], owner, held, 0)

    slow = [asyncio.ensure_future(read(endless, "one")) for _ in range(4)]
    await asyncio.sleep(0)  # they are first
    await read(pdf("Hello"), "other")
    assert texts == ["Hello"]
    for each in slow:
        each.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
