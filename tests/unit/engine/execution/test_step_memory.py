"""Memory of steps on a GPU, as far as it needs none: the largest step, graphs, failures."""

from pathlib import Path

import pytest
import torch

from services.common.settings import StartupError
from services.engine.batch.buckets import decode_sizes
from services.engine.execution import step_memory
from services.engine.execution.loaded_model import load
from services.engine.execution.model_runner import ModelRunner, StepCapacity
from services.engine.execution.step_memory import largest_step, total_of_graphs, usable_kernels
from services.engine.model.loader import load_model
from services.engine.settings import EngineSettings
from tests.unit.engine.vision_checkpoints import make_vision_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize(("tokens", "prefix"), [(7, 0), (7, 100), (2048, 100), (5000, 0)])
def test_largest_step_computes_all_prompts_and_decodes_at_once(
    embedded_model: Path, tokens: int, prefix: int
) -> None:
    settings = EngineSettings(model=embedded_model, kv_memory="16MiB", max_step_tokens=32)
    decoder = load(settings).decoder
    cache = decoder.allocate_cache(-(-tokens // decoder.block_size) + 2)
    batch = largest_step(decoder, cache, tokens, 3, prefix)
    assert len(batch.token_ids) == tokens + 3
    assert max(batch.query_lengths_host) <= decoder.spec.context_length
    lengths = zip(batch.query_lengths_host[3:], batch.context_lengths_host[3:], strict=True)
    context = decoder.spec.context_length
    assert all(behind == min(rows + prefix, context) for rows, behind in lengths)
    assert batch.block_tables.max() < cache.num_blocks
    assert batch.slots.max() < cache.num_blocks * cache.block_size
    hidden = decoder.compute(batch, cache)
    assert hidden.shape == (tokens + 3, decoder.spec.hidden_size)
    assert hidden.isfinite().all()


def test_graphs_of_all_sizes_are_captured_before_the_first_request(embedded_model: Path) -> None:
    """On a CPU, a capture runs the padded step: its block must not be one of a request."""
    settings = EngineSettings(model=embedded_model, kv_memory="16MiB", max_running=5)
    model = load(settings)
    cache = model.decoder.allocate_cache(9)
    before = [layer.clone() for layer in cache.pages]
    runner = ModelRunner(model.decoder, cache, StepCapacity(200, 5, 40))
    runner.capture_graphs(decode_sizes(5, 40, 100))
    assert {size.tokens for size in runner.mixed_sizes} == {16, 32, 64, 128}
    runner.capture_mixed(runner.mixed_sizes)
    for old, new in zip(before, cache.pages, strict=True):
        assert torch.equal(old[:-1], new[:-1])
        assert not torch.equal(old[-1], new[-1])


def test_further_graphs_share_the_memory_of_the_first() -> None:
    assert total_of_graphs(500 << 20, 3 << 20, 60) == (500 + 59 * 3) << 20
    assert total_of_graphs(0, 0, 60) == 59 << 20


def test_rows_of_images_count_in_the_memory_of_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine reserves these rows at start, so the KV cache must leave memory for them."""
    make_vision_checkpoint(tmp_path, "qwen2.5 vl")
    decoder = load_model(tmp_path, torch.float32)
    monkeypatch.setattr(step_memory, "_release", lambda: 0)  # a CPU has no graphs
    monkeypatch.setattr(step_memory, "measure_captures", lambda captures: 0)
    capacity = StepCapacity(64, 4, 16)
    largest = ModelRunner(decoder, decoder.allocate_cache(30), capacity).mixed_sizes[0]
    rows = largest.tokens * decoder.spec.hidden_size * decoder.dtype.itemsize
    measured = step_memory._measure_graphs(decoder, decoder.allocate_cache(30), capacity)
    assert measured == decoder.spec.family.image_layers * rows > 0


def test_failure_of_the_first_step_is_told_in_one_sentence() -> None:
    with pytest.raises(StartupError, match="lower --max-step-tokens"), usable_kernels():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    with pytest.raises(StartupError, match="kernels: no C compiler") as refused, usable_kernels():
        raise RuntimeError("no C compiler\n  was found")
    assert "\n" not in str(refused.value)
