"""Load reports: what a balancer learns of idle, busy and full engines."""

import pytest

from services.tokenizer.engines.engine_load import EngineLoad
from services.tokenizer.load_report import LoadAverage, RequestCounts
from tokenwire.pb.orca.v1 import orca_pb2


def engine_load(
    running: int = 0, waiting: int = 0, places: int = 0, used_blocks: int = 0, total_blocks: int = 0
) -> EngineLoad:
    return EngineLoad(
        running=running,
        waiting=waiting,
        queued_tokens=0,
        places=places,
        used_blocks=used_blocks,
        total_blocks=total_blocks,
        block_size=32,
        tokens_per_second=0.0,
    )


IDLE = engine_load(places=8, total_blocks=100)
HALF = engine_load(running=4, places=8, used_blocks=10, total_blocks=100)
FULL = engine_load(running=8, places=8, used_blocks=50, total_blocks=100)
QUEUED = engine_load(running=8, waiting=12, places=8, used_blocks=50, total_blocks=100)
OUT_OF_BLOCKS = engine_load(running=2, places=8, used_blocks=90, total_blocks=100)


def settled(
    *loads: EngineLoad, begun: float = 0, failed: float = 0, cpu: float = 0
) -> orca_pb2.OrcaLoadReport:
    """Return the report after a minute of this load; the rates are per second."""
    average = LoadAverage(0, RequestCounts(0, 0), 0)
    for second in range(1, 61):
        counts = RequestCounts(round(begun * second), round(failed * second))
        average.add(second, counts, cpu * second, loads)
    return average.report()


@pytest.mark.parametrize(
    ("load", "utilization"),
    [(IDLE, 0), (HALF, 0.5), (FULL, 1), (QUEUED, 2.5), (OUT_OF_BLOCKS, 0.9)],
)
def test_utilization_is_of_the_scarcer_of_places_and_blocks_and_counts_the_queue(
    load: EngineLoad, utilization: float
) -> None:
    assert load.utilization == utilization


def test_engine_that_has_not_reported_has_no_load() -> None:
    assert engine_load().utilization == 0


def test_report_has_the_mean_of_the_engines_and_the_rates() -> None:
    report = settled(FULL, IDLE, begun=10, failed=2)
    assert report.application_utilization == pytest.approx(0.5, rel=1e-3)
    assert report.rps_fractional == pytest.approx(10, rel=1e-3)
    assert report.eps == pytest.approx(2, rel=1e-3)
    assert dict(report.named_metrics) == {
        "num_requests_running": 8,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0.25,
    }


def test_service_whose_core_is_scarcer_than_its_engines_reports_the_core() -> None:
    report = settled(HALF, cpu=0.8)
    assert report.cpu_utilization == pytest.approx(0.8, rel=1e-3)
    assert report.application_utilization == pytest.approx(0.8, rel=1e-3)


def test_idle_service_reports_more_than_nothing() -> None:
    """Balancers take a utilization of 0 as "not reported"."""
    assert settled(IDLE).application_utilization == 0.01


def test_service_without_engines_is_full() -> None:
    assert settled().application_utilization == pytest.approx(1, rel=1e-3)


def test_short_burst_changes_the_average_little() -> None:
    average = LoadAverage(0, RequestCounts(0, 0), 0)
    average.add(60, RequestCounts(60, 0), 0, [IDLE])
    average.add(60.25, RequestCounts(60, 0), 0, [FULL])
    average.add(60.25, RequestCounts(90, 0), 0, [FULL])  # no time has passed
    assert average.report().application_utilization < 0.1
    assert 0.9 < average.report().rps_fractional < 1
