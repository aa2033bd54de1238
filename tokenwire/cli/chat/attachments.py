"""Files that go with the next message: images, texts, PDFs."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tokenwire.cli.chat.conversation import image_type
from tokenwire.messages import Message

__all__ = ["AttachmentError", "Attachments", "ReadPdf", "read_file"]

ReadPdf: TypeAlias = Callable[[bytes, str], Awaitable[str]]
"""Function that returns the text of a PDF with this name. Raises AttachmentError"""
_MOST_BYTES = 32 << 20


class AttachmentError(Exception):
    """File that can't be attached. The message is one sentence."""


@dataclass(slots=True)
class Attachments:
    """Attached files; the next message takes them."""

    read_pdf: ReadPdf
    _images: list[bytes] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Names of the files in their order"""

    def add_image(self, path: Path) -> None:
        """Attach an image. Raises AttachmentError."""
        data = read_file(path)
        if image_type(data) is None:
            raise AttachmentError(f"{path} is no PNG, JPEG, WebP or GIF.")
        self._images.append(data)
        self.names.append(path.name)

    async def add_file(self, path: Path) -> int:
        """Attach the text of a file, and return its length. Raises AttachmentError."""
        data = read_file(path)
        if data.startswith(b"%PDF-"):
            text = await self.read_pdf(data, path.name)
        elif image_type(data) is not None:
            raise AttachmentError(f"{path} is an image: use /image.")
        else:
            text = _decoded(data, path)
        self._texts.append(f"File {path.name}:\n\n{_fenced(text)}")
        self.names.append(path.name)
        return len(text)

    def take(self, text: str) -> Message:
        """Return the user's message with the files, and drop these."""
        content = "\n\n".join([*self._texts, text])
        message = Message("user", content, images=tuple(self._images))
        self.clear()
        return message

    def clear(self) -> None:
        """Drop the files."""
        for each in (self._images, self._texts, self.names):
            each.clear()


def read_file(path: Path) -> bytes:
    """Return what a file of at most 32 MiB holds. Raises AttachmentError."""
    try:
        if path.is_dir():
            raise AttachmentError(f"{path} is a directory.")
        if path.exists() and not path.is_file():  # a pipe or device may have no end
            raise AttachmentError(f"{path} is no regular file.")
        if path.stat().st_size > _MOST_BYTES:
            raise AttachmentError(f"{path} is larger than {_MOST_BYTES >> 20} MiB.")
        return path.read_bytes()
    except OSError as error:
        raise AttachmentError(f"{path} can't be read: {error.strerror}.") from None


def _decoded(data: bytes, path: Path) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise AttachmentError(f"{path} is neither a PDF nor text in UTF-8.") from None
    if "\0" in text:
        raise AttachmentError(f"{path} is no text: it has null bytes.")
    return text


def _fenced(text: str) -> str:
    """Return the text between fences longer than any run of backquotes in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text.rstrip()}\n{fence}"
