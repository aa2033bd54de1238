"""Tests of the published figures: ratios, medians, tables, charts, byte floor, prompts."""

import json
import xml.etree.ElementTree as ET

import pytest

from benchmarks.load import Measurement
from benchmarks.plot import BarChart, bar_chart
from benchmarks.prompts import Prompts
from benchmarks.results import Machine
from benchmarks.roofline import ByteFloor
from benchmarks.run import Run, against_baseline, chart, chosen_scenarios, table
from benchmarks.scenarios import SCENARIOS
from tokenwire.load.exchanges import Latency, WorkloadReport
from tokenwire.load.workloads import ClosedLoop, Workload


def measured(
    scenario: str, rate: float = 1.0, ttft: float = 1.0, errors: dict[str, int] | None = None
) -> Measurement:
    report = WorkloadReport(
        requests=1,
        errors=errors or {},
        prompt_tokens=1,
        output_tokens=1,
        output_tokens_per_second=rate,
        tokens_per_event=1.0,
        ttft=Latency(ttft, ttft, ttft, ttft),
        inter_token=None,
        inter_token_beside_prefill=None,
    )
    return Measurement(scenario, 1.0, rate, {"streams": report}, 0.0, None, None, 0.0)


def run(**measurements: list[Measurement]) -> Run:
    return Run(
        date="2026-01-01T00:00:00+00:00",
        machine=Machine("cpu", 2, 8.0, "Linux"),
        model="model",
        seed="seed",
        tokenwire_args="",
        versions={},
        scenarios=[SCENARIOS[name] for name in ("S32", "P", "J32")],
        measurements=measurements,
    )


def test_ratio_to_the_best_peer_is_above_1_for_a_better_server() -> None:
    result = run(
        tokenwire=[measured("S32", rate=300.0), measured("P", ttft=50.0)],
        slow=[measured("S32", rate=50.0), measured("P", ttft=400.0)],
        fast=[measured("S32", rate=200.0), measured("P", ttft=100.0)],
    )
    assert result.relative(SCENARIOS["S32"]) == {"tokenwire": 1.5, "slow": 0.25, "fast": 1.0}
    assert result.relative(SCENARIOS["P"]) == {"tokenwire": 2.0, "slow": 0.25, "fast": 1.0}
    assert "1.50 ×" in table(result)


def test_figure_is_the_median_of_the_measurements_without_errors() -> None:
    """Errors are answered fast, and must not improve a server's figure."""
    failed = measured("S32", rate=9999.0, errors={"3 tokens instead of 64": 2})
    result = run(tokenwire=[measured("S32", rate=rate) for rate in (10.0, 30.0, 20.0)] + [failed])
    assert result.figure("tokenwire", SCENARIOS["S32"]) == 20.0
    assert result.failures == ["S32, streams: 2 × 3 tokens instead of 64"]


def test_scenario_that_no_peer_ran_has_no_ratio() -> None:
    result = run(tokenwire=[measured("S32", rate=300.0)], peer=[])
    assert result.relative(SCENARIOS["S32"]) == {}
    assert "300" in table(result)


def test_constrained_scenario_is_compared_with_its_unconstrained_baseline() -> None:
    result = run(tokenwire=[measured("S32", rate=100.0), measured("J32", rate=80.0)])
    assert "J32 / S32" in against_baseline(result)
    assert "0.80" in against_baseline(result)


def test_baseline_is_measured_with_its_scenario() -> None:
    assert [scenario.name for scenario in chosen_scenarios("J32,J16")] == ["S32", "J32", "J16"]


def test_constrained_output_cannot_end_before_its_length() -> None:
    """Otherwise the ratio would compare outputs of different lengths."""
    workloads = [w for scenario in SCENARIOS.values() for w in scenario.workloads if w.json_schema]
    assert workloads
    for workload in workloads:
        assert workload.json_schema is not None
        schema = json.loads(workload.json_schema)
        assert schema["minItems"] > workload.output  # Each item has at least one token.


def test_chart_has_a_bar_for_each_figure() -> None:
    result = run(
        tokenwire=[measured("S32", rate=300.0)], peer=[measured("S32", rate=200.0)], absent=[]
    )
    texts = [element.text for element in ET.fromstring(chart(result)).iter() if element.text]
    assert {"1.50", "1.00", "S32"} <= set(texts)


def test_chart_escapes_markup_in_names() -> None:
    svg = bar_chart(BarChart("a < b & c", "", ["<x>"], {"&": {"<x>": 2.0}}))
    assert "a < b & c" in [element.text for element in ET.fromstring(svg).iter()]


def test_byte_floor_counts_weights_once_and_kv_and_states_for_each_sequence() -> None:
    floor = ByteFloor(weight_bytes=1000, kv_bytes_per_token=10, state_bytes=5, bandwidth=500.0)
    assert floor.seconds(batch=1, context=0) == pytest.approx((1000 + 5) / 500)
    assert floor.seconds(batch=4, context=50) == pytest.approx((1000 + 4 * (50 * 10 + 5)) / 500)


def test_prompts_are_equal_for_equal_seeds_and_new_for_each_request() -> None:
    workload = Workload("streams", ClosedLoop(1), prompt=20, output=1, requests=1, shared=8)

    def take(seed: str) -> list[list[int] | str]:
        prompts = Prompts(1000, seed).of(workload)
        return [next(prompts) for _ in range(3)]

    first, second, third = take("a")
    assert take("a") == [first, second, third]
    assert first[:8] == second[:8]
    assert first[8:] != second[8:]
    assert take("b")[0] != first
