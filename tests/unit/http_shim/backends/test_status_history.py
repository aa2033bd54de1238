"""History of the models' load: an operator sees what happened before the page was opened."""

from typing import Any

from services.http_shim.backends.model_source import ServedStatus
from services.http_shim.backends.status_history import StatusHistory
from tokenwire.pb.completion.v1 import models_pb2

SERVING = models_pb2.ENGINE_STATE_SERVING


def status(tokens: int, uptime: float, **engine: Any) -> models_pb2.ModelStatus:
    engines = [models_pb2.EngineStatus(state=SERVING, total_blocks=10, **engine)]
    return models_pb2.ModelStatus(completion_tokens=tokens, uptime_seconds=uptime, engines=engines)


def history() -> StatusHistory:
    return StatusHistory(None)  # type: ignore[arg-type]  # nothing is asked


def test_samples_have_rates_and_the_load_of_all_engines() -> None:
    kept = history()
    kept.take([ServedStatus("m", status(100, 5, running_sequences=1))], 5.0)
    later = status(160, 8, running_sequences=2, used_blocks=4)
    kept.take([ServedStatus("m", later)], 8.0)
    first, second = kept.samples("m", -1)
    assert (first.generated_per_second, first.running_sequences) == (None, 1)
    assert (second.generated_per_second, second.prompt_per_second) == (20, 0)
    assert (second.running_sequences, second.kv_used_share) == (2, 0.4)
    assert kept.samples("m", 5.0) == [second]


def test_rate_is_unknown_after_a_restart_and_a_loss_of_the_service() -> None:
    """A counter that falls would be drawn as a negative rate, or as a peak after the loss."""
    kept = history()
    for now, seen in ((0, status(100, 50)), (3, status(10, 1)), (6, None), (9, status(20, 7))):
        kept.take([ServedStatus("m", seen)], float(now))
    assert [each.generated_per_second for each in kept.samples("m", -1)] == [None] * 4
    assert [each.running_sequences for each in kept.samples("m", -1)] == [0, 0, None, 0]


def test_ten_minutes_of_served_models_are_kept() -> None:
    kept = history()
    for turn in range(1_000):
        kept.take([ServedStatus("m", None), ServedStatus(f"gone {turn}", None)], 3.0 * turn)
    samples = kept.samples("m", -1)
    assert samples[-1].time - samples[0].time == 597
    assert kept.samples("gone 5", -1) == []
