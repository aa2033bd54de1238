"""Draft heads: a layer that predicts the token after the next one from a model's hidden states.

A head reads, for each row, the hidden states of a token and the embedding of the token behind it.
The first draft token follows from hidden states of the engine's model. Further ones follow from
hidden states that the head has made itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend, KVCache
from services.engine.model.decoder import Decoder, DecoderWeights
from services.engine.model.layer_stack import Activations
from services.engine.model.operators.interface import Operators
from services.engine.model.residual import ResidualRows

__all__ = ["DraftHead", "HeadInputs"]


class HeadInputs(ABC):
    """Inputs of a head's layer, made from embeddings and hidden states."""

    width: int
    """Width of the hidden states of the engine's model that a row reads"""
    embedding_width = 0
    """Width of the embeddings; 0: hidden_size"""
    own_width = 0
    """Width of the hidden states that `following` returns; 0: hidden_size"""

    @abstractmethod
    def fill(self, embedded: Tensor, states: Tensor, rows: ResidualRows, *, is_own: bool) -> None:
        """Fill the rows with the layer's input.

        embedded: [n, embedding_width], embeddings of the tokens behind. states: [n, width], hidden
        states of the engine's model; is_own: those that `following` has returned.
        """

    @abstractmethod
    def following(self, hidden: Tensor) -> Tensor:
        """Return new hidden states for further draft tokens, from rows of the layer's output."""


class DraftHead(Decoder):
    """A decoder of one layer that reads hidden states. Not thread-safe: passes share buffers."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        weights: DecoderWeights,
        operators: Operators,
        attention: AttentionBackend,
        inputs: HeadInputs,
    ) -> None:
        self._inputs = inputs
        self._states: Tensor | None = None
        """Hidden states of the present pass; None = they are 0, as for a measurement"""
        self._is_own = False
        super().__init__(spec, dtype, weights, operators, attention)
        self.runs_in_pieces = False

    @property
    def draft_layers(self) -> int:
        """Number of layers that make one draft token each; 1: all layers make one in a pass."""
        return 1

    @property
    def states_width(self) -> int:
        """Width of the hidden states of the engine's model that a row reads."""
        return self._inputs.width

    @property
    def own_width(self) -> int:
        """Width of the hidden states that the head has made itself."""
        return self._inputs.own_width or self.spec.hidden_size

    def run(self, batch: StepBatch, cache: KVCache, states: Tensor, *, is_own: bool) -> Tensor:
        """Compute rows as `forward` does.

        The batch has the id of the token behind each row. states: parameter of `HeadInputs.fill`.
        """
        with self.reading(states, is_own=is_own):
            return self.forward(batch, cache)

    @contextmanager
    def reading(self, states: Tensor, *, is_own: bool) -> Iterator[None]:
        """Have passes read hidden states, which are parameters of `HeadInputs.fill`."""
        self._states, self._is_own = states, is_own
        try:
            yield
        finally:
            self._states = None

    def following_states(self, hidden: Tensor) -> Tensor:
        """Return new hidden states for further draft tokens, from rows of `run`'s result."""
        return self._inputs.following(hidden)

    def _begin(self, batch: StepBatch, buffers: Activations) -> None:
        tokens = len(batch.token_ids)
        width = self._inputs.embedding_width or self.spec.hidden_size
        embedded = buffers.hidden.new_empty(tokens, width)
        self._weights.embedding.read(batch.token_ids, embedded)
        states, is_own = self._states, self._is_own
        if states is None:
            states, is_own = embedded.new_zeros(tokens, self._inputs.width), False
        self._inputs.fill(embedded, states, buffers.residual, is_own=is_own)
        self._rotaries.compute(batch.positions, buffers.rotations)
