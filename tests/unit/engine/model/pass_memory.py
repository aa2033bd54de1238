"""Memory of a process that computes passes over a long prompt.

The process imports this module, so it imports no transformers.
"""

from ctypes import CDLL
from pathlib import Path

import torch

from services.engine.model.decoder import Decoder
from services.engine.model.loader import load_model
from tests.unit.engine.checkpoints.driver import Driver, random_tokens

MIB = 1 << 20


def memory_of_pass(checkpoint: Path) -> tuple[int, int]:
    """Return the memory that a long prompt's passes took, and what the decoder states."""
    decoder = load_model(checkpoint, torch.bfloat16, progress=False)
    assert isinstance(decoder, Decoder)
    decoder.reserve(4096, 1)
    for inner in decoder._buffers(4096).inner:
        inner.zero_()  # memory is taken when it is written first
    driver = Driver(decoder, [random_tokens(8192, 1)], 2048)  # few blocks have few states
    driver.step([(0, 64)], kept=[1])
    CDLL(None).malloc_trim(0)  # memory that loading has freed would hide a growth
    Path("/proc/self/clear_refs").write_text("5")  # the peak is then what is resident
    before = memory_peak()
    driver.step([(0, 4032)], kept=[1])
    driver.step([(0, 4096)], kept=[1])
    return memory_peak() - before, decoder.pass_bytes(4096, 1, 8192)


def memory_peak() -> int:
    """Return the most bytes of this process that were in memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
