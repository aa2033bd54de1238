"""Lockstep of ranks: rank 0 announces each computation, and all ranks run it.

An order is a few integers between hosts: [query tokens, block table width, decodes, query lengths,
kept lengths, context lengths] for a forward pass, or [rows] for logits. Tensors travel from device
to device, so that no device waits for a host.
"""

import torch
from torch import Tensor

from services.engine.batch.step_batch import OutputRows, StepBatch
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend, KVCache
from services.engine.model.decoder import Decoder, DecoderWeights
from services.engine.model.operators.interface import Operators
from services.engine.ranks.group import RankGroup

__all__ = ["LeadingDecoder", "follow"]


class LeadingDecoder(Decoder):
    """Decoder of rank 0, which has the other ranks compute each call along with it.

    `forward` can't be captured: a CUDA graph would leave out the orders, which hosts send.
    """

    def __init__(
        self,
        ranks: RankGroup,
        spec: ModelSpec,
        dtype: torch.dtype,
        weights: DecoderWeights,
        operators: Operators,
        attention: AttentionBackend,
    ) -> None:
        super().__init__(spec, dtype, weights, operators, attention)
        self._ranks = ranks

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KVCache) -> Tensor:
        tokens, width = len(batch.token_ids), batch.block_tables.shape[1]
        queries, contexts = batch.query_lengths_host, batch.context_lengths_host
        kept = queries if batch.output_rows is None else batch.output_rows.lengths_host
        self._ranks.send_numbers([tokens, width, batch.num_decodes, *queries, *kept, *contexts])
        self._ranks.broadcast(_pack(batch))
        return super().forward(batch, cache)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        self._ranks.send_numbers([len(hidden)])
        self._ranks.broadcast(hidden)
        return super().logits(hidden)

    @property
    def has_argmax(self) -> bool:
        return False  # each rank has logits of a part of the vocabulary


@torch.inference_mode()
def follow(decoder: Decoder, cache: KVCache, ranks: RankGroup) -> None:
    """Compute what rank 0 orders until it dissolves the group."""
    while order := ranks.receive_numbers():
        if len(order) == 1:
            shape = (order[0], decoder.spec.hidden_size)
            hidden = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
            decoder.logits(ranks.broadcast(hidden))
        else:
            decoder.forward(_receive(order, ranks, decoder.device), cache)


def _receive(order: list[int], ranks: RankGroup, device: torch.device) -> StepBatch:
    tokens, width, num_decodes, *lengths = order
    count = len(lengths) // 3
    queries, kept, contexts = (tuple(lengths[i * count : (i + 1) * count]) for i in range(3))
    sizes = [tokens, tokens, tokens, count + 1, count, count * width]
    if keeps_some := kept != queries:
        sizes += [sum(kept), count + 1]
    packed = ranks.broadcast(torch.empty(sum(sizes), dtype=torch.int64, device=device))
    token_ids, positions, slots, *rest = packed.split_with_sizes(sizes)
    query_starts, context_lengths, block_tables = (part.to(torch.int32) for part in rest[:3])
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_starts=query_starts,
        context_lengths=context_lengths,
        block_tables=block_tables.view(count, width),
        num_decodes=num_decodes,
        query_lengths_host=queries,
        context_lengths_host=contexts,
        output_rows=OutputRows(rest[3], rest[4].to(torch.int32), kept) if keeps_some else None,
    )


def _pack(batch: StepBatch) -> Tensor:
    """Join the batch's tensors into one, int64."""
    tensors = [
        batch.token_ids,
        batch.positions,
        batch.slots,
        batch.query_starts,
        batch.context_lengths,
        batch.block_tables,
    ]
    if batch.output_rows is not None:
        tensors += [batch.output_rows.indices, batch.output_rows.starts]
    return torch.cat([tensor.flatten().to(torch.int64) for tensor in tensors])
