"""Stack of layers: the weights, buffers and steps that decoders and encoders share."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.kernels.memory import touch
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend
from services.engine.model.embedding import Embedding
from services.engine.model.image_inputs import embed_images
from services.engine.model.layer_inputs import InputRows, LayerRows
from services.engine.model.mixers.interface import Mixer, Scratch
from services.engine.model.mixers.kinds import MixerMaker, MixerWeights
from services.engine.model.model import Model
from services.engine.model.operators.composed_projections import OutputNorm
from services.engine.model.operators.interface import Operators
from services.engine.model.operators.rotation import Rotation
from services.engine.model.parts.feed_forward import FeedForward
from services.engine.model.pass_memory import pass_bytes
from services.engine.model.residual import Residual, ResidualRows

__all__ = ["Activations", "LayerStack", "LayerWeights", "StackWeights"]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights; norms are [width] in the model's dtype, None if the layer has none."""

    mixer_norm: Tensor | None
    mixer: MixerWeights | None
    """Weights of the mixer; None: the layer has no mixer"""
    mixer_post_norm: OutputNorm | None
    feed_forward_norm: Tensor | None
    feed_forward: FeedForward
    residual: Residual


@dataclass(frozen=True, slots=True, kw_only=True)
class StackWeights:
    """Weights of a stack of layers, on its device and in the operators' layout."""

    embedding: Embedding
    """[vocab_size, hidden_size]"""
    positions: Tensor | None
    """[context_length, hidden_size], added to the embedding; None: the layers use RoPE"""
    layers: tuple[LayerWeights, ...]
    step_bytes: int
    """Upper bound of the weight bytes that a step reads: all but the embeddings"""
    device: torch.device


