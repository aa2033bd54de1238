"""Stored tensors that embed the tokens of one modality: their names and shapes."""

from dataclasses import dataclass

from services.engine.model.architecture.modal_tokens import ModalTokens
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.parts.stored import LayerNames, StoredLinear

__all__ = ["StoredModalTokens", "stored_modal_tokens"]


@dataclass(frozen=True, slots=True)
class StoredModalTokens:
    """Tensors of one modality: a table, its norm, and its projection to the decoder's width."""

    table: StoredTensor
    norm: StoredTensor
    projection: StoredLinear


def stored_modal_tokens(spec: ModelSpec, tokens: ModalTokens) -> StoredModalTokens:
    """Name the tensors that embed `tokens`."""
    names = LayerNames(spec, f"{tokens.module}.")
    return StoredModalTokens(
        table=names.tensor("embedding.weight", tokens.rows, tokens.width),
        norm=names.tensor("hard_embedding_norm.weight", tokens.width),
        projection=names.linear(
            ("embedding_projection",), (spec.hidden_size,), tokens.width, False
        ),
    )
