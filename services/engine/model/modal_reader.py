"""Loading of the rows of tokens that the text's table does not embed (Gemma 3n)."""

from torch import Tensor
from torch.nn.functional import rms_norm

from services.engine.model.architecture.modal_tokens import ModalTokens
from services.engine.model.checkpoint.quantized import decoded
from services.engine.model.embedding import Embedding, ModalEmbedding
from services.engine.model.parts.stored_modal import StoredModalTokens
from services.engine.model.parts.tensor_reader import TensorReader

__all__ = ["with_modal_tokens"]


def with_modal_tokens(
    reader: TensorReader, stored: StoredModalTokens, tokens: ModalTokens, text: Embedding
) -> Embedding:
    """Return the embedding `text` with rows of their own for `tokens`."""
    rows = _rows(reader, stored, tokens) / reader.spec.embedding_scale  # the decoder multiplies
    return ModalEmbedding(text, tokens.first, rows.to(reader.device, reader.dtype))


def _rows(reader: TensorReader, stored: StoredModalTokens, tokens: ModalTokens) -> Tensor:
    """Return the embeddings of `tokens`: float32 [count, hidden_size]."""
    table = reader.tensor(stored.table)[: tokens.count].float()
    norm = reader.tensor(stored.norm).float()
    ((weight, _),) = reader.linear(stored.projection, None)
    product = rms_norm(table, norm.shape, norm, tokens.epsilon) @ decoded(weight).float().T
    return rms_norm(product, product.shape[1:], None, tokens.epsilon)
