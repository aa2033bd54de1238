"""Pickled messages in a byte stream, each behind its length.

Unpickling is safe here: both ends are processes of one engine.
"""

import pickle
import struct
from typing import Any

__all__ = ["Unpacker", "pack"]

_HEADER = struct.Struct("<Q")


def pack(message: object) -> bytes:
    """Return the bytes of a message."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(data)) + data


class Unpacker:
    """Reassembly of messages from pieces of any size."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """Bytes of the message that is not complete yet"""

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that this piece completes."""
        self._rest += data
        messages, start = [], 0
        while len(self._rest) - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._rest, start)
            begin = start + _HEADER.size
            if len(self._rest) - begin < size:
                break
            start = begin + size
            messages.append(pickle.loads(self._rest[begin:start]))
        del self._rest[:start]
        return messages
