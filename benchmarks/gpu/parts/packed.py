"""Quantized weights that stay packed on a GPU: exactness by format, times by number of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.checkpoints import LLAMAS
from benchmarks.gpu.context import Context, Row, Rows, release
from benchmarks.gpu.parts.loads import start, streams_row
from benchmarks.gpu.quantized_checkpoints import make_gptq
from benchmarks.gpu.timing import case, copies
from services.engine.model.checkpoint.quantized import (
    BlockCodes,
    BlockLayout,
    GroupNumbers,
    Plane,
    QuantizedWeight,
)

__all__ = ["check_packed", "compare_packed", "measure_packed_streams"]

_SHAPES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate, up": (28672, 4096),
    "down": (4096, 14336),
}
"""Outputs and inputs of Llama 3.1 8B's products"""
_NF4 = (
    *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
    *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0),
)
"""Nearly the numbers of bitsandbytes' format"""
_MOST_ERROR = 4e-6
"""Largest difference of float32 sums, as a share of the largest product"""
_MOST_ROUNDED = 1e-2
"""Largest difference where weights are rounded to the type of rows first"""
_EXACT_ROWS = 256
"""Most rows whose products round no weight"""


def check_packed(context: Context) -> Rows:
    """Compare the products of every format with those of the decoded weight in float32.

    A row alone must also have the numbers that it has beside others.
    """
    # imported here: only GPU machines have Triton
    from services.engine.model.operators.packed_operators import PackedOperators

    outputs, inputs = context.size((1600, 4096), (72, 512))
    operators = PackedOperators(context.dtype, context.device)
    for name, make in _formats(outputs, inputs).items():
        weight = make()
        exact = weight.decode().to(context.device)
        projection = operators.grouped_projection([weight], None)
        size = 8 * projection.weight_bytes / (outputs * inputs)
        alone: Tensor | None = None
        for count in context.size((1, 8, 16, 32, 64, 256, 1000), (1, 20)):
            rows = _rows(context, count, inputs)
            out = torch.empty(count, outputs, device=context.device)
            projection.into(rows, out)
            product = rows.double() @ exact.double().T
            error = ((out - product).abs().max() / product.abs().max()).item()
            alone = out[:1].clone() if alone is None else alone
            most = _MOST_ERROR if count <= _EXACT_ROWS else _MOST_ROUNDED
            yield {
                "format": name,
                "bits per weight": size,
                "rows": count,
                "error": error,
                "first row as alone": bool(torch.equal(alone, out[:1])),
                "ok": error <= most,
            }
        release()


def compare_packed(context: Context) -> Rows:
    """Yield the times of each way to multiply by 4-bit weights, beside those in bfloat16."""
    # imported here: only GPU machines have Triton
    from services.engine.model.operators.packed_kernels import PackedMatrix
    from services.engine.model.operators.packed_plan import PackedPlan
    from services.engine.model.operators.packed_weights import PackedWeight, StoredCodes

    device, dtype = context.device, context.dtype
    shapes = context.size(_SHAPES, {"tiny": (64, 512)})
    for shape, (outputs, inputs) in shapes.items():
        plain = torch.randn(outputs, inputs, device=device).to(dtype)
        weights = [plain.clone() for _ in range(copies(context, plain.nbytes))]
        for name in ("4 bits, zero points", "Q4_K"):
            stored = StoredCodes.of(_formats(outputs, inputs)[name](), device)
            assert stored is not None
            first = PackedWeight.of([stored], dtype, device)
            count = copies(context, first.nbytes)
            packed = [first, *(PackedWeight.of([stored], dtype, device) for _ in range(count - 1))]
            matrices = [PackedMatrix.of(each, None) for each in packed]
            plan = PackedPlan(matrices[0], dtype)
            for number in context.size((1, 8, 16, 32, 64, 128, 256), (1,)):
                rows = _rows(context, number, inputs)
                out = torch.empty(number, outputs, device=device, dtype=dtype)
                names: Row = {"product": f"{shape} {outputs}x{inputs}", "rows": number}
                calls = [partial(torch.mm, rows, each.T, out=out) for each in weights]
                how = names | {"how": "bfloat16"}
                yield case(context, how, lambda: calls, bytes_moved=plain.nbytes)  # noqa: B023
                for product in plan.candidates(number):
                    ways = [
                        partial(product.multiply, rows, each, out, adds=False) for each in matrices
                    ]
                    how = names | {"how": f"{name}: {product}"}
                    yield case(context, how, lambda: ways, bytes_moved=first.nbytes)  # noqa: B023
        release()


