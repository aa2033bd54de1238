"""Inputs of a step's layers that images change."""

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch

__all__ = ["add_images", "changes_layers", "embed_images", "ids_without_images"]


def embed_images(batch: StepBatch, hidden: Tensor) -> None:
    """Replace the embeddings [tokens, hidden_size] of the tokens of images."""
    for image in batch.images:
        hidden[image.indices] = image.embeddings[0]
    if (staged := batch.staged_images) is not None:
        torch.where(staged.are_images[:, None], staged.embeddings_of(0), hidden, out=hidden)


def add_images(batch: StepBatch, layer: int, hidden: Tensor) -> None:
    """Add what images add to the inputs [tokens, hidden_size] of a layer but the first."""
    for image in batch.images:
        if layer < len(image.embeddings):
            hidden.index_add_(0, image.indices, image.embeddings[layer])
    staged = batch.staged_images
    if staged is not None and layer < len(staged.embeddings):
        own = staged.embeddings_of(layer)
        hidden.add_(own.masked_fill_(~staged.are_images[:, None], 0))


def changes_layers(batch: StepBatch) -> bool:
    """Return whether images add to the inputs of layers behind the first."""
    staged = batch.staged_images
    is_staged = staged is not None and len(staged.embeddings) > 1
    return is_staged or any(len(image.embeddings) > 1 for image in batch.images)


def ids_without_images(batch: StepBatch, ids: Tensor, pad_token_id: int) -> Tensor:
    """Return `ids` (int64 [tokens]) with another id for the tokens of images."""
    if (staged := batch.staged_images) is not None:
        return ids.masked_fill(staged.are_images, pad_token_id)
    if not batch.images:
        return ids
    ids = ids.clone()
    for image in batch.images:
        ids[image.indices] = pad_token_id
    return ids
