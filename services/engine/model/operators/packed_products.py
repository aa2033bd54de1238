"""Parts of Triton kernels that decode packed weights in registers, and multiply by them.

A code becomes an integer in the type of activations, which holds it exactly. A product sums rows
times integers for each group of inputs, and multiplies the sum by the group's scale in float32, so
weights are never rounded.
"""

import triton
import triton.language as tl

__all__ = ["decoded_block", "sum_tiles"]


@triton.jit  # type: ignore[untyped-decorator]
def sum_tiles(
    rows: tl.tensor,
    is_row: tl.tensor,
    codes: tl.tensor,
    numbers: tl.tensor,
    values: tl.tensor,
    output: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    whole: tl.constexpr,
    form: tl.constexpr,
    terms: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """Return float32 [tile.outputs, tile.rows]: products of the tiles from `first` to `end`.

    The weights are the first factor of the products, which tensor cores read from registers.
    rows: pointers to the rows' first inputs; whole: no tile ends beyond the inputs; terms: number
    of terms of `values`, 0 without any.
    """
    dtype: tl.constexpr = rows.dtype.element_ty
    blocks: tl.constexpr = form.blocks
    # integers are too small by this factor, so that their type holds the one that decodes them
    lift: tl.constexpr = 1.0 if terms > 0 else 64.0 if dtype == tl.bfloat16 else 512.0
    inner = tl.arange(0, form.width)
    product = tl.zeros((tile.outputs, tile.rows), tl.float32)
    # With `values`, a pipeline would copy each looked up number to shared memory.
    stages: tl.constexpr = tile.stages if terms == 0 else 1
    for number in tl.range(first, end, num_stages=stages):
        place = codes + (number * outputs + output).to(tl.int64)[:, None] * form.integers + inner
        own = _numbers_of(numbers, number, output, outputs, form)
        upper = _upper_bits(codes, number * outputs + output, form)
        part = tl.zeros((tile.outputs, tile.rows), tl.float32)
        sums = tl.zeros((tile.outputs, tile.rows), tl.float32)
        for block in tl.static_range(blocks):
            if block % form.blocks_of_plane == 0:
                plane = tl.load(place + block // form.blocks_of_plane * form.width)
            column = number * 256 + block * form.width + inner
            is_part = is_row[None, :]
            if not whole:
                is_part &= (column < inputs)[:, None]
            some = tl.load(rows[None, :] + column[:, None], mask=is_part, other=0.0)
            if terms == 0:
                weight = _integers(plane, upper, own, block, lift, form, dtype).to(dtype)
                part = tl.dot(weight, some, part, input_precision="ieee")
            else:
                both = _terms(plane, values, block)
                weight = _term(both, 0, dtype).to(dtype)
                part = tl.dot(weight, some, part, input_precision="ieee")
                if terms == 2:
                    weight = _term(both, 1, dtype).to(dtype)
                    part = tl.dot(weight, some, part, input_precision="ieee")
            if form.has_offsets:
                ones = tl.full((tile.outputs, form.width), 1 / lift, tl.float32).to(dtype)
                sums = tl.dot(ones, some, sums, input_precision="ieee")
            if (block + 1) % form.blocks_of_group == 0:
                product += part * _scale(own, block, form)[:, None]
                part = tl.zeros((tile.outputs, tile.rows), tl.float32)
                if form.has_offsets:
                    product += sums * _offset(own, block, form)[:, None]
                    sums = tl.zeros((tile.outputs, tile.rows), tl.float32)
    return product * lift


@triton.jit  # type: ignore[untyped-decorator]
def decoded_block(
    codes: tl.tensor,
    numbers: tl.tensor,
    values: tl.tensor,
    output: tl.tensor,
    number: tl.tensor,
    outputs: tl.tensor,
    block: tl.constexpr,
    form: tl.constexpr,
    terms: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Return the weights of a block of tile `number`, float32 [outputs, width]."""
    lift: tl.constexpr = 64.0 if dtype == tl.bfloat16 else 512.0
    inner = tl.arange(0, form.width)
    place = codes + (number * outputs + output).to(tl.int64)[:, None] * form.integers + inner
    own = _numbers_of(numbers, number, output, outputs, form)
    upper = _upper_bits(codes, number * outputs + output, form)
    plane = tl.load(place + block // form.blocks_of_plane * form.width)
    scale = _scale(own, block, form)[:, None]
    if terms == 0:
        weight = _integers(plane, upper, own, block, lift, form, dtype).to(tl.float32)
        weight *= scale * lift
    else:
        both = _terms(plane, values, block)
        weight = _term(both, 0, dtype).to(tl.float32)
        if terms == 2:
            weight += _term(both, 1, dtype).to(tl.float32)
        weight *= scale
    if form.has_offsets:
        weight += _offset(own, block, form)[:, None]
    return weight


@triton.jit  # type: ignore[untyped-decorator]
def _numbers_of(
    numbers: tl.tensor,
    number: tl.tensor,
    output: tl.tensor,
    outputs: tl.tensor,
    form: tl.constexpr,
) -> tl.tensor:
    """Return pointers to each output's numbers of tile `number`."""
    row = 0 if form.repeats == 0 else number // form.repeats
    return numbers + (row * outputs + output).to(tl.int64) * form.words


@triton.jit  # type: ignore[untyped-decorator]
def _upper_bits(codes: tl.tensor, number: tl.tensor, form: tl.constexpr) -> tl.tensor:
    """Return integers with the upper bits of the codes of each output's tile, of its `number`.

    The result is 0 if codes have 4 or 8 bits. With 5 bits, the upper bits of block b lie in bit
    4 + b / 2 of the integers if b is even, and 16 places above that place if b is odd.
    """
    inner = tl.arange(0, form.width)
    upper = 0
    if form.bits == 6:
        place = codes + number.to(tl.int64)[:, None] * form.integers + 2 * form.width + inner
        upper = tl.load(place)
    elif form.bits == 5:
        stored = codes.to(tl.pointer_type(tl.uint16), bitcast=True)
        place = stored + number.to(tl.int64)[:, None] * (2 * form.integers) + 4 * form.width + inner
        bits = tl.load(place).to(tl.int32)
        upper = ((bits << 4) | (bits << 12)) & 0x0FF00FF0
    return upper


@triton.jit  # type: ignore[untyped-decorator]
def _integers(
    plane: tl.tensor,
    upper: tl.tensor,
    own: tl.tensor,
    block: tl.constexpr,
    lift: tl.constexpr,
    form: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Return a block's codes minus their zero, over `lift`, without rounding.

    plane: integers of the block's plane; upper: those of the upper bits. As a number of 16
    bits, a code is subnormal, or has the same distance to its neighbours: it is the code times the
    type's least number. A multiplication brings it into range.
    """
    pair: tl.constexpr = block % form.blocks_of_plane // 2
    # A nibble in the upper half of a byte is 16 times the code, which needs no shift.
    is_upper: tl.constexpr = form.bits == 4 and pair % 2 == 1
    if form.bits == 8:
        both = (plane >> (8 * pair)) & 0x00FF00FF
    elif form.bits == 6:
        shift: tl.constexpr = block // 2 * 2 - 4
        over = upper << -shift if shift < 0 else upper >> shift
        both = ((plane >> (4 * pair)) & 0x000F000F) | (over & 0x00300030)
    elif form.bits == 5:
        both = ((plane >> (4 * pair)) & 0x000F000F) | ((upper >> (block // 2)) & 0x00100010)
    elif is_upper:
        both = (plane >> (8 * (pair // 2))) & 0x00F000F0
    else:
        both = (plane >> (8 * (pair // 2))) & 0x000F000F
    kind: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    exponent: tl.constexpr = (127 if kind == tl.bfloat16 else 15) - (4 if is_upper else 0)
    small = (both >> (16 * (block % 2))).to(tl.int16).to(kind, bitcast=True)
    factor = tl.full(small.shape, 2.0**exponent, kind)
    if form.offsets == "zero":
        zero = _number(own + form.offset_word, block // form.blocks_of_group, "zero")
        addend = tl.broadcast_to((zero * (-1 / lift)).to(kind)[:, None], small.shape)
    else:
        addend = tl.full(small.shape, -form.middle / lift, kind)
    return tl.fma(small, factor, addend)


@triton.jit  # type: ignore[untyped-decorator]
def _terms(plane: tl.tensor, values: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """Return the two terms of the numbers that a block's codes stand for, in an integer."""
    code = (plane >> (block % 2 * 16 + block % 8 // 2 * 4)) & 15
    return tl.load(values + code.to(tl.uint32))


@triton.jit  # type: ignore[untyped-decorator]
def _term(both: tl.tensor, term: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    kind: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    return (both >> (16 * term)).to(tl.int16).to(kind, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _scale(own: tl.tensor, block: tl.constexpr, form: tl.constexpr) -> tl.tensor:
    """Return the scale of each output for a block's group, float32."""
    group: tl.constexpr = block // form.blocks_of_group
    scale = _number(own, group, form.scales)
    if form.has_factors:
        scale *= _float16(tl.load(own + form.factor_word), 0)
    return scale


@triton.jit  # type: ignore[untyped-decorator]
def _offset(own: tl.tensor, block: tl.constexpr, form: tl.constexpr) -> tl.tensor:
    """Return the offset of each output for a block's group, float32."""
    group: tl.constexpr = block // form.blocks_of_group
    if form.offsets == "small":
        offset = _number(own, form.groups + group, "small")
        offset *= _float16(tl.load(own + form.factor_word), 1)
    else:
        offset = _number(own + form.offset_word, group, form.offsets)
    return offset


@triton.jit  # type: ignore[untyped-decorator]
def _small_level(words: tl.tensor, number: tl.constexpr) -> tl.tensor:
    """Return a level of 6 bits of each output as float32, without its factor."""
    word: tl.constexpr = 6 * number // 32
    place: tl.constexpr = 6 * number % 32
    level = tl.load(words + word).to(tl.uint32, bitcast=True) >> place
    if place > 26:
        level |= tl.load(words + word + 1).to(tl.uint32, bitcast=True) << (32 - place)
    return (level & 63).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _number(words: tl.tensor, number: tl.constexpr, kind: tl.constexpr) -> tl.tensor:
    """Return a number of each output as float32; a level without its factor."""
    if kind == "small":
        result = _small_level(words, number)
    elif kind == "float32":
        result = tl.load(words + number).to(tl.float32, bitcast=True)
    elif kind == "float16":
        result = _float16(tl.load(words + number // 2), number % 2)
    elif kind == "bfloat16":
        word = tl.load(words + number // 2)
        result = ((word << (16 - number % 2 * 16)) & -65536).to(tl.float32, bitcast=True)
    else:
        word = tl.load(words + number // 4)
        if kind == "level":
            result = ((word << (24 - number % 4 * 8)) >> 24).to(tl.float32)
        elif kind == "exponent":
            result = (((word >> (number % 4 * 8)) & 255) << 23).to(tl.float32, bitcast=True)
        else:
            result = ((word >> (number % 4 * 8)) & 255).to(tl.float32)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _float16(word: tl.tensor, half: tl.constexpr) -> tl.tensor:
    """Return one of the two float16 in an integer as float32."""
    return (word >> (16 * half)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