def measure_packed_streams(context: Context) -> Rows:
    """Yield the speed of streams of a model in 4 bits, with prompts and answers of 256 tokens."""
    size = context.size("8b", "tiny")
    config = LLAMAS[size] | {"tie_word_embeddings": False}
    path = make_gptq(context.checkpoints / f"{size}-gptq", config, context.device)
    release()
    prompt, output = context.size((256, 256), (16, 8))
    with start(context, path) as engine:
        yield {
            "weights": "GPTQ, 4 bits in groups of 128",
            "KV tokens": engine.model.total_blocks * engine.model.block_size,
        }
        for count in context.size((1, 8, 64, 256), (1, 4)):
            yield streams_row(engine, count, prompt, output, turns=2)
    release()


def _rows(context: Context, count: int, inputs: int) -> Tensor:
    """Return rows whose first one does not depend on their number."""
    source = torch.Generator(context.device).manual_seed(1)
    shape = (1000, inputs) if context.on_gpu else (20, inputs)
    every = torch.randn(shape, generator=source, device=context.device)
    return every[:count].to(context.dtype).contiguous()


def _formats(outputs: int, inputs: int) -> Mapping[str, Callable[[], QuantizedWeight]]:
    """Return makers of random weights in the forms that checkpoints have."""

    def codes(bits: int) -> Tensor:
        source = torch.Generator().manual_seed(bits)
        return torch.randint(2**bits, (outputs, inputs), generator=source, dtype=torch.uint8)

    def scales(group: int) -> Tensor:
        source = torch.Generator().manual_seed(group)
        return (0.1 + torch.rand(outputs, inputs // group, generator=source)).half()

    def zeros(bits: int, group: int) -> QuantizedWeight:
        numbers = scales(group).float()
        source = torch.Generator().manual_seed(bits + group)
        points = torch.randint(2**bits, numbers.shape, generator=source)
        return QuantizedWeight(
            codes(bits), bits, GroupNumbers(numbers), GroupNumbers(-points * numbers)
        )

    def middle(bits: int, group: int) -> QuantizedWeight:
        return QuantizedWeight(codes(bits), bits, GroupNumbers(scales(group)))

    def affine(bits: int, group: int) -> QuantizedWeight:
        numbers = GroupNumbers(scales(group)), GroupNumbers(-8 * scales(group))
        return QuantizedWeight(codes(bits), bits, *numbers)

    def blocks_of_five() -> BlockCodes:
        layout = BlockLayout(160, 256, [Plane(0, 128, 32, 4), Plane(128, 32, 32, 1, 4)])
        source = torch.Generator().manual_seed(5)
        shape = (outputs, inputs // layout.num_codes * layout.num_bytes)
        rows = torch.randint(256, shape, generator=source, dtype=torch.uint8)
        return BlockCodes(rows, layout)

    def levels(bits: int, group: int, *, has_offsets: bool) -> QuantizedWeight:
        source = torch.Generator().manual_seed(group)

        def numbers() -> GroupNumbers:
            shape = (outputs, inputs // group)
            each = torch.randint(1, 63, shape, generator=source, dtype=torch.int8)
            return GroupNumbers(each, scales(256) / 32)

        offsets = numbers() if has_offsets else None
        if bits == 5:
            return QuantizedWeight(blocks_of_five(), 6, numbers(), offsets)
        return QuantizedWeight(codes(bits), bits, numbers(), offsets)

    def looked_up(values: tuple[float, ...], group: int) -> QuantizedWeight:
        return QuantizedWeight(codes(4), 4, GroupNumbers(scales(group).float() / 3), values=values)

    return {
        "4 bits, zero points": partial(zeros, 4, 128),
        "4 bits, symmetric": partial(middle, 4, 128),
        "8 bits, zero points": partial(zeros, 8, 128),
        "8 bits by output": partial(middle, 8, inputs),
        "Q4_0": partial(middle, 4, 32),
        "Q4_1": partial(affine, 4, 32),
        "Q4_K": partial(levels, 4, 32, has_offsets=True),
        "Q5_K": partial(levels, 5, 32, has_offsets=True),
        "Q6_K": partial(levels, 6, 16, has_offsets=False),
        "Q8_0": partial(middle, 8, 32),
        "nf4": partial(looked_up, _NF4, 64),
        "IQ4_NL": partial(looked_up, tuple(range(-127, 113, 15)), 32),
    }
