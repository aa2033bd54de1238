"""Names of full KV blocks, which an engine and those who choose between engines compute alike."""

import hashlib
from array import array
from collections.abc import Sequence

__all__ = ["HASH_BYTES", "hash_block", "prefix_hashes", "tenant_salt"]

HASH_BYTES = 16
"""Bytes of a hash"""


def tenant_salt(tenant: str) -> bytes:
    """Return the parent hash of a prompt's first block; tenants share no blocks."""
    return hashlib.blake2b(tenant.encode(), digest_size=HASH_BYTES).digest()


def hash_block(parent: bytes, ids: bytes, images: bytes = b"") -> bytes:
    """Return the hash of a full block over its parent's hash and its own ids.

    parent: hash of the block before; the tenant's salt for the first. ids: int32, little-endian.
    images: the digests of the images that some of the ids stand for.
    """
    return hashlib.blake2b(ids + images, key=parent[:64], digest_size=HASH_BYTES).digest()


def prefix_hashes(ids: Sequence[int], salt: bytes, block_size: int) -> list[bytes]:
    """Return the hashes of all full blocks of a prompt without images."""
    hashes = []
    parent, data = salt, array("i", ids).tobytes()
    size = block_size * 4
    for start in range(0, len(ids) // block_size * size, size):
        parent = hash_block(parent, data[start : start + size])
        hashes.append(parent)
    return hashes
