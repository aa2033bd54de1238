"""The attention kernels compile for GPUs, and fit them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize(("capability", "shared_memory"), [(80, 99 << 10), (90, 227 << 10)])
def test_attention_of_every_kind_fits_the_gpu(
    capability: int, shared_memory: int, tmp_path: Path
) -> None:
    """A kernel beyond the shared memory fails at the first request; L4 has less than A100."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.unit.engine.triton.compile_attention", str(capability)]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    kernels = [json.loads(line) for line in said.stdout.splitlines()]
    assert len(kernels) >= 8
    for kernel in kernels:
        assert kernel["shared"] <= shared_memory, kernel
        assert kernel["spilled"] <= 128, kernel
        assert kernel["is_pipelined"] or kernel["kernel"] == "_merge", kernel
