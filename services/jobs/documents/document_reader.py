"""Reader of documents: their bytes and media type in, their text out."""

import asyncio
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.common.contract import MAX_DOCUMENT_CHARACTERS
from services.common.documents import DocumentKind, kind_of, plain_text
from tokenwire.errors import ServiceError, invalid

__all__ = ["DocumentLimits", "DocumentReader", "documents_busy"]

_LOG = logging.getLogger("documents")
_PROGRAM = Path(__file__).with_name("pdf_text.py")


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """Limits on one document, and on all that are read at once."""

    pages: int = 1_000
    characters: int = MAX_DOCUMENT_CHARACTERS
    seconds: int = 20
    memory: int = 512 * 1024 * 1024
    """Bytes of the address space of a process that reads a PDF"""
    concurrent: int = 2
    """PDFs that are read at once"""
    waiting: int = 32
    """PDFs that are read or wait for their turn; more are refused"""


_LIMITS = DocumentLimits()


class DocumentReader:
    """Reads the documents of all requests, a PDF in a process of its own."""

    def __init__(self, limits: DocumentLimits = _LIMITS) -> None:
        self._limits = limits
        self._places = asyncio.Semaphore(limits.concurrent)
        self._waiting = 0

    async def text(self, data: bytes, media_type: str, field: str) -> str:
        """Return the text of a document.

        media_type: empty = by the data. Raises INVALID_ARGUMENT with the reason and this field, and
        UNAVAILABLE if others take all places for long.
        """
        if kind_of(data, media_type, field) is DocumentKind.PDF:
            return await self._pdf_text(data, field)
        return plain_text(data, field, self._limits.characters)

    async def _pdf_text(self, data: bytes, field: str) -> str:
        if self._waiting >= self._limits.waiting:
            raise documents_busy()
        self._waiting += 1
        try:
            try:
                async with asyncio.timeout(self._limits.seconds):
                    await self._places.acquire()
            except TimeoutError:
                raise documents_busy() from None
            try:
                read = await self._run(data) or await self._run(data)
            finally:
                self._places.release()
        finally:
            self._waiting -= 1
        if read is None:
            raise _reader_lost()
        kind, text = read
        if kind != "text":
            raise invalid(field, f"{field}: the PDF {text}.", reason="UNREADABLE_PDF")
        return text

    async def _run(self, data: bytes) -> tuple[str, str] | None:
        """Return what the program writes: "text" or "problem", and the one or the other.

        None = another process killed it, or the machine ran out of memory.
        """
        limits = self._limits
        numbers = (limits.pages, limits.characters, limits.seconds, limits.memory)
        process = await asyncio.create_subprocess_exec(
            # without the program's folder on the path, and without the server's secrets
            *(sys.executable, "-P", str(_PROGRAM), *map(str, numbers)),
            env={name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(limits.seconds):
                output, errors = await process.communicate(data)
        except TimeoutError:
            return "problem", f"takes more than {limits.seconds} s to read"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode == -signal.SIGKILL:
            _LOG.warning("the reader of a PDF was killed")
            return None
        if process.returncode != 0:  # the system ended it
            end = errors[-1000:].decode(errors="replace")
            _LOG.warning("a PDF ended its reader with %s: %s", process.returncode, end)
            return "problem", "takes too much time or memory to read"
        kind, _, text = output.decode().partition("\n")
        return kind, text


def _reader_lost() -> ServiceError:
    message = "The process that reads the PDF was killed, twice; try again."
    code = grpc.StatusCode.UNAVAILABLE
    return ServiceError(code, "DOCUMENT_READER_LOST", message, retry_seconds=5)


def documents_busy() -> ServiceError:
    """Return the refusal of a document for which no place became free."""
    message = "The server reads as many PDFs as it can; try again."
    code = grpc.StatusCode.UNAVAILABLE
    return ServiceError(code, "DOCUMENTS_BUSY", message, retry_seconds=5)
