"""Documents of one request: their bytes, or the uploaded files that have them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.common.contract import MAX_DOCUMENTS
from services.http_shim.images.request_images import decode_base64
from tokenwire.errors import invalid

__all__ = ["RequestDocument", "check_count", "document_text", "encoded_document"]


@dataclass(slots=True)
class RequestDocument:
    """A document whose text is not read yet."""

    param: str
    """The client's name of its field"""
    data: bytes = field(default=b"", repr=False)
    media_type: str = ""
    """Empty = as its data say"""
    file_id: str = ""
    """Id of the uploaded file that has the data; empty = `data`"""
    put: Callable[[str], None] = field(default=lambda _: None, repr=False)
    """Takes its text"""


def encoded_document(text: str, media_type: str, param: str) -> RequestDocument:
    """Return the document of a data URL, or of base64 alone. Raises INVALID_ARGUMENT.

    media_type: of base64 alone.
    """
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        media_type, *parameters = (part.strip().lower() for part in head[5:].split(";"))
        if not comma or not parameters or parameters[-1] != "base64":
            raise invalid(
                param, f"{param} must be base64, or a data URL: data:application/pdf;base64,…"
            )
    data = decode_base64(text, param, what="a document")
    if not data:
        raise invalid(param, f"{param} has no data.")
    return RequestDocument(param, data, media_type)


def check_count(documents: Sequence[RequestDocument], param: str) -> None:
    """Raise INVALID_ARGUMENT if the request has as many documents as it may."""
    if len(documents) == MAX_DOCUMENTS:
        raise invalid(param, f"{param}: a request may have at most {MAX_DOCUMENTS} documents.")


def document_text(*parts: str | None) -> str:
    """Return the title and text of a document as one text."""
    return "\n\n".join(part for part in parts if part)
