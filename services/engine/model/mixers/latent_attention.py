"""Attention over pages of latents: decodes by a kernel on CPUs, all else in torch."""

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.mixers.latent_pages import (
    LatentBuffer,
    decode_groups,
    pieces,
    sequence_pages,
)
from services.engine.model.mixers.native_latent_attention import choose_latent_decodes
from services.engine.model.operators.deltas import SequenceDelta
from services.engine.model.operators.interface import Operators

__all__ = ["LatentAttention"]


class LatentAttention:
    """Attention of one layer, which computes keys and values from latents only if that is cheaper.

    A head's score is query . (keys @ latent) = (query @ keys) . latent, and its output is
    (weighted latents) @ values. In this absorbed form all heads read the same page: decodes, and
    prompt chunks of a few tokens. With more queries (`LatentSpec.expands`: from 171 on in the shape
    of DeepSeek V3) keys and values of some heads at a time are computed first, because products
    with them are narrower. Sequences whose adapter changes keys and values take this form, too.

    If an indexer has chosen tokens, decodes and short chunks read these alone. Longer chunks
    read all and mask the others, because together their queries choose most of them.
    """

    def __init__(
        self,
        spec: LatentSpec,
        keys: Tensor,
        values: Tensor,
        expansion: SequenceDelta | None,
        operators: Operators,
        buffer: LatentBuffer,
        group: int = 0,
    ) -> None:
        """keys, values, expansion: as in `LatentWeights`; buffer: memory that all layers share.

        group: number of the layer's cache group.
        """
        self._spec = spec
        self._keys = keys
        self._values = values
        self._expansion = expansion
        self._operators = operators
        self._buffer = buffer
        self._decodes = choose_latent_decodes(spec, keys, values, group)

    def write(self, latents: Tensor, pages: Tensor, batch: StepBatch) -> None:
        """Write the latents of the step's tokens, [tokens, absorbed_width], to their slots."""
        vectors = pages.flatten(0, 1)[:, : self._spec.absorbed_width]
        vectors[batch.slots] = latents[: len(batch.slots)]

    def attend(
        self,
        queries: Tensor,
        latents: Tensor | None,
        pages: Tensor,
        batch: StepBatch,
        out: Tensor,
        chosen: Tensor | None = None,
    ) -> None:
        """Write the step's latents, then fill `out` [rows, heads * value_width].

        queries: [rows, heads * head_width], the own parts of all heads, then their shared parts;
        latents: [tokens, absorbed_width], or None if the pages hold them; pages: [blocks,
        block_size, page_width]; chosen: places of the tokens that each row attends to, as
        `TokenChoice` has them.
        """
        if self._decodes is not None and chosen is None:
            self._decodes.attend(queries, latents, pages, batch, out)
            if batch.is_decode and not self._has_adapted(batch):
                return
        elif latents is not None:
            self.write(latents, pages, batch)
        self._attend(queries, pages, batch, out, chosen)

    def _attend(
        self, queries: Tensor, pages: Tensor, batch: StepBatch, out: Tensor, chosen: Tensor | None
    ) -> None:
        """Fill the rows of `out` that no kernel has filled."""
        spec, decodes = self._spec, batch.num_decodes
        pages = pages[..., : spec.absorbed_width]
        own, shared = queries.split_with_sizes(
            (spec.num_heads * spec.key_width, spec.num_heads * spec.shared_width), dim=1
        )
        own, shared, heads = (self._by_head(rows) for rows in (own, shared, out))
        if chosen is None:
            if self._decodes is None:
                self._decode(own[:decodes], shared[:decodes], pages, batch, heads)
        else:
            heads[:decodes] = self._gathered(
                self._on_latents(own[:decodes], shared[:decodes]),
                pages,
                batch.block_tables[:decodes],
                batch.context_lengths[:decodes],
                chosen[:decodes],
            )
        start = 0
        for sequence, length in enumerate(batch.query_lengths_host):
            rows = slice(start, start + length)
            start += length
            is_adapted = self._is_adapted(batch, sequence)
            if sequence < decodes and not is_adapted:
                continue
            context = batch.context_lengths_host[sequence]
            places = None
            if chosen is not None and context > spec.attended_tokens:
                places = chosen[rows]
            if places is not None and not is_adapted and places.numel() <= context:
                heads[rows] = self._gathered(
                    self._on_latents(own[rows], shared[rows]),
                    pages,
                    batch.block_tables[sequence].expand(length, -1),
                    torch.arange(context - length + 1, context + 1, device=pages.device),
                    places,
                )
                continue
            latents = sequence_pages(self._buffer, pages, batch, sequence)
            if is_adapted or spec.expands(length):
                number = batch.adapters_host[sequence] if batch.adapters_host else 0
                heads[rows] = self._expanded(own[rows], shared[rows], latents, places, number)
            else:
                heads[rows] = self._absorbed(own[rows], shared[rows], latents, places)

    def _is_adapted(self, batch: StepBatch, sequence: int) -> bool:
        if self._expansion is None or not batch.adapters_host:
            return False
        return self._expansion.changes_for(batch.adapters_host[sequence])

    def _has_adapted(self, batch: StepBatch) -> bool:
        return any(self._is_adapted(batch, each) for each in range(len(batch.adapters_host)))

    def _decode(
        self, own: Tensor, shared: Tensor, pages: Tensor, batch: StepBatch, out: Tensor
    ) -> None:
        """Attend for the sequences that decode, some at a time, padded to their longest."""
        queries, size = self._on_latents(own, shared), pages.shape[1]
        for sequences, longest in decode_groups(batch, self._spec.absorbed_width):
            tables = batch.block_tables[sequences, : -(-longest // size)].long()
            latents = self._buffer.gather(pages, tables.flatten())
            latents = latents.view(len(tables), -1, pages.shape[2])
            places = torch.arange(latents.shape[1], device=latents.device)
            visible = places < batch.context_lengths[sequences, None]
            # slots after a context hold another sequence's data: a NaN there would survive the mask
            latents = latents.masked_fill_(~visible[..., None], 0)[:, None]
            attended = scaled_dot_product_attention(
                queries[sequences, None],
                latents,
                latents,
                attn_mask=visible[:, None, None, :],
                scale=self._spec.scale,
            )
            out[sequences] = self._of_latents(attended[:, 0])

    def _gathered(
        self, queries: Tensor, pages: Tensor, tables: Tensor, ends: Tensor, chosen: Tensor
    ) -> Tensor:
        """Return the outputs [rows, heads, value_width] of attention to the chosen tokens alone.

        queries: [rows, heads, absorbed_width]; tables: the block table of each row; ends: [rows], a
        row sees the tokens below its end; chosen: int64 [rows, attended_tokens].
        """
        vectors, size, count = pages.flatten(0, 1), pages.shape[1], chosen.shape[1]
        numbers = torch.arange(count, device=pages.device)
        outputs = [queries.new_empty(0, queries.shape[1], self._spec.value_width)]
        for rows in pieces(len(queries), count * self._spec.absorbed_width):
            blocks = tables[rows].long().gather(1, chosen[rows] // size)
            slots = blocks * size + chosen[rows] % size
            latents = vectors.index_select(0, slots.flatten()).view(*slots.shape, -1)[:, None]
            is_chosen = numbers < ends[rows, None]  # other entries repeat a place
            attended = scaled_dot_product_attention(
                queries[rows, None],
                latents,
                latents,
                attn_mask=is_chosen[:, None, None, :],
                scale=self._spec.scale,
            )
            outputs.append(self._of_latents(attended[:, 0]))
        return torch.cat(outputs)

    def _absorbed(
        self, own: Tensor, shared: Tensor, latents: Tensor, chosen: Tensor | None
    ) -> Tensor:
        """Return the outputs [length, heads, value_width] of a chunk, some tokens at a time."""
        queries, heads, context = self._on_latents(own, shared), own.shape[1], len(latents)
        outputs = []
        for rows in pieces(len(queries), heads * context):
            some = queries[rows]
            visible = _visible(rows, len(queries), context, chosen, latents.device)
            attended = scaled_dot_product_attention(
                some.flatten(0, 1)[None, None],
                latents[None, None],
                latents[None, None],
                attn_mask=visible.repeat_interleave(heads, 0),
                scale=self._spec.scale,
            )
            outputs.append(self._of_latents(attended.view(some.shape)))
        return torch.cat(outputs)

    def _expanded(
        self, own: Tensor, shared: Tensor, latents: Tensor, chosen: Tensor | None, adapter: int
    ) -> Tensor:
        """Return the outputs of a chunk, computing keys and values of some heads at a time."""
        spec = self._spec
        vectors, common = latents.split_with_sizes((spec.latent_width, spec.shared_width), dim=1)
        added = self._added(vectors, adapter)
        length, context = len(own), len(latents)
        queries = torch.cat((own, shared), dim=2).transpose(0, 1)
        out = queries.new_empty(length, spec.num_heads, spec.value_width)
        for some in pieces(spec.num_heads, context * 2 * spec.head_width):
            keys = _heads_of(vectors, self._keys[some])
            values = _heads_of(vectors, self._values[some])
            if added is not None:
                keys += added[some, :, : spec.key_width]
                values += added[some, :, spec.key_width :]
            keys = torch.cat((keys, common.expand(len(keys), -1, -1)), dim=2)
            # torch's fast kernel for CPUs takes only values as wide as keys
            values = pad(values, (0, max(0, spec.head_width - spec.value_width)))
            for rows in pieces(length, context):
                attended = scaled_dot_product_attention(
                    queries[None, some, rows],
                    keys[None],
                    values[None],
                    attn_mask=_visible(rows, length, context, chosen, latents.device),
                    scale=spec.scale,
                )
                out[rows, some] = attended[0, :, :, : spec.value_width].transpose(0, 1)
        return out

    def _added(self, vectors: Tensor, adapter: int) -> Tensor | None:
        """Return an adapter's addends to keys and values: [heads, context, both widths]."""
        if self._expansion is None or not self._expansion.changes_for(adapter):
            return None
        spec = self._spec
        arranged = self._operators.temporary(*vectors.shape)
        self._operators.arrange(vectors, arranged)
        width = spec.num_heads * (spec.key_width + spec.value_width)
        added = self._operators.temporary(len(vectors), width).zero_()
        self._expansion.add_for(adapter, arranged, added)
        return self._by_head(added).transpose(0, 1)

    def _by_head(self, rows: Tensor) -> Tensor:
        """View rows [n, width] as [n, heads, width of one head]."""
        return rows.view(len(rows), self._spec.num_heads, -1)

    def _on_latents(self, own: Tensor, shared: Tensor) -> Tensor:
        """Return queries for latents: [rows, heads, absorbed_width]."""
        absorbed = torch.bmm(own.transpose(0, 1), self._keys).transpose(0, 1)
        return torch.cat((absorbed, shared), dim=2)

    def _of_latents(self, attended: Tensor) -> Tensor:
        """Return outputs [rows, heads, value_width].

        attended: weighted latents [rows, heads, absorbed_width].
        """
        weighted = attended[..., : self._spec.latent_width].transpose(0, 1)
        return torch.bmm(weighted, self._values.transpose(1, 2)).transpose(0, 1)


def _heads_of(vectors: Tensor, weights: Tensor) -> Tensor:
    """Return keys or values [heads, context, width] of `vectors` [context, latent_width].

    weights: [heads, width, latent_width]. One product for all heads is several times faster than
    one for each.
    """
    product = linear(vectors, weights.flatten(0, 1))
    return product.view(len(vectors), len(weights), -1).transpose(0, 1)


def _visible(
    rows: slice, length: int, context: int, chosen: Tensor | None, device: torch.device
) -> Tensor:
    """Return which tokens some of the last `length` ones attend to, bool [rows, context].

    chosen: int64 [length, n], the places that each token attends to; None = all up to itself.
    """
    if chosen is not None:
        some = chosen[rows]
        mask = torch.zeros((len(some), context), dtype=torch.bool, device=device)
        return mask.scatter_(1, some, True)
    earlier = context - length
    places = torch.arange(earlier + rows.start, earlier + rows.stop, device=device)
    return torch.arange(context, device=device) <= places[:, None]
