"""Messages between the gRPC process and the image encoder's process."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "EncodeImages",
    "EncodedImage",
    "EncoderFailed",
    "EncoderReady",
    "ImagesEncoded",
    "UnreadableImage",
]


@dataclass(frozen=True, slots=True)
class EncoderReady:
    """The first message: the encoder takes images."""

    image_token_id: int
    """Id that stands for one part of an image in prompts"""
    batch_size: int
    """Most images to encode together"""


@dataclass(frozen=True, slots=True)
class EncoderFailed:
    """The first message of an encoder that can't start."""

    message: str
    """One sentence for the operator"""


@dataclass(frozen=True, slots=True)
class EncodeImages:
    """Images to encode together."""

    files: Sequence[bytes]
    """Encoded files: PNG, JPEG, WebP or GIF"""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """Features of an image, as bytes for another process."""

    embeddings: bytearray
    """[layers, num_tokens, hidden size] in the decoder's dtype"""
    num_tokens: int
    """Number of image tokens that the image needs in its prompt"""
    grid: tuple[int, int] | None
    """Rows and columns of the tokens for multimodal RoPE; None = the tokens lie in a line"""


@dataclass(frozen=True, slots=True)
class UnreadableImage:
    """A file that is not a valid image."""

    message: str
    """One sentence for the client"""


@dataclass(frozen=True, slots=True)
class ImagesEncoded:
    """Answer to EncodeImages, with the images in the same order."""

    images: Sequence[EncodedImage | UnreadableImage]
