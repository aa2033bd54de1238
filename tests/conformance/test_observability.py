"""The alerts and the dashboard of deploy/observability fit the metrics that the services have."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "deploy" / "observability"
_DOCUMENTED = set(re.findall(r"`(tokenwire_\w+)`", (_ROOT / "docs" / "watching.md").read_text()))
"""All metrics; another test compares them with the served ones"""
_SUFFIXES = ("_bucket", "_count", "_sum")

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is missing")


@needs_promtool
@pytest.mark.parametrize(
    "command",
    [("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")],
    ids=" ".join,
)
def test_prometheus_takes_the_files_and_alerts_fire_when_they_must(
    command: tuple[str, ...],
) -> None:
    result = subprocess.run(
        ["promtool", *command], cwd=_FOLDER, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", ["alerts.yml", "dashboard.json"])
def test_expressions_name_metrics_that_exist(name: str) -> None:
    """Prometheus takes an unknown name, and the panel or alert is empty for ever."""
    named = {_family(each) for each in re.findall(r"tokenwire_\w+", (_FOLDER / name).read_text())}
    assert named
    assert named <= _DOCUMENTED


@needs_promtool
def test_expressions_of_the_dashboard_parse(tmp_path: Path) -> None:
    dashboard = json.loads((_FOLDER / "dashboard.json").read_text())
    expressions = [
        target["expr"].replace("$__rate_interval", "1m").replace("$model", ".+")
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
    rules = [{"record": f"panel:{n}", "expr": each} for n, each in enumerate(expressions)]
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    result = subprocess.run(
        ["promtool", "check", "rules", file], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(expressions)} rules found" in result.stdout


def _family(name: str) -> str:
    return next((name.removesuffix(s) for s in _SUFFIXES if name.endswith(s)), name)
