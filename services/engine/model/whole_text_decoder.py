"""Decoder whose tokens see all tokens of their text, for models that make vectors."""

import torch

from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend
from services.engine.model.decoder import Decoder, DecoderWeights
from services.engine.model.operators.interface import Operators
from services.engine.model.whole_text_stack import WholeTextStack

__all__ = ["WholeTextDecoder"]


class WholeTextDecoder(WholeTextStack, Decoder):
    """A decoder's layers without the causal mask."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        weights: DecoderWeights,
        operators: Operators,
        attention: AttentionBackend,
    ) -> None:
        super().__init__(spec, dtype, weights, operators, attention)
        self._recording = None
