"""Interface of the models that the engine runs: hidden states and logits of a flat batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.adapters.adapters import AdapterChange, Adapters
from services.engine.model.architecture.cache_groups import LayerGroup, layer_groups
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend, KVCache
from services.engine.model.checkpoint.model_code import ModelCode

__all__ = ["Model"]


class Model(ABC):
    """A model in memory, with the attention backend of its cache. Passes share buffers."""

    computes_whole_prompts = False
    """True if a step must compute all tokens of a prompt, and the cache keeps none of them"""
    code = ModelCode.NATIVE
    """Code whose modules compute the layers"""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionBackend,
        *,
        weight_bytes: int,
        rows_at_once: int,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.weight_bytes = weight_bytes
        """Upper bound of the weight bytes that a step reads"""
        self.block_size = attention.block_size
        self.rows_at_once = rows_at_once
        """Number of rows up to which a product takes as long as for one row"""
        self.runs_alone = True
        """True if no other ranks compute along"""
        self.adapters: Adapters | None = None
        """The adapters that passes may use; None = this model has none"""
        self.state_dtype = torch.float32
        """Type in which states of recurrent layers are stored; steps compute in float32"""
        self._attention = attention

    @property
    @abstractmethod
    def is_capturable(self) -> bool:
        """True if a CUDA graph of a padded step serves all steps of its size."""

    @property
    @abstractmethod
    def computes_logits(self) -> bool:
        """True if `logits` works."""

    taps_paused = False
    """True if passes copy none of what `tap` asks for"""

    @property
    def can_tap(self) -> bool:
        """True if `tap` works: the residual between layers is a sum of the layers' outputs."""
        return False

    def tap(self, depths: Sequence[int]) -> None:
        """Copy the residual of all rows behind these numbers of layers, unless `taps_paused`.

        Call this before `reserve`. The copies take no part in the results.
        """
        raise NotImplementedError

    def tapped(self, tokens: int) -> Sequence[Tensor]:
        """Return the copies of the last pass, [tokens, hidden_size] each, valid until the next.

        tokens: number of tokens of that pass. Call this before the pass's logits are computed.
        """
        raise NotImplementedError

    @property
    def reads_shared_once(self) -> bool:
        """True if decodes with `StepBatch.prefixes` take less time."""
        return self.runs_alone and self._attention.reads_shared_once

    @property
    def attention_name(self) -> str:
        """Name of the attention backend in metrics."""
        return self._attention.name

    @property
    @abstractmethod
    def buffers(self) -> object:
        """Buffers that passes write to; a captured graph must keep them alive."""

    @abstractmethod
    def allocate_cache(
        self,
        num_blocks: int | Sequence[int],
        block_size: int | None = None,
        num_states: int = 0,
    ) -> KVCache:
        """Allocate a cache for `forward`, in the attention backend's layout.

        num_blocks: one number for all cache groups, or one for each; num_states: number of slots of
        the recurrent layers' states, if there are such layers.
        """

    def _block_counts(self, num_blocks: int | Sequence[int]) -> dict[int, int]:
        """Return the number of blocks of each layer that has pages, from those of cache groups."""
        groups = [group.layers for group in layer_groups(self.spec)]
        blocks = [num_blocks] * len(groups) if isinstance(num_blocks, int) else num_blocks
        return {
            layer: count for layers, count in zip(groups, blocks, strict=True) for layer in layers
        }

    def block_bytes(self, group: LayerGroup) -> int:
        """Return the bytes that the layers of a cache group keep of a block."""
        spec, size = self.spec, self.block_size
        paged = [spec.paged_layers[layer] for layer in group.layers if layer in spec.paged_layers]
        numbers = size * sum(layer.cached_width for layer in paged)
        others = (group.block_width(size) - numbers) * self.dtype.itemsize
        return others + size * sum(map(self._attention.token_bytes, paged))

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type of cached keys and values."""
        return self._attention.kv_dtype

    @property
    def state_bytes(self) -> int:
        """Bytes of one slot of all recurrent layers' states; 0 = there are none."""
        return 0

    def choose_kernels(self, tokens: int) -> None:  # noqa: B027
        """Measure kernels that compute the same on a GPU, and use the fastest from here on.

        tokens: number of the most prompt tokens of a step. It must be called before a CUDA graph is
        captured.
        """

    @abstractmethod
    def reserve(self, tokens: int, rows: int) -> None:
        """Allocate the buffers of passes of up to `tokens` tokens and `rows` rows of logits.

        Lack of memory then fails the start rather than the first long prompt. Larger passes get
        buffers of their own, so that graphs of smaller ones stay valid.
        """

    @abstractmethod
    def bytes_to_reserve(self, tokens: int, rows: int) -> int:
        """Return the bytes that `reserve` allocates."""

    @abstractmethod
    def pass_bytes(self, tokens: int, rows: int, context: int) -> int:
        """Return the most bytes that a pass on a CPU takes beside those that `reserve` allocates.

        context: most tokens of a sequence.
        """

    def forward(self, batch: StepBatch, cache: KVCache) -> Tensor:
        """Return hidden states [rows, hidden_size] before the output projection and its norm.

        There is a row for each token, or for each of `batch.output_rows`; they are valid until
        the next call. Writes the step's keys and values to `cache`.
        """
        self.announce(batch)
        return self.compute(batch, cache)

    def announce(self, batch: StepBatch, *, as_graph: bool = False, captures: bool = False) -> None:  # noqa: B027
        """Have all other ranks `compute` the batch, if there are several ranks.

        as_graph: they run it as a CUDA graph; captures: they capture that graph.
        """

    @abstractmethod
    def compute(self, batch: StepBatch, cache: KVCache) -> Tensor:
        """Do `forward` on this rank alone, while the other ranks do it too.

        This part can be captured in a CUDA graph if `is_capturable`.
        """

    def announce_adapter(self, change: AdapterChange, number: int, directory: str = "") -> None:  # noqa: B027
        """Have all other ranks read, insert or drop an adapter, if there are several ranks."""

    def agree_on_adapter(self, failure: str, num_bytes: int) -> tuple[str, int]:
        """Return the first failure among the ranks to read an adapter, and the bytes of all."""
        return failure, num_bytes

    @torch.inference_mode()
    def copy_blocks(self, cache: KVCache, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks, each given as (cache group, source, target); no target is a source."""
        self.announce_copies(copies)
        cache.copy_blocks(copies)

    def announce_copies(self, copies: Sequence[tuple[int, int, int]]) -> None:  # noqa: B027
        """Have all other ranks copy the same blocks, if there are several ranks."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [rows, vocab_size] for rows of `forward`'s result.

        They are valid until the next call.
        """
        self.announce_logits(hidden)
        return self.compute_logits(hidden)

    def announce_logits(self, hidden: Tensor) -> None:  # noqa: B027
        """Have all other ranks `compute_logits` of the same rows, if there are several ranks."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Do `logits` on this rank alone, while the other ranks do it too."""

    @property
    def has_argmax(self) -> bool:
        """True if `argmax` is supported."""
        return False

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the id of each row's highest logit, int64 [rows], without storing the logits.

        Of equal logits it is the lowest id; of a row of NaN it is -1.
        """
        raise NotImplementedError

    @abstractmethod
    def states(self, hidden: Tensor) -> Tensor:
        """Return float32 [rows, hidden_size]: the final norm of rows of `forward`'s result."""
