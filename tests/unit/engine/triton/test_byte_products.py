"""Products in int8 on a GPU: in Triton's interpreter, beside torch's in integers."""

import os

import pytest
import torch
from torch import Tensor

from services.engine.model.checkpoint.quantized import GroupNumbers, QuantizedWeight

products = pytest.importorskip("services.engine.model.operators.byte_products")
operators = pytest.importorskip("services.engine.model.operators.packed_operators")
pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

CPU = torch.device("cpu")
BFLOAT16 = torch.bfloat16


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weight(outputs: int, inputs: int, seed: int = 0) -> QuantizedWeight:
    codes = torch.randint(256, (outputs, inputs), generator=source(seed), dtype=torch.uint8)
    scales = torch.rand(outputs, 1, generator=source(seed)) / 127
    return QuantizedWeight(codes, 8, GroupNumbers(scales))


def expected(rows: Tensor, *weights: QuantizedWeight) -> Tensor:
    """Return the product of rounded rows, whose sums are integers."""
    exact = rows.float()
    largest = exact.abs().amax(1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)
    numbers = (exact * inverse).round()
    codes = torch.cat([each.decode() / each.scales.float() for each in weights]).round()
    scales = torch.cat([each.scales.float() for each in weights])
    sums = (numbers.double() @ codes.double().T).float()
    return sums * (largest / 127) * scales.T


def test_rows_round_to_the_nearest() -> None:
    """The largest number of each row becomes 127; zeros stay zeros."""
    rows = torch.randn(5, 1100, generator=source()) * torch.tensor([1, 1e-4, 300, 0, 1])[:, None]
    numbers, scales = products.round_to_bytes(rows)
    largest = rows.abs().amax(1)
    torch.testing.assert_close(scales, largest / 127, rtol=1e-6, atol=0)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)
    assert torch.equal(numbers, (rows * inverse[:, None]).round().to(torch.int8))
    assert numbers.abs().amax(1).tolist() == [127, 127, 127, 0, 127]


@pytest.mark.parametrize("count", [1, 17, 70, 140])
def test_products_are_those_of_the_integers(count: int) -> None:
    """In each tile, of queries, keys and values at once, with a bias and to the residual."""
    weights = [weight(80, 1040), weight(24, 1040, 1)]
    projection = products.ByteProjection(weights, torch.ones(104), CPU)
    rows = torch.randn(count, 1040, generator=source()).to(BFLOAT16)
    exact = expected(rows, *weights) + 1
    out = torch.empty(count, 104)
    projection.into(rows, out)
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5)
    projection.add_to(rows, out)
    torch.testing.assert_close(out, 2 * exact, rtol=1e-5, atol=1e-5)
    assert not projection.matrix.arrivals.any()


def test_answer_does_not_depend_on_neighbours() -> None:
    """Sums are exact: each row is the same to the last bit beside any number of others."""
    projection = products.ByteProjection([weight(72, 1024)], None, CPU)
    rows = torch.randn(80, 1024, generator=source()).to(BFLOAT16)
    together = torch.empty(80, 72, dtype=BFLOAT16)
    projection.into(rows, together)
    for count in (1, 20):
        some = torch.empty(count, 72, dtype=BFLOAT16)
        projection.into(rows[:count], some)
        assert torch.equal(some, together[:count])


def test_nan_and_infinity_stay_in_their_row() -> None:
    rows = torch.randn(4, 64, generator=source())
    rows[1, 5], rows[2, 10] = torch.nan, torch.inf
    out = torch.empty(4, 24)
    products.ByteProjection([weight(24, 64)], None, CPU).into(rows, out)
    assert out.isfinite().any(dim=1).tolist() == [True, False, False, True]


def test_checkpoint_that_rounds_rows_multiplies_integers() -> None:
    """And one that does not keeps its rows."""
    rounds = operators.PackedOperators(BFLOAT16, CPU, rounds_rows=True)
    keeps = operators.PackedOperators(BFLOAT16, CPU)
    whole = [weight(24, 64)]
    assert isinstance(rounds.grouped_projection(whole, None), products.ByteProjection)
    assert isinstance(keeps.grouped_projection(whole, None), operators.PackedProjection)
    groups = QuantizedWeight(whole[0].codes, 8, GroupNumbers(torch.ones(24, 2).half()))
    assert isinstance(rounds.grouped_projection([groups], None), operators.PackedProjection)
