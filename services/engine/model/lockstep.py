"""Ranks in lockstep: rank 0 says what comes next, and all of them compute it.

An order is a few numbers for the host. Tensors go the way from device to device, so that none waits
for the host: [number of query tokens, width of the block tables, number of decodes, then query
lengths, how many of them are kept, and context lengths] of a forward pass, or [rows] of the logits
of some hidden states.
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
    """Rank 0's: has the other ranks compute, along with it, all that it is asked for.

    What it says to them is the host's: a CUDA graph of `forward` would leave it out.
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
    def finds_most_likely(self) -> bool:
        return False  # each rank has some of the ids


@torch.inference_mode()
def follow(decoder: Decoder, cache: KVCache, ranks: RankGroup) -> None:
    """Every other rank's part: compute what rank 0 says, until it dissolves the group."""
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
    """All its tensors in one, int64."""
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