@dataclass(frozen=True, slots=True)
class Activations:
    """Buffers of the forward pass, [tokens, width] each; all steps share them."""

    hidden: Tensor
    normed: Tensor
    mixing: tuple[Scratch, ...]
    """Buffers of mixers, one for each distinct shape"""
    inner: tuple[Tensor, ...]
    """Buffers of feed-forward layers, one for each distinct width"""
    spares: tuple[Tensor, ...]
    """Rows as wide as the residual, as many as a feed-forward layer needs"""
    rotations: tuple[Rotation, ...]
    """Rotations, one for each distinct RoPE"""
    inputs: InputRows | None
    """Inputs that each token has for each layer alone; None: there are none"""
    streams: Tensor | None
    """[tokens, streams, hidden_size], as in `ResidualRows`; None: there is only `hidden`"""
    waiting: Tensor | None
    """[tokens, hidden_size], as in `ResidualRows`"""
    joined: Tensor | None = None
    """[tokens, 2 * hidden_size], as in `ResidualRows`"""
    joined_normed: Tensor | None = None
    """[tokens, 2 * hidden_size], scratch space for `joined` in the layout of products"""
    tapped: tuple[Tensor, ...] = ()
    """Copies [tokens, hidden_size] of the residual between layers, which draft heads read"""

    @property
    def residual(self) -> ResidualRows:
        """The rows that layers read and add to."""
        return ResidualRows(self.hidden, self.normed, self.streams, self.waiting, self.joined)

    def inputs_of(self, layer: int) -> LayerRows | None:
        """Return the inputs that the tokens have for a layer alone."""
        return None if self.inputs is None else self.inputs.of(layer)

    @property
    def large(self) -> tuple[Tensor, ...]:
        """All buffers but the rotations."""
        mixing = (tensor for scratch in self.mixing for tensor in scratch.tensors)
        inputs = () if self.inputs is None else (self.inputs.whole, self.inputs.gated)
        wide = (self.streams, self.waiting, self.joined, self.joined_normed)
        others = (each for each in wide if each is not None)
        rows = (self.hidden, self.normed, *mixing, *self.inner, *self.spares)
        return *rows, *inputs, *others, *self.tapped

    def first(self, tokens: int) -> "Activations":
        return Activations(
            self.hidden[:tokens],
            self.normed[:tokens],
            tuple(scratch.first(tokens) for scratch in self.mixing),
            tuple(inner[:tokens] for inner in self.inner),
            tuple(spare[:tokens] for spare in self.spares),
            tuple(rotation.first(tokens) for rotation in self.rotations),
            None if self.inputs is None else self.inputs.first(tokens),
            None if self.streams is None else self.streams[:tokens],
            None if self.waiting is None else self.waiting[:tokens],
            None if self.joined is None else self.joined[:tokens],
            None if self.joined_normed is None else self.joined_normed[:tokens],
            tuple(each[:tokens] for each in self.tapped),
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer, and the places of its buffers."""

    mixer_norm: Tensor | None
    mixer: Mixer[Any]
    mixing: int
    """Index of the mixer's buffers in `Activations.mixing`"""
    mixer_post_norm: OutputNorm | None
    feed_forward_norm: Tensor | None
    feed_forward: FeedForward
    inner: int
    """Index of the feed-forward layer's buffer in `Activations.inner`"""
    residual: Residual


class LayerStack(Model):
    """A transformer: an embedding and layers of a mixer and a feed-forward layer each.

    Not thread-safe: passes share buffers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        weights: StackWeights,
        operators: Operators,
        attention: AttentionBackend,
    ) -> None:
        super().__init__(
            spec,
            dtype,
            weights.device,
            attention,
            weight_bytes=weights.step_bytes,
            rows_at_once=operators.rows_at_once,
        )
        self._weights = weights
        self._operators = operators
        maker = MixerMaker(spec, dtype, self.device, operators, attention)
        self._rotaries = maker.rotaries
        mixers = [
            maker.make(index, layer.mixer, mine.mixer)
            for index, (layer, mine) in enumerate(zip(spec.layers, weights.layers, strict=True))
        ]
        shapes = {mixer.scratch_key: mixer for mixer in mixers}
        keys = list(shapes)
        widths = list({layer.feed_forward.inner_width for layer in spec.layers})
        self._shapes = list(shapes.values())
        """A mixer of each distinct shape"""
        self._inner_widths = widths
        self._num_spares = max(layer.feed_forward.num_spares for layer in weights.layers)
        self._layers = [
            _Layer(
                mixer_norm=layer.mixer_norm,
                mixer=mixer,
                mixing=keys.index(mixer.scratch_key),
                mixer_post_norm=layer.mixer_post_norm,
                feed_forward_norm=layer.feed_forward_norm,
                feed_forward=layer.feed_forward,
                inner=widths.index(shape.feed_forward.inner_width),
                residual=layer.residual,
            )
            for layer, mixer, shape in zip(weights.layers, mixers, spec.layers, strict=True)
        ]
        self._activations = self._step_activations = self._allocate(64)
        self._is_reserved = False
        """True once `reserve` has allocated the buffers of the largest pass"""

    @property
    def buffers(self) -> object:
        return self._activations

    def choose_kernels(self, tokens: int) -> None:
        self._operators.choose_kernels()
        self._attention.choose_kernels(tokens)

    def reserve(self, tokens: int, rows: int) -> None:
        if tokens > len(self._activations.hidden):
            self._grow(tokens)
        self._is_reserved = True
        if self.device.type == "cpu":
            touch(self._activations.first(tokens).large)

    def bytes_to_reserve(self, tokens: int, rows: int) -> int:
        allocated = sum(buffer.nbytes for buffer in self._activations.large)
        return tokens * allocated // len(self._activations.hidden)

    def pass_bytes(self, tokens: int, rows: int, context: int) -> int:
        parts = pass_bytes(self.spec, self.dtype, tokens, rows, context)
        return parts + self._operators.product_bytes(tokens)

    def _run_adapted(self, batch: StepBatch, *parts: Callable[[], None]) -> None:
        """Run the parts of a pass for a batch in which sequences have adapters."""
        assert self.adapters is not None
        self.adapters.begin(batch)
        try:
            for part in parts:
                part()
        finally:
            self.adapters.end()

    def _begin(self, batch: StepBatch, buffers: Activations) -> None:
        """Compute what all layers share: the embeddings and the rotations."""
        self._embed(batch, buffers.hidden)
        positions = batch.positions if batch.rotary_positions is None else batch.rotary_positions
        self._rotaries.compute(positions, buffers.rotations)

    def _embed(self, batch: StepBatch, hidden: Tensor) -> None:
        self._weights.embedding.read(batch.token_ids, hidden)
        if self.spec.embedding_scale != 1:
            hidden *= self.spec.embedding_scale
        embed_images(batch, hidden)
        if self._weights.positions is not None:
            hidden += self._weights.positions[batch.positions + self.spec.position_offset]

    def _mixing(self, index: int, buffers: Activations) -> tuple[Mixer[Any], Any]:
        """Return a layer's mixer and its buffers."""
        layer = self._layers[index]
        return layer.mixer, buffers.mixing[layer.mixing]

    @abstractmethod
    def _project(self, index: int, buffers: Activations) -> None:
        """Compute the inputs of a layer's mixer from the residual."""

    @abstractmethod
    def _after_mixing(self, index: int, buffers: Activations) -> None:
        """Add the outputs of a layer's mixer and feed-forward layer to the residual."""

    def _keep(self, batch: StepBatch, buffers: Activations) -> None:
        """Move the rows that the step returns to the front."""
        outputs = batch.output_rows
        self._operators.keep(buffers.hidden, None if outputs is None else outputs.indices)

    def _kept(self, batch: StepBatch, buffers: Activations) -> Activations:
        """Return the buffers of the rows that the step returns."""
        outputs = batch.output_rows
        return buffers if outputs is None else buffers.first(len(outputs.indices))

    def _buffers(self, tokens: int) -> Activations:
        """Return the buffers of a pass.

        Once buffers are reserved they stay in place, because graphs hold their addresses: a pass
        that is larger than reserved gets buffers of its own.
        """
        if tokens == len(self._step_activations.hidden):
            return self._step_activations
        if tokens <= len(self._activations.hidden):
            self._step_activations = self._activations.first(tokens)
        elif self._is_reserved:
            self._step_activations = self._allocate(tokens)
        else:
            self._grow(tokens)
        return self._step_activations

    def _exceeds_reserve(self, tokens: int) -> bool:
        return self._is_reserved and tokens > len(self._activations.hidden)

    def _grow(self, tokens: int) -> None:
        """Replace the buffers by larger ones."""
        self._activations = self._step_activations = self._allocate(tokens)

    def _allocate(self, tokens: int) -> Activations:
        spec, empty = self.spec, self._operators.empty
        return Activations(
            hidden=empty(tokens, spec.hidden_size),
            normed=empty(tokens, spec.hidden_size),
            mixing=tuple(mixer.allocate(tokens) for mixer in self._shapes),
            inner=tuple(empty(tokens, width) for width in self._inner_widths),
            spares=tuple(empty(tokens, spec.hidden_size) for _ in range(self._num_spares)),
            rotations=self._rotaries.allocate(tokens),
            inputs=None,
            streams=None,
            waiting=None,
        )
