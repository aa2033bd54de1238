"""Program that reads a PDF on its standard input and writes its text in UTF-8.

The server runs it in a separate process, so that a hostile PDF can exhaust or block only that
process. It imports nothing of this package.
"""

import contextlib
import io
import logging
import os
import resource
import sys
from collections.abc import Iterator

from pypdf import PdfReader
from pypdf.errors import DependencyError, LimitReachedError

__all__: list[str] = []


class _UnreadableError(Exception):
    """A PDF that can't be read. The message continues the sentence "The PDF …"."""


def main() -> None:
    """Write a line with "text" or "problem", and then the one or the other.

    Arguments: pages, characters, seconds and bytes, at most.
    """
    most_pages, most_characters, seconds, most_bytes = map(int, sys.argv[1:])
    data = sys.stdin.buffer.read()
    os.nice(10)  # streams go first
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # the soft limit sends SIGXCPU first: SIGKILL then means that another process ended this one
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    try:
        kind, text = "text", _text(data, most_pages, most_characters)
    except _UnreadableError as problem:
        kind, text = "problem", str(problem)
    except (MemoryError, LimitReachedError):
        kind, text = "problem", "takes too much memory to read"
    except RecursionError:
        kind, text = "problem", "is nested too deeply"
    except Exception:  # a damaged PDF may raise anything
        kind, text = "problem", "is damaged, or is no PDF"
    sys.stdout.buffer.write(f"{kind}\n{text}".encode())


def _text(data: bytes, most_pages: int, most_characters: int) -> str:
    logging.disable()
    text = "\n\n".join(_pages(data, most_pages, most_characters)).strip()
    if not text:
        raise _UnreadableError("has no text: its pages may be images")
    return text


def _pages(data: bytes, most_pages: int, most_characters: int) -> Iterator[str]:
    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted:
        is_open = False
        with contextlib.suppress(DependencyError, NotImplementedError):
            is_open = bool(reader.decrypt(""))
        if not is_open:
            raise _UnreadableError("is encrypted: send it without a password")
    if (count := len(reader.pages)) > most_pages:
        raise _UnreadableError(f"has {count:,} pages; {most_pages:,} are allowed")
    length = 0
    for page in reader.pages:
        text = page.extract_text()
        length += len(text)
        if length > most_characters:
            raise _UnreadableError(f"has more than {most_characters:,} characters of text")
        # a font's table may name half of a surrogate pair
        yield text.encode("utf-8", "replace").decode()


if __name__ == "__main__":
    main()
