"""Text of documents, and PDFs that a reader must survive."""

import asyncio
from typing import Any

import pytest

from services.jobs.documents.document_reader import DocumentLimits, DocumentReader
from tests.pdfs import encrypted_pdf, pdf, pdf_of_stream
from tokenwire.errors import ServiceError

PDF = "application/pdf"
LIMITS = DocumentLimits(pages=3, characters=1_000)


async def text(data: bytes, media_type: str = PDF, limits: DocumentLimits = LIMITS) -> str:
    return await DocumentReader(limits).text(data, media_type, "file")


async def problem(data: bytes, media_type: str = PDF, limits: DocumentLimits = LIMITS) -> str:
    with pytest.raises(ServiceError) as refused:
        await text(data, media_type, limits)
    assert refused.value.field == "file"
    assert refused.value.code.name == "INVALID_ARGUMENT"
    return refused.value.message


async def test_pages_of_a_pdf_become_text() -> None:
    assert await text(pdf("Hello", "world")) == "Hello\n\nworld"
    assert await text(pdf("Hello"), "") == "Hello"
    assert await text(encrypted_pdf("Hello", "")) == "Hello"  # only printing needs a password


@pytest.mark.parametrize("media_type", ["text/plain", "text/markdown", "application/json", ""])
async def test_text_stays(media_type: str) -> None:
    assert await text("\ufeffä".encode(), media_type) == "ä"
    assert "nor text in UTF-8" in await problem(b"\xff", media_type)
    assert "1,000 characters" in await problem(b"a" * 1_001, media_type)


async def test_other_types_are_refused() -> None:
    assert "'image/png'" in await problem(b"a", "image/png")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (encrypted_pdf("a", "secret"), "encrypted"),
        (pdf("", " "), "no text"),
        (pdf("a", "b", "c", "d"), "4 pages"),
        (pdf("a" * 1_001), "1,000 characters"),
        (pdf("a")[:300], "damaged"),
        (b"%PDF-1.7", "damaged"),
        (b"", "damaged"),
    ],
    ids=["encrypted", "empty", "pages", "characters", "cut", "head", "nothing"],
)
async def test_pdf_that_can_not_be_read_is_refused_with_the_reason(data: bytes, why: str) -> None:
    assert why in await problem(data)


async def test_pdf_that_unpacks_to_too_much_is_refused() -> None:
    assert "too much" in await problem(pdf_of_stream(b"0" * 2**28))


async def test_pdf_that_takes_too_long_is_given_up() -> None:
    endless = pdf_of_stream(b"BT /F1 12 Tf " + b"(a) Tj " * 3_000_000 + b"ET")
    message = await problem(endless, limits=DocumentLimits(seconds=1))
    assert "more than 1 s" in message or "too much time" in message


async def test_pdf_that_fills_the_memory_is_given_up() -> None:
    large = pdf_of_stream(b"0" * (60 * 2**20))
    assert "no text" in await problem(large)
    assert "too much memory" in await problem(large, limits=DocumentLimits(memory=128 * 2**20))


@pytest.mark.parametrize(
    ("kills", "expected"), [(1, "Hello"), (2, "UNAVAILABLE DOCUMENT_READER_LOST")]
)
async def test_killed_reader_is_no_fault_of_the_pdf(
    kills: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is repeated; a client may repeat what was killed twice."""
    start, left = asyncio.create_subprocess_exec, kills

    async def killed(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        nonlocal left
        process = await start(*arguments, **options)
        if left:
            left -= 1
            process.kill()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", killed)
    try:
        found = await text(pdf("Hello"))
    except ServiceError as error:
        found = f"{error.code.name} {error.reason}"
    assert found == expected


async def test_more_pdfs_than_may_wait_are_refused() -> None:
    reader = DocumentReader(DocumentLimits(concurrent=1, waiting=2))
    answers = await asyncio.gather(
        *(reader.text(pdf("a"), PDF, "file") for _ in range(3)), return_exceptions=True
    )
    assert answers[:2] == ["a", "a"]
    assert isinstance(answers[2], ServiceError)
    assert answers[2].code.name == "UNAVAILABLE"
