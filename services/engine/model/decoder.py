"""The decoder's forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.kernels.memory import touch
from services.engine.model.architecture.cache_groups import layer_groups
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend, KVCache
from services.engine.model.embedding import Embedding
from services.engine.model.image_inputs import add_images, changes_layers
from services.engine.model.layer_inputs import LayerInputs
from services.engine.model.layer_stack import Activations, LayerStack, StackWeights
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.operators.recording import Recording
from services.engine.model.parts.feed_forward import TokenIds

__all__ = ["Decoder", "DecoderWeights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights(StackWeights):
    """All weights of a decoder."""

    final_norm: Tensor
    output: Projection | None
    """hidden_size → vocab_size; None: the model computes no logits"""
    layer_inputs: LayerInputs | None
    """Inputs of tokens for single layers; None: there are none"""
    tokens: TokenIds | None
    """Ids for layers whose experts depend on them; None: there are no such layers"""


class Decoder(LayerStack):
    """A decoder-only transformer. Not thread-safe: passes share buffers."""

    _weights: DecoderWeights
    _taps: tuple[int, ...] = ()
    """Numbers of layers behind which the residual is copied"""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        weights: DecoderWeights,
        operators: Operators,
        attention: AttentionBackend,
    ) -> None:
        super().__init__(spec, dtype, weights, operators, attention)
        self._logits = torch.empty((0, spec.vocab_size), device=self.device)
        self._recording = operators.recording(only_decodes=bool(spec.latent_layers))
        self._tapped_recording: Recording | None = None
        """Recording of passes that copy residuals"""

    @property
    def is_capturable(self) -> bool:
        # Other mixtures read the router's choice on the host, which a graph can't.
        groups = self._operators.groups_experts and self.spec.gates_experts
        has_fixed_launches = groups or not self.spec.has_experts
        has_fixed_launches &= all(mixer.is_capturable for mixer in self._shapes)
        return self._attention.is_capturable and has_fixed_launches

    @property
    def can_tap(self) -> bool:
        spec = self.spec
        is_sum = not spec.num_streams and not spec.keeps_embedding
        return is_sum and not spec.family.layer_norm

    def tap(self, depths: Sequence[int]) -> None:
        assert self.can_tap
        self._taps = tuple(depths)
        if self._recording is not None:
            only_decodes = bool(self.spec.latent_layers)
            self._tapped_recording = self._operators.recording(only_decodes=only_decodes)
        self._grow(len(self._activations.hidden))

    def tapped(self, tokens: int) -> Sequence[Tensor]:
        return self._buffers(tokens).tapped

    @property
    def embedding(self) -> Embedding:
        """Table of the tokens' embeddings, before any factor."""
        return self._weights.embedding

    @property
    def output(self) -> Projection | None:
        """Product that makes the logits; None: there is none."""
        return self._weights.output

    @property
    def final_norm(self) -> Tensor:
        """Weight [hidden_size] of the norm in front of the logits."""
        return self._weights.final_norm

    def reads_pages_of(self, other: AttentionBackend) -> bool:
        """Return whether another backend's pages have the same layout and type."""
        mine, same = self._attention, self._attention.block_size == other.block_size
        return same and isinstance(mine, type(other)) and mine.kv_dtype == other.kv_dtype

    @property
    def computes_logits(self) -> bool:
        return self._weights.output is not None

    def allocate_cache(
        self,
        num_blocks: int | Sequence[int],
        block_size: int | None = None,
        num_states: int = 0,
    ) -> KVCache:
        counts, size = self._block_counts(num_blocks), block_size or self.block_size
        cache = self._attention.allocate(counts, size)
        mixers = [layer.mixer for layer in self._layers]
        latents = {
            index: mixers[index].allocate_latents(counts[index], size)
            for index in (*self.spec.joint_layers, *self.spec.compressed_layers)
        }
        first = num_blocks if isinstance(num_blocks, int) else num_blocks[0]
        entries = {
            index: mixers[index].allocate_entries(first, size)
            for index, layer in self.spec.compressed_layers.items()
            if layer.compression is not None
        }
        states = enumerate(mixer.allocate_states(num_states, self.state_dtype) for mixer in mixers)
        return replace(
            cache,
            latents=latents,
            entries=entries,
            states={index: state for index, state in states if state},
            groups=[group.layers for group in layer_groups(self.spec)],
        )

    @property
    def state_bytes(self) -> int:
        states = (layer.mixer.allocate_states(1, self.state_dtype) for layer in self._layers)
        return sum(tensor.nbytes for tensors in states for tensor in tensors)

    def reserve(self, tokens: int, rows: int) -> None:
        super().reserve(tokens, rows)
        logits = self._logits_buffer(rows)
        if self.device.type == "cpu":
            touch((logits,))

    def bytes_to_reserve(self, tokens: int, rows: int) -> int:
        logits_bytes = rows * self.spec.vocab_size * self._logits.itemsize
        return super().bytes_to_reserve(tokens, rows) + logits_bytes

    @torch.inference_mode()
    def compute(self, batch: StepBatch, cache: KVCache) -> Tensor:
        outputs = batch.output_rows
        if outputs is None or self.taps_paused or self.spec.num_layers not in self._taps:
            return self._compute_rows(batch, cache)
        hidden = self._compute_rows(batch.with_all_rows, cache)
        self._operators.keep(hidden, outputs.indices)
        return hidden[: len(outputs.indices)]

    def _compute_rows(self, batch: StepBatch, cache: KVCache) -> Tensor:
        """Return the hidden states of the batch's output rows."""
        buffers = self._buffers(len(batch.token_ids))
        kept = self._kept(batch, buffers)
        begin = partial(self._begin, batch, buffers)
        layers = partial(self._run_layers, batch, cache, buffers, kept)
        if batch.is_adapted:
            self._run_adapted(batch, begin, layers)
            return kept.hidden
        begin()
        # A recording lacks what images add between the layers, and holds the reserved buffers.
        adds_images = changes_layers(batch)
        has_own_buffers = self._exceeds_reserve(len(batch.token_ids))
        copies = self._tapped_recording is not None and not self.taps_paused
        recording = self._tapped_recording if copies else self._recording
        if recording is None or adds_images or has_own_buffers:
            layers()
        else:
            recording.run(batch, cache, layers)
        return kept.hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        assert self._weights.output is not None
        normed = self._final_norm(hidden)
        logits = self._logits_buffer(hidden.shape[0])
        self._weights.output.into(normed, logits)
        if self.spec.logit_scale != 1:
            logits *= self.spec.logit_scale
        if cap := self.spec.logit_cap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    @property
    def has_argmax(self) -> bool:
        spec, output = self.spec, self._weights.output
        has_argmax = output is not None and output.has_argmax
        return has_argmax and spec.logit_scale == 1 and not spec.logit_cap

    @torch.inference_mode()
    def argmax(self, hidden: Tensor) -> Tensor:
        assert self._weights.output is not None
        normed = self._final_norm(hidden)
        ids = torch.empty(len(hidden), dtype=torch.int64)
        self._weights.output.argmax(normed, ids)
        return ids

    @torch.inference_mode()
    def states(self, hidden: Tensor) -> Tensor:
        return self._operators.plain(self._final_norm(hidden)).float()

    def _final_norm(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        normed = self._buffers(hidden.shape[0]).normed
        self._norm(hidden, self._weights.final_norm, normed)
        return normed

    def _run_layers(
        self, batch: StepBatch, cache: KVCache, buffers: Activations, kept: Activations
    ) -> None:
        """Run everything between the embedding and the final norm.

        The last layer reads all rows, then continues with those in `kept`.
        """
        last = self.spec.num_layers - 1
        for index in range(last):
            self._tap(index, buffers)
            self._project(index, buffers)
            mixer, scratch = self._mixing(index, buffers)
            mixer.mix(batch, cache, scratch)
            self._after_mixing(index, buffers)
            add_images(batch, index + 1, buffers.hidden)
        self._tap(last, buffers)
        self._run_last(last, batch, cache, buffers, kept)
        self._tap(self.spec.num_layers, kept)

    def _run_last(
        self,
        index: int,
        batch: StepBatch,
        cache: KVCache,
        buffers: Activations,
        kept: Activations,
    ) -> None:
        """Run the layer that reads all rows and continues with those in `kept`."""
        self._project(index, buffers)
        mixer, scratch = self._mixing(index, buffers)
        self._keep(batch, buffers)
        mixer.mix(batch, cache, scratch, self._mixing(index, kept)[1])
        if self.adapters is not None:
            self.adapters.narrow()
        self._after_mixing(index, kept)

    def _tap(self, depth: int, buffers: Activations) -> None:
        """Copy the residual if it is tapped behind this number of layers."""
        if self.taps_paused:
            return
        for tapped, copy in zip(self._taps, buffers.tapped, strict=True):
            if tapped == depth:
                self._operators.clear(copy)
                self._operators.add(buffers.hidden, copy)

    def _project(self, index: int, buffers: Activations) -> None:
        layer = self._layers[index]
        read, normed = layer.residual.begin(buffers.residual), buffers.normed
        if read is buffers.joined and buffers.joined_normed is not None:
            normed = buffers.joined_normed
        mixer, scratch = self._mixing(index, buffers)
        if not mixer.is_empty:
            self._norm(read, layer.mixer_norm, normed)
        mixer.project(normed, scratch, buffers.rotations)
        layer.residual.bypass(buffers.residual)

    def _keep(self, batch: StepBatch, buffers: Activations) -> None:
        super()._keep(batch, buffers)
        outputs = batch.output_rows
        rows = None if outputs is None else outputs.indices
        if buffers.inputs is not None:
            self._operators.keep(buffers.inputs.whole, rows)
        for part in (buffers.streams, buffers.waiting, buffers.joined):
            if part is not None:
                self._operators.keep(part, rows)
        if self._weights.tokens is not None:
            self._weights.tokens.ids = batch.token_ids if rows is None else batch.token_ids[rows]

    def _after_mixing(self, index: int, buffers: Activations) -> None:
        layer, is_parallel = self._layers[index], self.spec.parallel_residual
        is_empty = layer.feed_forward.is_empty
        if is_parallel and not is_empty:
            self._norm(buffers.hidden, layer.feed_forward_norm, buffers.normed)
        if layer.mixer_post_norm is None:
            layer.mixer.add_to(buffers.mixing[layer.mixing], buffers.hidden)
        else:
            assert not is_parallel, "the norm for the feed-forward layer would be overwritten"
            layer.mixer.into(buffers.mixing[layer.mixing], buffers.normed)
            layer.mixer_post_norm.add(buffers.normed, buffers.hidden)
        layer.residual.turn(buffers.residual)
        if not is_parallel and not is_empty:
            self._norm(buffers.hidden, layer.feed_forward_norm, buffers.normed)
        layer.residual.bypass_again(buffers.residual)
        layer.feed_forward.add_to(
            buffers.normed, buffers.hidden, buffers.inner[layer.inner], buffers.spares
        )
        layer.residual.end(buffers.residual, buffers.inputs_of(index))

    def _begin(self, batch: StepBatch, buffers: Activations) -> None:
        super()._begin(batch, buffers)
        if self._weights.tokens is not None:
            self._weights.tokens.ids = batch.token_ids
        if self.spec.keeps_embedding and buffers.joined is not None:
            buffers.joined[:, self.spec.hidden_size :] = buffers.hidden
        inputs = self._weights.layer_inputs
        if inputs is not None and buffers.inputs is not None:
            inputs.compute(batch, buffers.hidden, buffers.normed, buffers.inputs.whole)

    def _norm(self, rows: Tensor, weight: Tensor | None, out: Tensor) -> None:
        if weight is None:
            self._operators.arrange(rows, out)
        else:
            self._operators.rms_norm(rows, weight, self.spec.norm_epsilon, out)

    def _grow(self, tokens: int) -> None:
        super()._grow(tokens)
        for recording in (self._recording, self._tapped_recording):
            if recording is not None:
                recording.discard()

    def _logits_buffer(self, rows: int) -> Tensor:
        # This buffer is kept from step to step: an allocation in each would fragment the heap.
        if rows > len(self._logits):
            self._logits = torch.empty((rows, self.spec.vocab_size), device=self.device)
        return self._logits[:rows]

    def _allocate(self, tokens: int) -> Activations:
        inputs, width = self._weights.layer_inputs, self.spec.hidden_size
        joins, empty = self.spec.joins_inputs, self._operators.empty
        return replace(
            super()._allocate(tokens),
            inputs=None if inputs is None else inputs.allocate(tokens),
            streams=self._allocate_streams(tokens),
            waiting=empty(tokens, width) if self.spec.has_shortcuts else None,
            joined=empty(tokens, 2 * width) if joins else None,
            joined_normed=empty(tokens, 2 * width) if joins else None,
            tapped=tuple(empty(tokens, width) for _ in self._taps),
        )

    def _allocate_streams(self, tokens: int) -> Tensor | None:
        count, width = self.spec.num_streams, self.spec.hidden_size
        if not count:
            return None
        return self._operators.empty(tokens, count * width).view(tokens, count, width)
