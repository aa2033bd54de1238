"""The masks that an engine keeps, by slot."""

import hashlib
from collections import OrderedDict

__all__ = ["MaskSlots"]


class MaskSlots:
    """The slots of one engine. A new mask replaces the least recently used one."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._next = 0
        self._held: OrderedDict[bytes, int] = OrderedDict()  # digest of the mask -> slot

    def place(self, mask: bytes) -> tuple[int | None, bool]:
        """Return the slot of a mask, and whether the engine has the mask there already.

        The slot is None if the engine has no slots.
        """
        if self._free == 0 and not self._held:
            return None, False
        digest = hashlib.blake2b(mask, digest_size=16).digest()
        slot = self._held.get(digest)
        if slot is not None:
            self._held.move_to_end(digest)
            return slot, True
        if self._free:
            slot, self._next, self._free = self._next, self._next + 1, self._free - 1
        else:
            _, slot = self._held.popitem(last=False)
        self._held[digest] = slot
        return slot, False
