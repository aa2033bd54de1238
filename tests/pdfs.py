"""Small PDFs, made by hand."""

import io
import zlib
from collections.abc import Sequence

from pypdf import PdfWriter

__all__ = ["encrypted_pdf", "pdf", "pdf_of_stream"]


def pdf(*pages: str) -> bytes:
    """Return a PDF that has a line of text on each page."""
    streams = [f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET".encode() for text in pages]
    return _document([b"<< /Length %d >>\nstream\n%b\nendstream" % (len(s), s) for s in streams])


def pdf_of_stream(content: bytes) -> bytes:
    """Return a PDF whose only page has this content, compressed."""
    packed = zlib.compress(content, 9)
    head = b"<< /Length %d /Filter /FlateDecode >>" % len(packed)
    return _document([b"%b\nstream\n%b\nendstream" % (head, packed)])


def encrypted_pdf(text: str, password: str) -> bytes:
    """Return a PDF that only a password opens."""
    writer = PdfWriter(clone_from=io.BytesIO(pdf(text)))
    writer.encrypt(password, algorithm="RC4-128")
    output = io.BytesIO()
    writer.write(output)
    return output.getvalue()


def _document(streams: Sequence[bytes]) -> bytes:
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    numbers = [4 + 2 * index for index in range(len(streams))]
    kids = b" ".join(b"%d 0 R" % number for number in numbers)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%b] /Count %d >>" % (kids, len(streams)),
        font,
    ]
    for number, stream in zip(numbers, streams, strict=True):
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % (number + 1)
        )
        objects.append(stream)
    output = bytearray(b"%PDF-1.7\n")
    places = []
    for number, body in enumerate(objects, start=1):
        places.append(len(output))
        output += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    start = len(output)
    output += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    for place in places:
        output += b"%010d 00000 n \n" % place
    output += b"trailer\n<< /Size %d /Root 1 0 R >>\n" % (len(objects) + 1)
    output += b"startxref\n%d\n%%%%EOF\n" % start
    return bytes(output)
