"""The systemd unit: systemd accepts it, it is confined, and what it sets exists."""

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.jobs.settings import JobsSettings
from tests.manifests import ROOT

UNIT = ROOT / "deploy" / "systemd" / "tokenwire.service"
EXPOSURE = 20
"""Highest exposure of 100, as `systemd-analyze security` weighs it"""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze checks it"
)


@pytest.fixture
def unit(tmp_path: Path) -> str:
    """Return the path of a copy whose command exists on this machine."""
    text = UNIT.read_text().replace("/opt/tokenwire/bin/tokenwire", sys.executable)
    (tmp_path / UNIT.name).write_text(text)
    return str(tmp_path / UNIT.name)


@needs_systemd
def test_systemd_knows_every_setting(unit: str) -> None:
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stderr
    assert Path(unit).name not in checked.stderr


@needs_systemd
def test_unit_is_confined(unit: str) -> None:
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE}", unit]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stdout[-300:]


def test_unit_keeps_the_files_of_the_jobs_service_beyond_a_restart() -> None:
    variables = dict(re.findall(r"TOKENWIRE_JOBS_(\w+)=(\S+)", UNIT.read_text()))
    fields = {field.name for field in dataclasses.fields(JobsSettings)}
    assert {name.lower() for name in variables} <= fields
    assert all(path.startswith("/var/lib/tokenwire/") for path in variables.values())
