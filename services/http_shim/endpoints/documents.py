"""Documents of a request, read before its prompt is made."""

from collections.abc import Sequence

from services.common.contract import MAX_DOCUMENTS_BYTES, MAX_DOCUMENTS_CHARACTERS
from services.common.documents import DocumentKind, kind_of, plain_text
from services.http_shim.documents.request_documents import RequestDocument
from services.http_shim.http.body import HeldBytes
from services.http_shim.http.exchange import Exchange
from services.http_shim.jobs.jobs import InnerJobs, context_of
from tokenwire.errors import invalid
from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = ["Documents"]


class Documents:
    """Reads the documents of requests: text by itself, PDFs and uploaded files by the jobs."""

    def __init__(self, jobs: InnerJobs) -> None:
        self._jobs = jobs

    async def read(
        self,
        documents: Sequence[RequestDocument],
        exchange: Exchange,
        held: HeldBytes,
        image_bytes: int,
    ) -> None:
        """Put the text of each document in its place.

        held: counts the documents besides the request's images, until they are read. Raises
        INVALID_ARGUMENT, NOT_FOUND, UNAVAILABLE and UNIMPLEMENTED with the field of a document.
        """
        if not documents:
            return
        size = sum(len(each.data) for each in documents)
        if size > MAX_DOCUMENTS_BYTES:
            message = f"The documents have more than {MAX_DOCUMENTS_BYTES:,} bytes together."
            raise invalid(documents[0].param, message)
        held.resize(image_bytes + size)
        if all(map(_is_text, documents)):
            texts: Sequence[str] = [plain_text(each.data, each.param) for each in documents]
        else:
            request = jobs_pb2.ReadTextRequest(context=context_of(exchange))
            request.documents.extend(map(_message, documents))
            texts = await self._jobs.read_texts(request)
        _check_length(documents, texts)
        for document, text in zip(documents, texts, strict=True):
            document.put(text)
        held.resize(image_bytes)


def _is_text(document: RequestDocument) -> bool:
    """Return whether a document is text of the body. Raises INVALID_ARGUMENT for other types."""
    if document.file_id:
        return False
    kind = kind_of(document.data, document.media_type, document.param)
    return kind is DocumentKind.TEXT


def _message(document: RequestDocument) -> jobs_pb2.Document:
    message = jobs_pb2.Document(media_type=document.media_type, field=document.param)
    if document.file_id:
        message.file_id = document.file_id
    else:
        message.data = document.data
    return message


def _check_length(documents: Sequence[RequestDocument], texts: Sequence[str]) -> None:
    """Raise INVALID_ARGUMENT for documents with too much text."""
    length = 0
    for document, text in zip(documents, texts, strict=True):
        length += len(text)
        if length > MAX_DOCUMENTS_CHARACTERS:
            message = f"The documents have more than {MAX_DOCUMENTS_CHARACTERS:,} characters."
            raise invalid(document.param, message)
