"""Output of the services on the supervisor's stderr."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from tokenwire.serving.service_log import StderrLog, flush_logs

log = StderrLog(sys.argv[1], holds=True)
log.put(sys.argv[2].encode() + b"\\nTraceback\\n")
log.release()
flush_logs(10)
"""
RECORD = {
    "time": "2026-11-29T13:00:07.123+00:00",
    "level": "info",
    "service": "jobs",
    "message": "draining",
}


@pytest.mark.parametrize(
    ("log_format", "shown"),
    [("text", "info    jobs      draining"), ("json", json.dumps(RECORD)), ("auto", "{")],
)
def test_records_of_services_are_text_where_people_read_them(log_format: str, shown: str) -> None:
    """stderr is a pipe here: "auto" keeps JSON, which a collector of logs parses."""
    command = [sys.executable, "-c", PROGRAM, log_format, json.dumps(RECORD)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    record, traceback = ran.stderr.splitlines()
    assert shown in record
    assert record.startswith("{") is (log_format != "text")
    assert traceback == "Traceback"
