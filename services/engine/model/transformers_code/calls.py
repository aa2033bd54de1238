"""Calls of attention by a model's layers, and their computation over pages.

transformers' modules call the function that is registered under the name of the implementation in
their config. Ours finds its data in an attribute of the module that calls it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.attention import AttentionBackend, AttentionStep, KVCache
from services.engine.model.mixers.attention import AttentionMixer, AttentionScratch
from services.engine.model.operators.interface import Operators

__all__ = ["IMPLEMENTATION", "TRIAL", "AttentionCalls", "PagedCalls", "attend", "connect"]

IMPLEMENTATION = "tokenwire"
"""Name of our attention in transformers"""
TRIAL = "tokenwire_trial"
"""Name of our attention in transformers during a trial pass, which asks for masks too"""
_ATTRIBUTE = "tokenwire_calls"


class AttentionCalls:
    """Receiver of a model's calls of attention."""

    def attend(
        self,
        module: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        """Return [1, tokens, heads, value width].

        queries: [1, heads, tokens, width]; keys and values: [1, key heads, tokens, width];
        arguments: arguments that the module passes by name.
        """
        raise NotImplementedError


def connect(model: nn.Module, calls: AttentionCalls) -> None:
    """Let `calls` receive the calls of attention of all modules."""
    for module in model.modules():
        setattr(module, _ATTRIBUTE, calls)


class PagedCalls(AttentionCalls):
    """Attention over the pages of a cache, for one pass after another.

    The first call of a pass is that of layer 0, and so on. A module that a pass calls twice has two
    layers, with keys and values of their own.
    """

    def __init__(
        self,
        layers: Sequence[AttentionSpec],
        modules: Sequence[nn.Module],
        groups: Mapping[int, int],
        backend: AttentionBackend,
        operators: Operators,
    ) -> None:
        """modules: the module of each call; groups: the cache group of each layer."""
        self._layers = layers
        self._modules = modules
        self._groups = groups
        self._backend = backend
        self._operators = operators
        self._sinks: dict[int, Tensor] = {}
        self._step: tuple[StepBatch, KVCache] | None = None
        self._layer = 0

    def run(self, batch: StepBatch, cache: KVCache, forward: Callable[[], Tensor]) -> Tensor:
        """Return the result of `forward`, a pass whose attention reads and writes `cache`."""
        self._step, self._layer = (batch, cache), 0
        try:
            return forward()
        finally:
            self._step = None

    def attend(
        self,
        module: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        index, (batch, cache) = self._next(module), self.present
        layer, width = self._layers[index], values.shape[3]
        count = queries.shape[2]
        counts = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        out = self._operators.temporary(count, layer.num_heads * layer.head_dim)
        # backends need the same distance between tokens in queries, keys and values
        joined = out.new_empty(count, sum(counts), layer.head_dim)
        parts = joined.split_with_sizes(counts, dim=1)
        for part, heads in zip(parts, (queries, keys, values), strict=True):
            _fill(part, heads[0].transpose(0, 1))
        step = AttentionStep(
            queries=parts[0],
            keys=parts[1],
            values=parts[2],
            batch=batch.of_group(self._groups[index]),
            cache=cache,
            out=out,
            sinks=self._sinks_of(index, arguments.get("s_aux")),
            cache_group=self._groups[index],
        )
        self._backend.attend(index, step)
        attended = self._operators.plain(out).view(1, count, layer.num_heads, layer.head_dim)
        return attended if width == layer.head_dim else attended[..., :width]

    @property
    def present(self) -> tuple[StepBatch, KVCache]:
        """The batch of the running pass, and its cache."""
        assert self._step is not None
        return self._step

    @property
    def count(self) -> int:
        """Number of calls of a pass."""
        return len(self._layers)

    def layers(self) -> Iterator[tuple[nn.Module, AttentionSpec, int]]:
        """Yield the module, the shape and the cache group of each call."""
        for index, (module, layer) in enumerate(zip(self._modules, self._layers, strict=True)):
            yield module, layer, self._groups[index]

    def mix(self, module: nn.Module, mixer: AttentionMixer, scratch: AttentionScratch) -> None:
        """Attend in a call whose queries, keys and values are in the scratch of its mixer."""
        self._next(module)
        mixer.mix(*self.present, scratch)

    def _next(self, module: nn.Module) -> int:
        """Return the layer of the next call."""
        assert module is self._modules[self._layer], "a pass calls attention in another order"
        self._layer += 1
        return self._layer - 1

    def _sinks_of(self, layer: int, sinks: Tensor | None) -> Tensor | None:
        if sinks is None:
            return None
        if layer not in self._sinks:
            self._sinks[layer] = sinks.detach().float().reshape(-1).contiguous()
        return self._sinks[layer]


def _fill(part: Tensor, heads: Tensor) -> None:
    """Fill `part` [tokens, heads, width] with narrower heads, followed by zeros."""
    width = heads.shape[2]
    part[..., :width] = heads
    if width < part.shape[2]:
        part[..., width:] = 0


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do, by the receiver of the module's calls.

    query: [1, heads, tokens, width]; key and value: [1, key heads, tokens, width]; returns
    [1, tokens, heads, value width], and no weights.
    """
    calls: AttentionCalls = getattr(module, _ATTRIBUTE)
    return calls.attend(module, query, key, value, attention_mask, arguments), None


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionInterface.register(TRIAL, attend)
