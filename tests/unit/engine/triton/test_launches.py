"""A layer of a decode step takes few launches: they are most of the time of a small step."""

import os
from pathlib import Path

import pytest
import torch

from services.engine.model import loader
from services.engine.model.loader import load_model
from services.engine.model.model import Model
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint

paged = pytest.importorskip("services.engine.model.attention.paged_backend")
operators = pytest.importorskip("services.engine.model.operators.triton_operators")
launches = pytest.importorskip("tests.unit.engine.triton.launches")

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

CPU = torch.device("cpu")
PAGE = 64


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(loader, "native", None)
    monkeypatch.setattr(loader, "choose_backend", lambda *model, **_: paged.PagedAttention(*model))
    onednn = "services.engine.model.operators.torch_operators._has_onednn_kernels"
    monkeypatch.setattr(onednn, lambda *_: False)


def second_layer(decoder: Model, context: int) -> list[str]:
    """Return the launches of a decode step between the cache writes of the first two layers."""
    sequences = [random_tokens(context + 1, seed) for seed in range(2)]
    driver = Driver(decoder, sequences, block_size=PAGE)
    driver.advance([(0, context), (1, context)])  # what the pages hold changes no launch
    batch, counter = driver.batch([(0, 1), (1, 1)]), launches.Launches()
    with counter.counted():
        decoder.compute(batch, driver.cache)
    first = counter.names.index("_write_rotated")
    second = counter.names.index("_write_rotated", first + 1)
    return list(counter.names[first:second])


def test_layer_takes_nine_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and activation are one kernel each, and so is rotation with the cache write.

    With torch's operators it took 48.
    """
    make_checkpoint(tmp_path, CONFIGS["llama"])
    own = operators.TritonOperators(torch.float32, CPU)
    monkeypatch.setattr(loader, "choose_operators", lambda *_: own)
    assert second_layer(load_model(tmp_path, torch.float32), 20) == [
        *("_write_rotated", "attend_tile", "aten.addmm_.default"),
        *("_norm", "aten.mm.out", "_activate", "aten.addmm_.default"),
        *("_norm", "aten.mm.out"),
    ]


def test_layer_with_fp8_weights_takes_ten_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of attention is rounded by a kernel of its own, other rows by those before."""
    make_checkpoint(tmp_path, CONFIGS["llama"])
    monkeypatch.setattr(loader, "multiplies_fp8", lambda *_: True)
    decoder = load_model(tmp_path, torch.float32, weights="fp8")
    assert second_layer(decoder, 20) == [
        *("_write_rotated", "attend_tile", "_round_rows", "_multiply_fp8"),
        *("_norm", "_multiply_fp8", "_activate", "_multiply_fp8"),
        *("_norm", "_multiply_fp8"),
    ]


def test_long_contexts_take_one_launch_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several programs attend to parts of a context, and one more kernel merges the parts."""
    make_checkpoint(tmp_path, CONFIGS["llama"])
    own = operators.TritonOperators(torch.float32, CPU)
    monkeypatch.setattr(loader, "choose_operators", lambda *_: own)
    launched = second_layer(load_model(tmp_path, torch.float32), 300)
    assert launched[:3] == ["_write_rotated", "attend_tile", "merge_parts"]
    assert len(launched) == 10
