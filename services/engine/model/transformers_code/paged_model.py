"""A model on transformers' modules, with the interface of the engine's models."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.cache_groups import layer_groups
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend, KVCache
from services.engine.model.checkpoint.model_code import ModelCode
from services.engine.model.model import Model
from services.engine.model.operators.interface import Operators
from services.engine.model.transformers_code.calls import PagedCalls, connect
from services.engine.model.transformers_code.fused import fuse_layers
from services.engine.model.transformers_code.plan import ModelPlan

__all__ = ["TransformersModel"]

_BUFFERS = 8
"""Approximate number of activations as wide as the widest product that a pass holds at once"""


class TransformersModel(Model):
    """A model whose modules are transformers', and whose attention and products are ours.

    The modules see a step as one text with a position for each token; only attention knows of
    sequences.
    """

    code = ModelCode.TRANSFORMERS

    def __init__(
        self,
        plan: ModelPlan,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        operators: Operators,
        attention: AttentionBackend,
        weight_bytes: int,
    ) -> None:
        """plan: plan of a model whose weights are read."""
        super().__init__(
            spec,
            dtype,
            device,
            attention,
            weight_bytes=weight_bytes,
            rows_at_once=operators.rows_at_once,
        )
        groups = enumerate(layer_groups(spec))
        numbers = {layer: number for number, group in groups for layer in group.layers}
        layers = [spec.attention(layer) for layer in range(spec.num_layers)]
        self._calls = PagedCalls(layers, plan.callers, numbers, attention, operators)
        connect(plan.model, self._calls)
        head = plan.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        inner = (each.out_features for each in plan.linears.values() if each is not head)
        self._widest = max((spec.hidden_size, *inner))
        self._layers = plan.model.base_model
        self._workspace = fuse_layers(self._layers, self._calls, attention, operators)
        self._positions = plan.positions
        self._head = plan.model
        self._final = _Final()
        self._hidden = torch.empty((0, spec.hidden_size), dtype=dtype, device=device)
        """Result of the last pass"""
        setattr(plan.model, plan.model.base_model_prefix, self._final)

    @property
    def num_fused(self) -> int:
        """Number of layers that our operators compute, because their code is known."""
        return self._workspace.num_layers

    @property
    def is_capturable(self) -> bool:
        return False

    @property
    def computes_logits(self) -> bool:
        return True

    @property
    def buffers(self) -> object:
        return None

    def allocate_cache(
        self,
        num_blocks: int | Sequence[int],
        block_size: int | None = None,
        num_states: int = 0,
    ) -> KVCache:
        counts = self._block_counts(num_blocks)
        cache = self._attention.allocate(counts, block_size or self.block_size)
        return replace(cache, groups=[group.layers for group in layer_groups(self.spec)])

    def reserve(self, tokens: int, rows: int) -> None:
        """Do nothing: torch allocates activations where they are computed."""

    def bytes_to_reserve(self, tokens: int, rows: int) -> int:
        return 0

    def pass_bytes(self, tokens: int, rows: int, context: int) -> int:
        activations = tokens * self._widest * _BUFFERS * self.dtype.itemsize
        return activations + rows * self.spec.vocab_size * (4 + self.dtype.itemsize)

    @torch.inference_mode()
    def compute(self, batch: StepBatch, cache: KVCache) -> Tensor:
        ids, positions = batch.token_ids[None], batch.positions[None]
        if self.spec.position_offset:
            positions = positions + self.spec.position_offset

        def forward() -> Tensor:
            told = self._positions.arguments(positions)
            made = self._layers(input_ids=ids, **told, use_cache=False)
            hidden: Tensor = made.last_hidden_state[0]
            return hidden

        self._workspace.begin(ids.shape[1])
        if self.adapters is not None and batch.adapters_host:
            self.adapters.begin(batch)
            try:
                hidden = self._calls.run(batch, cache, forward)
            finally:
                self.adapters.end()
        else:
            hidden = self._calls.run(batch, cache, forward)
        outputs = batch.output_rows
        self._hidden = hidden if outputs is None else hidden[outputs.indices]
        return self._hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=self.device)
        self._final.hidden = hidden[None]
        logits: Tensor = self._head(input_ids=ids, use_cache=False).logits[0]
        return logits.float()

    @torch.inference_mode()
    def states(self, hidden: Tensor) -> Tensor:
        return hidden.float()


class _Final(nn.Module):
    """Module in place of a model's layers while the model's head computes logits of `hidden`."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.empty(0)

    @property
    def decoder(self) -> "_Final":
        """The module that heads of BART's kind call: this one."""
        return self

    def forward(self, *_: Any, **__: Any) -> "_Output":
        return _Output((self.hidden,))


class _Output(tuple[Tensor]):
    """Output of layers that has hidden states, but nothing else that heads may read."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None
