"""xformers' split-K for decodes, which `--attention xformers` asks for.

On an H200 our own kernel is as fast or faster for every shape that was measured. It also starts
faster: it is compiled once, xformers' for each number of rows.
"""

import logging

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from services.engine.batch.buckets import row_bucket
from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.interface import AttentionStep
from services.engine.model.attention.multiprocessors import count_multiprocessors
from services.engine.model.attention.paged_backend import PagedAttention, tokens_of
from services.engine.model.attention.paged_tiles import count_splits

if not hasattr(triton.language, "make_block_ptr"):
    raise ImportError(
        f"xformers' kernel reads by block pointers, which Triton {triton.__version__} lacks"
    )


def _is_no_lack_of_extensions(record: logging.LogRecord) -> bool:
    return "C++" not in record.getMessage()


# xformers warns that its C++ extensions don't load: PyPI's are built for another CUDA than torch's.
# Nothing here calls them.
logging.getLogger("xformers").addFilter(_is_no_lack_of_extensions)

from xformers.ops import fmha  # noqa: E402
from xformers.ops.fmha.attn_bias import (  # noqa: E402
    PagedBlockDiagonalPaddedKeysMask,
    _PaddedSeqLenInfo,
    _SeqLenInfo,
)

logging.getLogger("xformers").removeFilter(_is_no_lack_of_extensions)

__all__ = ["XformersAttention"]

_HEAD_DIMS = (16, 32, 64, 128, 256)


class _SplitK(fmha.triton_splitk.FwOp):  # type: ignore[misc]
    """xformers' operator, without the rows that pad its float32 parts to a multiple of 32."""

    MAX_BLOCK_M = 1


class XformersAttention(PagedAttention):
    """Backend that uses split-K for steps of decodes alone, in layers with plain full attention."""

    name = "xformers"

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec, dtype, device)
        self._has_split_k = self._is_supported and all(
            each.is_plain and each.head_dim == each.value_dim and each.head_dim in _HEAD_DIMS
            for each in spec.attention_layers.values()
        )
        self.reads_shared_once = self._is_supported and not self._has_split_k
        self._bias: tuple[StepBatch, object] | None = None
        """Batch of the present step, and xformers' bias for it"""

    def _decode(self, layer: int, step: AttentionStep) -> None:
        has_chunks = len(step.batch.query_lengths_host) > step.batch.num_decodes
        if self._has_split_k and not self._spec.attention(layer).window and not has_chunks:
            self._decode_by_split_k(layer, step)
        else:
            super()._decode(layer, step)

    def _decode_by_split_k(self, layer: int, step: AttentionStep) -> None:
        spec, cache = self._spec.attention(layer), step.cache
        count = step.batch.num_decodes
        rows, group = row_bucket(count), spec.num_heads // spec.num_kv_heads
        queries = step.queries
        if rows != count:  # the kernel is compiled for a number of rows
            queries = pad(queries, (0, 0, 0, 0, 0, rows - count))
        keys, values = (
            tokens_of(pages[layer])[None, :, :, None].expand(-1, -1, -1, group, -1)
            for pages in (cache.keys, cache.values)
        )
        splits = count_splits(
            rows * spec.num_kv_heads,
            rows,
            spec.num_heads,
            spec.head_dim,
            step.batch.block_tables.shape[1] * cache.block_size,
            multiprocessors=count_multiprocessors(queries.device),
        )
        # The operator itself: the function in front of it demands xformers' C++ extensions.
        attended, _ = _SplitK.get_operator(splits).apply(
            fmha.Inputs(
                queries.reshape(1, rows, spec.num_kv_heads, group, spec.head_dim),
                keys,
                values,
                attn_bias=self._bias_of(step.batch, cache.block_size),
                scale=spec.scale,
            ),
            needs_gradient=False,
        )
        step.out[:count] = attended.reshape(rows, -1)[:count]

    def _bias_of(self, batch: StepBatch, page: int) -> object:
        if self._bias is None or self._bias[0] is not batch:
            count = batch.num_decodes
            rows = row_bucket(count)
            tables, lengths = batch.block_tables[:count], batch.context_lengths[:count]
            if rows != count:
                tables = pad(tables, (0, 0, 0, rows - count))
                lengths = pad(lengths, (0, rows - count), value=1)
            self._bias = batch, decode_bias(tables, lengths, page)
        return self._bias[1]


def decode_bias(tables: Tensor, lengths: Tensor, page: int) -> object:
    """Return the bias of one query per row over `lengths` paged tokens.

    tables: int32 [rows, pages]; lengths: int32 [rows]. The bias depends on their shapes only: a
    captured graph must hold for other values, so the host-side fields are upper bounds.
    """
    rows, most = len(lengths), tables.shape[1] * page
    starts = torch.arange(rows + 1, dtype=torch.int32, device=lengths.device)
    queries = _SeqLenInfo(
        seqstart=starts, max_seqlen=1, min_seqlen=1, seqstart_py=list(range(rows + 1))
    )
    keys = _PaddedSeqLenInfo(
        seqstart=starts * most,
        max_seqlen=most,
        min_seqlen=1,
        seqstart_py=list(range(0, rows * most + 1, most)),
        seqlen=lengths,
        seqlen_py=[most] * rows,
        padding=most,
    )
    return PagedBlockDiagonalPaddedKeysMask(queries, keys, tables, page)
