"""Documents of prompts: their kinds by media type, and the text of those that are text."""

from enum import Enum, auto

from services.common.contract import MAX_DOCUMENT_CHARACTERS
from tokenwire.errors import invalid

__all__ = ["DocumentKind", "kind_of", "plain_text"]

_PDF = "application/pdf"
_TEXTS = ("application/json", "application/jsonl", "application/xml")
_UNKNOWN = ("", "application/octet-stream")
_SHOWN = 64  # characters of a media type in an error


class DocumentKind(Enum):
    """Kinds of documents."""

    PDF = auto()
    TEXT = auto()


def kind_of(data: bytes, media_type: str, field: str) -> DocumentKind:
    """Return the kind of a document. media_type: empty = by the data.

    Raises INVALID_ARGUMENT, with this field, for another media type.
    """
    kind = media_type.partition(";")[0].strip().lower()
    if kind == _PDF or (kind in _UNKNOWN and data.startswith(b"%PDF-")):
        return DocumentKind.PDF
    if kind in _UNKNOWN or kind in _TEXTS or kind.startswith("text/"):
        return DocumentKind.TEXT
    raise invalid(
        field,
        f"{field} has the media type {kind[:_SHOWN]!r}; use application/pdf or text/plain.",
    )


def plain_text(data: bytes, field: str, most: int = MAX_DOCUMENT_CHARACTERS) -> str:
    """Return the text of a document in UTF-8. most: code points.

    Raises INVALID_ARGUMENT, with this field, for what is not UTF-8 or has more.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise invalid(field, f"{field} is neither a PDF nor text in UTF-8.") from None
    if len(text) > most:
        raise invalid(field, f"{field} has more than {most:,} characters.")
    return text
