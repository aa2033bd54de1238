"""Token ids of prompts and sequences, and the hashes of their full blocks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.common.block_hash import hash_block
from services.engine.scheduling.prompt_images import PromptImages

__all__ = ["Prompt", "TokenIds"]


class Prompt:
    """Ids and block hashes of a prompt, which all its choices share."""

    def __init__(
        self,
        ids: Sequence[int],
        cache_salt: bytes,
        block_size: int,
        images: PromptImages | None = None,
    ) -> None:
        self.ids = np.array(ids, dtype=np.int32)
        """int32 [length]; not writeable"""
        self.ids.flags.writeable = False
        self.images = images
        """Images of the prompt; None = the prompt has none"""
        self.cache_salt = cache_salt
        self.block_size = block_size
        self.num_blocks = len(ids) // block_size
        """Number of blocks that the prompt fills"""
        self._hashes: list[bytes] = []

    def block_hashes(self, count: int) -> list[bytes]:
        """Return the hashes of the first `count` blocks, at most `num_blocks`."""
        size = self.block_size
        for start in range(len(self._hashes) * size, count * size, size):
            parent = self._hashes[-1] if self._hashes else self.cache_salt
            ids = self.ids[start : start + size]
            self._hashes.append(hash_block(parent, ids.tobytes(), self.digests(start)))
        return self._hashes[:count]

    def digests(self, start: int) -> bytes:
        """Return the digests of the images in the block that begins at index `start`."""
        return b"" if self.images is None else self.images.digests(start, start + self.block_size)

    def block_hash(self, index: int) -> bytes:
        """Return the hash of one block that the prompt fills."""
        if index >= len(self._hashes):
            self.block_hashes(index + 1)
        return self._hashes[index]


class TokenIds:
    """Ids of one sequence, prompt and generated, and the hashes of its full blocks."""

    def __init__(self, prompt: Prompt, generated: Sequence[int] = ()) -> None:
        """generated: ids that the sequence resumes with."""
        self._prompt = prompt
        self._ids = prompt.ids
        """Prompt and generated ids; the array is the prompt's own until the first append"""
        if generated:
            self._ids = np.concatenate((prompt.ids, np.array(generated, dtype=np.int32)))
        self._length = len(self._ids)
        self._hashes: list[bytes] = []
        """Hashes of the blocks after those that the prompt fills"""

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """All ids: int32 [length], a view."""
        return self._ids[: self._length]

    def append(self, token: int) -> None:
        if self._length == len(self._ids):
            grown = np.empty(self._length + max(64, self._length // 4), dtype=np.int32)
            grown[: self._length] = self._ids
            self._ids = grown
        self._ids[self._length] = token
        self._length += 1

    def fork(self) -> "TokenIds":
        """Return a copy that grows independently. The prompt stays shared."""
        copy = TokenIds(self._prompt)
        copy._ids, copy._length = self.array.copy(), self._length
        copy._hashes = self._hashes.copy()
        return copy

    def block_hash(self, index: int) -> bytes:
        prompt, size = self._prompt, self._prompt.block_size
        own = index - prompt.num_blocks
        if own < 0:
            return prompt.block_hash(index)
        while len(self._hashes) <= own:
            last = prompt.num_blocks + len(self._hashes)
            parent = self.block_hash(last - 1) if last else prompt.cache_salt
            ids = self._ids[last * size : (last + 1) * size]
            self._hashes.append(hash_block(parent, ids.tobytes(), prompt.digests(last * size)))
        return self._hashes[own]

    def block_hashes(self, tokens: int) -> list[bytes]:
        """Return the hashes of the full blocks among the first `tokens` tokens."""
        count, shared = tokens // self._prompt.block_size, self._prompt.num_blocks
        hashes = self._prompt.block_hashes(min(count, shared))
        return hashes + [self.block_hash(i) for i in range(shared, count)]
