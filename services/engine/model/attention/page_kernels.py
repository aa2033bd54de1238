"""Triton kernels of attention over pages: one tile of queries, and the merging of parts.

The online softmax is FlashAttention's (Dao 2023, arXiv:2307.08691); the division of long contexts
is Flash-Decoding's.
"""

import triton
import triton.language as tl

from services.engine.kernels.grid_waits import wait_for_writes

__all__ = ["attend_tile", "merge_parts"]


# Fields of the staging buffer begin at any multiple of 4 bytes: without alignment in its key, a
# kernel is compiled once and not again in the middle of a run.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        *("starts", "lengths", "ends", "shared", "members", "counts", "sequences", "parts"),
        *("first_part", "programs"),
    ]
)
def attend_tile(
    out: tl.tensor,
    sums: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_exponents: tl.tensor,
    value_exponents: tl.tensor,
    tables: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    ends: tl.tensor,
    sinks: tl.tensor,
    slopes: tl.tensor,
    shared: tl.tensor,
    members: tl.tensor,
    counts: tl.tensor,
    sequences: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    parts: tl.tensor,
    first_part: tl.tensor,
    programs: tl.tensor,
    scale: tl.constexpr,
    cap: tl.constexpr,
    window: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    page_size: tl.constexpr,
    min_span: tl.constexpr,
    max_span: tl.constexpr,
    is_chunked: tl.constexpr,
    is_decode: tl.constexpr,
    is_together: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_keys: tl.constexpr,
    padded_dim: tl.constexpr,
    padded_value: tl.constexpr,
    is_dependent: tl.constexpr,
) -> None:
    """Attend for a tile of one sequence's queries and one key head, over a part of its context.

    A tile's rows are its queries × its heads of the group, heads innermost, and padding. With
    `sums`, `out` holds the parts and `sums` the logarithms of their softmax sums, to base 2. With
    `shared`, a decode's context is the tokens after the prefix that it shares. If `is_together`,
    it is this prefix: then the "sequences" are prefixes, and their queries are those of `members`.
    With exponents, keys and values are pages of `fp8_pages`, and exponents the same pages as bytes.
    Such numbers are multiplied in float16, which they become by one instruction.

    `counts` holds the numbers of decodes and of sequences of a padded step. Such a launch has
    programs for the most tiles and parts that the step could have; those beyond its own end at
    once. The parts are as many as keep `programs` programs busy.
    """
    log2_e: tl.constexpr = 1.4426950408889634
    tile_queries: tl.constexpr = tile_rows // tile_heads
    head_parts: tl.constexpr = (group + tile_heads - 1) // tile_heads
    key_stride: tl.constexpr = kv_heads * head_dim
    value_stride: tl.constexpr = kv_heads * value_dim
    exponents: tl.constexpr = 0 if key_exponents is None else page_size * kv_heads
    key_page: tl.constexpr = page_size * key_stride + exponents
    value_page: tl.constexpr = page_size * value_stride + exponents
    wait_for_writes(is_dependent)
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // head_parts
    head_part = tl.program_id(1) % head_parts
    decodes = 0
    if counts is not None:
        decodes = tl.load(counts)
    if is_decode:
        sequence = tile
        first_query = 0
        start = tile
        count = 1
        busy = decodes
        if counts is not None:  # noqa: SIM102, the kernel's compiler decides this alone
            if tile >= decodes:
                return
    else:
        # The last sequence whose tiles begin at or before this one.
        first_sequence = decodes + tl.full((), 0, tl.int32)
        sequence = first_sequence
        behind = sequences + tl.full((), 0, tl.int32)
        if counts is not None:
            behind = tl.load(counts + 1)
            if sequence >= behind:
                return
        base = tl.load(starts + sequence)
        busy = (tl.load(starts + behind) - base) // tile_queries + behind - sequence
        while behind - sequence > 1:
            middle = (sequence + behind) // 2
            tiles_before = (tl.load(starts + middle) - base) // tile_queries + middle
            is_before = tiles_before - first_sequence <= tile
            sequence = tl.where(is_before, middle, sequence)
            behind = tl.where(is_before, behind, middle)
        start = tl.load(starts + sequence)
        count = tl.load(starts + sequence + 1) - start
        tiles_before = (start - base) // tile_queries + sequence - first_sequence
        first_query = (tile - tiles_before) * tile_queries
        if counts is None:
            start -= base
        if first_query >= count:
            return
    if is_together:
        sequence = tl.load(members + start)
        context = tl.load(shared + sequence)
    else:
        context = tl.load(lengths + sequence)

    slots = tl.arange(0, tile_rows)
    in_head = head_part * tile_heads + slots % tile_heads
    query = first_query + slots // tile_heads
    is_row = (slots < tile_queries * tile_heads) & (query < count) & (in_head < group)
    row = (start + query).to(tl.int64)
    if is_together:
        row = tl.load(members + row, mask=is_row, other=0).to(tl.int64)
    head = kv_head * group + in_head
    position = context - count + query
    if is_together:
        end = tl.zeros_like(position) + context
    elif ends is None:
        end = position + 1
    else:
        end = tl.load(ends + row, mask=is_row, other=0)
    end = tl.where(is_row, tl.minimum(end, context), 0)

    # Not the maximum of `end`: a loop whose bounds come from a reduction is not pipelined.
    behind_queries = tl.minimum(first_query + tile_queries, count)
    if is_together:
        last = context
    elif ends is None:
        last = tl.where(first_query < count, context - count + behind_queries, 0)
    else:
        last = tl.load(ends + start + behind_queries - 1, mask=first_query < count, other=0)
        last = tl.minimum(last, context)
    first = 0
    if is_decode and shared is not None:
        first = tl.load(shared + sequence)
    if is_chunked:
        first = (context - count + first_query) // window * window // tile_keys * tile_keys
    elif window > 0:
        first = tl.maximum(context - count + first_query - window + 1, 0) // tile_keys * tile_keys
    if sums is not None:
        wanted = tl.num_programs(2)
        if counts is not None:
            needed = tl.cdiv(programs, busy * tl.num_programs(1))
            if is_decode:
                needed = tl.maximum(needed, tl.cdiv(last - first, max_span))
            wanted = tl.minimum(wanted, needed)
        span = tl.maximum(tl.cdiv(last - first, wanted), min_span)
        span = tl.cdiv(span, tile_keys) * tile_keys
        first += tl.program_id(2) * span
        last = tl.minimum(last, first + span)
        cell = (row * (kv_heads * group) + head) * parts + first_part + tl.program_id(2)
        if first >= last:
            tl.store(sums + cell, float("-inf"), mask=is_row)
            return

    width = tl.arange(0, padded_dim)
    is_width = width < head_dim
    offsets = row[:, None] * query_stride + head[:, None] * head_dim + width[None, :]
    query_mask = is_row[:, None] & is_width[None, :]
    q = tl.load(queries + offsets, mask=query_mask, other=0.0)
    if key_exponents is not None:
        # float16 ends at 65,504; the exponents of keys give back the factor
        q = (q * 0.0625).to(tl.float16)

    highest = tl.full((tile_rows,), float("-inf"), tl.float32)
    total = tl.zeros((tile_rows,), tl.float32)
    if sinks is not None:
        # The sink acts as a key of the first part that has this score and no value.
        is_first = tl.program_id(2) == 0
        sink = tl.load(sinks + head, mask=is_row, other=0.0) * log2_e
        highest = tl.where(is_first, sink, highest)
        total = tl.where(is_first, 1.0, total)
    attended = tl.zeros((tile_rows, padded_value), tl.float32)
    if slopes is not None:
        slope = tl.load(slopes + head, mask=is_row, other=0.0) * log2_e
        if is_together:
            position = tl.load(lengths + row, mask=is_row, other=1) - 1

    table = tables + sequence.to(tl.int64) * table_stride
    columns = tl.arange(0, tile_keys)
    value_width = tl.arange(0, padded_value)
    is_value = value_width < value_dim
    key_offsets = columns[None, :] * key_stride + width[:, None] + kv_head * head_dim
    value_offsets = columns[:, None] * value_stride + value_width[None, :] + kv_head * value_dim
    exponent_offsets = kv_head * page_size + columns
    page = tl.load(table + first // page_size, mask=first < last, other=0)
    for begin in range(first, last, tile_keys):
        at = page.to(tl.int64)
        within = begin % page_size
        key = begin + columns
        is_key = key < last  # slots behind a context may hold NaN, which a weight of 0 keeps
        if key_exponents is not None:
            # Load these bytes first: a pipeline copies four at least, so their time is not hidden.
            key_places = key_exponents + at * key_page + page_size * key_stride
            value_places = value_exponents + at * value_page + page_size * value_stride
            places = within + exponent_offsets
            key_exponent = tl.load(key_places + places, mask=is_key, other=0).to(tl.int32)
            value_exponent = tl.load(value_places + places, mask=is_key, other=0).to(tl.int32)
        key_mask = is_key[None, :] & is_width[:, None]
        key_tile = keys + at * key_page + within * key_stride
        k = tl.load(key_tile + key_offsets, mask=key_mask, other=0.0)
        if key_exponents is None:
            scores = tl.dot(q, k, input_precision="ieee")
        else:
            powers = ((key_exponent + 4) << 23).to(tl.float32, bitcast=True)
            scores = tl.dot(q, k.to(tl.float16)) * powers[None, :]
        if cap > 0:
            # cap * tanh(score / cap) = cap * (1 - 2 / (exp(2 * score / cap) + 1))
            grown = tl.exp2(scores * (2 * log2_e * scale / cap))
            scores = cap * log2_e - 2 * cap * log2_e / (grown + 1)
        else:
            scores = scores * (scale * log2_e)
        if slopes is not None:
            scores += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        visible = key[None, :] < end[:, None]
        if is_chunked:
            visible = visible & (key[None, :] >= position[:, None] // window * window)
        elif window > 0:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        peak = tl.maximum(highest, tl.max(scores, 1))
        base_score = tl.where(peak == float("-inf"), 0.0, peak)  # -inf - -inf is NaN
        weights = tl.exp2(scores - base_score[:, None])
        decay = tl.exp2(highest - base_score)
        total = total * decay + tl.sum(weights, 1)
        value_mask = is_key[:, None] & is_value[None, :]
        value_tile = values + at * value_page + within * value_stride
        v = tl.load(value_tile + value_offsets, mask=value_mask, other=0.0)
        attended = attended * decay[:, None]
        if value_exponents is None:
            attended += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        else:
            # Weights times powers of two relative to the largest: none exceeds float16.
            largest = tl.max(value_exponent, 0)
            relative = tl.maximum(value_exponent - largest + 127, 0)
            powers = (relative << 23).to(tl.float32, bitcast=True)
            product = tl.dot((weights * powers[None, :]).to(tl.float16), v.to(tl.float16))
            attended += product * (largest << 23).to(tl.float32, bitcast=True)
        highest = peak
        # Load the page one turn ahead: the pipeline would else wait for it to know an address.
        following = begin + tile_keys
        page = tl.load(table + following // page_size, mask=following < last, other=0)

    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    attended = attended / divisor[:, None]
    if sums is None:
        cell = row * (kv_heads * group) + head
    else:
        logarithm = tl.where(is_empty, float("-inf"), highest + tl.log2(divisor))
        tl.store(sums + cell, logarithm, mask=is_row)
    cells = cell[:, None] * value_dim + value_width[None, :]
    out_mask = is_row[:, None] & is_value[None, :]
    tl.store(out + cells, attended.to(out.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["shared", "starts", "counts", "splits", "shared_splits"])  # type: ignore[untyped-decorator]
def merge_parts(
    out: tl.tensor,
    parts: tl.tensor,
    sums: tl.tensor,
    shared: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    heads: tl.tensor,
    splits: tl.tensor,
    shared_splits: tl.tensor,
    value_dim: tl.constexpr,
    max_splits: tl.constexpr,
    padded_dim: tl.constexpr,
    is_decode: tl.constexpr,
    is_dependent: tl.constexpr,
) -> None:
    """Merge the parts of one query and head.

    With `shared`, the first `shared_splits` parts are those of a shared prefix. They exist only for
    rows that share one. With `counts`, as for `attend_tile`, only the rows of decodes are merged if
    `is_decode`, and else those of chunks, which end at the last of `starts`.
    """
    wait_for_writes(is_dependent)
    cell = tl.program_id(0).to(tl.int64)
    if counts is not None:
        row = cell // heads
        decodes = tl.load(counts)
        if is_decode:
            if row >= decodes:
                return
        else:
            if row < decodes:
                return
            if row >= tl.load(starts + tl.load(counts + 1)):
                return
    width = tl.arange(0, padded_dim)
    is_width = width < value_dim
    split = tl.arange(0, max_splits)
    is_split = split < splits
    if shared is not None:
        is_split = is_split & ((split >= shared_splits) | (tl.load(shared + cell // heads) > 0))
    logarithms = tl.load(sums + cell * splits + split, mask=is_split, other=float("-inf"))
    is_part = logarithms != float("-inf")
    peak = tl.max(logarithms, 0)
    weights = tl.exp2(logarithms - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights, 0)
    weights = weights / tl.where(total == 0.0, 1.0, total)
    offsets = (cell * splits + split)[:, None] * value_dim + width[None, :]
    mask = is_part[:, None] & is_width[None, :]
    part = tl.load(parts + offsets, mask=mask, other=0.0)
    merged = tl.sum(weights[:, None] * part, 0)
    tl.store(out + cell * value_dim + width, merged.to(out.dtype.element_ty), mask=is_width)
