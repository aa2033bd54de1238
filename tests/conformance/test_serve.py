"""`tokenwire serve` when something goes wrong under way."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.stack import free_ports


def test_a_death_is_reported_and_takes_the_rest_along(tmp_path: Path) -> None:
    """A stack that silently misses a part would answer with riddles."""
    http, tokenizer, engine, grammar = map(str, free_ports(4))
    process = subprocess.Popen(
        [
            sys.executable, "-m", "tokenwire", "serve", "--port", http,
            "--tokenizer-port", tokenizer, "--engine-port", engine, "--grammar-port", grammar,
            "--engine-args", "--kv-memory 64MiB", "--log-dir", str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert re.fullmatch(rf"Tokenwire serves http://127\.0\.0\.1:{http} \(up in .* s\)\n", line)

    children = _children(process.pid)
    assert len(children) == 4
    (victim,) = [pid for pid, command in children.items() if "services.grammar" in command]
    os.kill(victim, signal.SIGKILL)
    rest, complaints = process.communicate(timeout=120)
    assert process.returncode == 1
    assert rest == ""
    assert "tokenwire: grammar ended with signal SIGKILL" in complaints
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def _children(parent: int) -> dict[int, str]:
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}
