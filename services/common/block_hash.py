"""Hashes that identify full KV blocks, for an engine's cache and for the choice of an engine."""

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "HASH_BYTES",
    "ImagePlaces",
    "hash_block",
    "image_digest",
    "prefix_hashes",
    "prompt_salt",
    "tenant_salt",
]

HASH_BYTES = 16
"""Bytes of a hash"""


class ImagePlaces(NamedTuple):
    """An image of a prompt, and the ids that stand for it."""

    digest: bytes
    """Digest of the encoded image, from `image_digest`"""
    places: Sequence[int]
    """Indices of the ids that stand for the image's parts, in ascending order"""


def tenant_salt(tenant: str) -> bytes:
    """Return the parent hash of a prompt's first block; tenants share no blocks."""
    return hashlib.blake2b(tenant.encode(), digest_size=HASH_BYTES).digest()


def prompt_salt(tenant: bytes, adapter: str) -> bytes:
    """Return the parent hash of the first block of a prompt with an adapter.

    tenant: hash from `tenant_salt`. adapter: fingerprint of the adapter; empty = none, in which
    case the tenant's salt itself is returned.
    """
    return hash_block(tenant, adapter.encode()) if adapter else tenant


def image_digest(data: bytes) -> bytes:
    """Return the digest of an encoded image. Takes about 20 ms for the largest."""
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


def hash_block(parent: bytes, ids: bytes, images: bytes = b"") -> bytes:
    """Return the hash of a full block over its parent's hash and its own ids.

    parent: hash of the block before; the tenant's salt for the first. ids: int32, little-endian.
    images: the digests of the images that some of the ids stand for, in order.
    """
    return hashlib.blake2b(ids + images, key=parent[:64], digest_size=HASH_BYTES).digest()


def prefix_hashes(
    ids: Sequence[int], salt: bytes, block_size: int, images: Sequence[ImagePlaces] = ()
) -> list[bytes]:
    """Return the hashes of all full blocks of a prompt with these images, in order."""
    hashes = []
    parent, data = salt, array("i", ids).tobytes()
    for start in range(0, len(ids) // block_size * block_size, block_size):
        end = start + block_size
        digests = b"".join(image.digest for image in images if _is_within(image, start, end))
        parent = hash_block(parent, data[4 * start : 4 * end], digests)
        hashes.append(parent)
    return hashes


def _is_within(image: ImagePlaces, start: int, end: int) -> bool:
    """Return whether one of the ids from `start` to `end` stands for a part of the image."""
    first = bisect_left(image.places, start)
    return first < len(image.places) and image.places[first] < end
