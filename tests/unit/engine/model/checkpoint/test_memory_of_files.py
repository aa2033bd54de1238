"""Pages of checkpoint files leave the memory of the process once the weights are read."""

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.engine.model.checkpoint.tensors import Checkpoint, StoredTensor

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_read_pages_are_given_back_and_views_stay_valid(tmp_path: Path) -> None:
    """A model's files would count twice, once as weights and once as pages."""
    weight = torch.arange(1 << 20, dtype=torch.float32)
    file = tmp_path / "model.safetensors"
    save_file({"weight": weight}, file)
    with Checkpoint(tmp_path) as checkpoint:
        view = checkpoint.tensor(StoredTensor("weight", (1 << 20,)))
        assert torch.equal(view, weight)
        assert resident(file) >= weight.nbytes
    assert resident(file) == 0
    assert torch.equal(view, weight)


def resident(file: Path) -> int:
    """Return the bytes of a mapped file that are in the memory of this process."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.endswith(str(file))
        elif counts and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total
