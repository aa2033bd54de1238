"""Process of the image encoder: it loads the vision tower, then encodes batch after batch.

It is a separate process with a low priority, because decode steps must not wait for an image.
"""

import logging
import os
import signal
import socket
from contextlib import suppress
from typing import NoReturn

import torch

from services.common import logging as service_logging
from services.common.images import ImageError
from services.common.process import end_process, ends_with_peer
from services.common.settings import StartupError
from services.engine.framing import Unpacker, pack
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.loader import resolve_dtype
from services.engine.settings import EngineSettings
from services.engine.vision.encoder import ImageEncoder, ImageFeatures
from services.engine.vision.messages import (
    EncodedImage,
    EncodeImages,
    EncoderFailed,
    EncoderReady,
    ImagesEncoded,
    UnreadableImage,
)

__all__ = ["encoded", "run"]

_LOG = logging.getLogger("encoder")
_NICENESS = 19
"""Niceness on a CPU: the encoder computes while the loop pauses for it, and little during steps"""


def run(settings: EngineSettings, link: socket.socket) -> NoReturn:
    """Encode images until the gRPC process closes `link`; exit with 1 or 2 after a failure."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the gRPC process decides when to stop
    service_logging.configure("engine", settings.log_level, settings.log_format)
    os.nice(_NICENESS)
    try:
        with ends_with_peer(link):
            encoder = _load(settings)
    except (CheckpointError, StartupError) as error:
        with suppress(ConnectionError):  # the gRPC process may be gone
            link.sendall(pack(EncoderFailed(str(error))))
        end_process(2)
    try:
        with suppress(ConnectionError):
            link.sendall(pack(EncoderReady(encoder.image_token_id, _batch_size(encoder))))
            _run(encoder, link)
    except Exception:
        _LOG.exception("a batch of images failed")
        end_process(1)
    end_process(0)


def _batch_size(encoder: ImageEncoder) -> int:
    """Return 8 on a GPU, and 1 on a CPU, where a batch is not faster than its images one by one."""
    return 8 if encoder.device.type == "cuda" else 1


def encoded(features: ImageFeatures | ImageError) -> EncodedImage | UnreadableImage:
    """Return the message for an image's features."""
    if isinstance(features, ImageError):
        return UnreadableImage(str(features))
    embeddings = features.embeddings.contiguous()
    return EncodedImage(
        bytearray(embeddings.view(torch.uint8).numpy().data), embeddings.shape[1], features.grid
    )


def _load(settings: EngineSettings) -> ImageEncoder:
    on_gpu = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = torch.device("cuda" if on_gpu else "cpu")
    return ImageEncoder.load(settings.model, resolve_dtype(settings.dtype, device), device)


def _run(encoder: ImageEncoder, link: socket.socket) -> None:
    unpacker = Unpacker()
    while data := link.recv(1 << 20):
        for message in unpacker.feed(data):
            request: EncodeImages = message
            link.sendall(
                pack(ImagesEncoded([encoded(each) for each in encoder.encode(request.files)]))
            )
