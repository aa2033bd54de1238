"""Stack of layers whose tokens see all tokens of their text."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.batch.transfer import to_device
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import KVCache
from services.engine.model.layer_stack import Activations, LayerStack

__all__ = ["WholeTextStack", "has_one_attention"]


class WholeTextStack(LayerStack):
    """A stack of layers without a causal mask, which computes whole texts.

    It keeps no keys and values beyond a step. Not thread-safe: passes share buffers.
    """

    computes_whole_prompts = True

    @property
    def is_capturable(self) -> bool:
        return False

    def allocate_cache(
        self,
        num_blocks: int | Sequence[int],
        block_size: int | None = None,
        num_states: int = 0,
    ) -> KVCache:
        """Allocate a cache of one layer, which all layers use in turn."""
        size = block_size or self.block_size
        [blocks] = [num_blocks] if isinstance(num_blocks, int) else num_blocks
        whole = self._attention.allocate(blocks, size, {0: self.spec.attention(0)})
        layers = range(self.spec.num_layers)
        keys, values = (dict.fromkeys(layers, each[0]) for each in (whole.keys, whole.values))
        return KVCache(keys, values, size)

    @torch.inference_mode()
    def compute(self, batch: StepBatch, cache: KVCache) -> Tensor:
        buffers = self._buffers(len(batch.token_ids))
        run = partial(self._run, batch, cache, buffers)
        if batch.adapters_host:
            self._run_adapted(batch, run)
        else:
            run()
        self._keep(batch, buffers)
        return self._kept(batch, buffers).hidden

    def _run(self, batch: StepBatch, cache: KVCache, buffers: Activations) -> None:
        """Run everything before the final norm, for all rows."""
        self._begin(batch, buffers)
        layers = self.spec.attention_layers
        seen = _seen(batch, {layer.window for layer in layers.values()})
        for index, layer in layers.items():
            self._project(index, buffers)
            mixer, scratch = self._mixing(index, buffers)
            mixer.mix(seen[layer.window], cache, scratch)
            self._after_mixing(index, buffers)


def has_one_attention(spec: ModelSpec) -> bool:
    """Return whether all layers can use the cache of one in turn."""
    mixers = [layer.mixer for layer in spec.layers]
    attention = [mixer for mixer in mixers if isinstance(mixer, AttentionSpec)]
    shapes = {(mixer.num_kv_heads, mixer.head_dim) for mixer in attention}
    return len(attention) == len(mixers) and len(shapes) == 1


def _seen(batch: StepBatch, windows: Collection[int]) -> Mapping[int, StepBatch]:
    """Return the batch with the ends of its tokens' visible ranges, by window."""
    ends = _text_ends(batch)
    return {
        window: replace(batch, visible_ends=_near(ends, batch.positions, window))
        for window in windows
    }


def _near(ends: Tensor, positions: Tensor, window: int) -> Tensor:
    """Return the ends of visible ranges with a window to both sides; window 0 = no window."""
    return torch.minimum(ends, (positions + window).to(torch.int32)) if window else ends


def _text_ends(batch: StepBatch) -> Tensor:
    """Return for each token the end of its text, up to which it may attend: int32 [tokens]."""
    lengths, ends = torch.diff(batch.query_starts).long(), batch.context_lengths
    if batch.attended_host:
        ends = to_device(torch.tensor(batch.attended_host), ends.device)
    spread = torch.repeat_interleave(ends, lengths, output_size=len(batch.token_ids))
    return spread.to(torch.int32)
