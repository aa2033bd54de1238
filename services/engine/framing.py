"""Messages over a byte stream: pickled, each behind its length. Both ends are ours."""

import pickle
import struct
from typing import Any

__all__ = ["Unpacker", "pack"]

_HEADER = struct.Struct("<Q")


def pack(message: object) -> bytes:
    """A message as it travels."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(data)) + data


class Unpacker:
    """Puts together what arrives in pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that end within this piece."""
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
