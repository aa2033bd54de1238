"""Compiles the attention kernels for GPUs that need not be there, as launches would.

`python -m tests.unit.engine.triton.compile_attention 80 90` prints a line of JSON for each kernel.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from services.engine.model.attention.paged_kernels import (
    PagedRows,
    PagedShape,
    attend_pages,
    attend_shared,
)

SHAPES = {
    # heads, key heads, head dimension, soft cap, window, sinks, images that see ahead
    "llama": (32, 8, 128, 0.0, 0, False, False),
    "gpt-oss": (64, 8, 64, 0.0, 128, True, False),
    "gemma2 and gemma3": (8, 4, 256, 50.0, 4096, False, True),
    "gemma4": (16, 2, 512, 0.0, 0, False, True),
    "gemma4, one key head": (32, 1, 512, 0.0, 0, False, False),
}
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


class _Driver:
    """All that Triton asks of a driver until it launches."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # type: ignore[no-any-return]

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    compiled: list[Any] = []
    # A launch that only compiles.
    triton.runtime.jit.KernelInterface.__getitem__ = lambda self, grid: (
        lambda *args, **options: compiled.append(self.run(*args, grid=grid, warmup=True, **options))
    )
    for capability in map(int, sys.argv[1:]):
        triton.runtime.driver.set_active(_Driver(capability))
        for family, shape in SHAPES.items():
            for rows, together in ((1, False), (300, False), (40, True)):
                if together and shape[4]:
                    continue  # windows share nothing
                _attend(rows, *shape, together=together)
                for kernel in compiled:
                    used = _resources(kernel.asm["ptx"], capability)
                    print(
                        json.dumps(
                            {
                                "family": family,
                                "capability": capability,
                                "kernel": kernel.name,
                                "rows": rows,
                                "warps": kernel.metadata.num_warps,
                                "stages": kernel.metadata.num_stages,
                                "shared": kernel.metadata.shared,
                                "is_pipelined": "cp.async" in kernel.asm["ptx"],
                                **used,
                            }
                        )
                    )
                compiled.clear()


def _attend(
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cap: float,
    window: int,
    has_sinks: bool,
    sees_ahead: bool,
    *,
    together: bool,
) -> None:
    """Attend for one sequence's last rows over tables for 16,384 tokens.

    together: for one row of each of `rows` sequences, whose contexts begin with the same pages.
    """
    dtype = torch.bfloat16
    pages = torch.empty(2, 64, kv_heads, head_dim, dtype=dtype)
    sequences = rows if together else 1
    shape = PagedShape(heads, kv_heads, head_dim, head_dim, 64, head_dim**-0.5, cap, window)
    batch = PagedRows(
        starts=torch.empty(sequences + 1, dtype=torch.int32),
        lengths=torch.empty(sequences, dtype=torch.int32),
        tables=torch.empty(sequences, 256, dtype=torch.int32),
        ends=torch.empty(rows, dtype=torch.int32) if sees_ahead else None,
        longest=1 if together else rows,
    )
    operands = (
        torch.empty(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :heads],
        pages,
        pages,
        torch.empty(heads) if has_sinks else None,
        torch.empty(rows, heads * head_dim, dtype=dtype),
    )
    if together:
        attend_shared(shape, batch, torch.empty(1, dtype=torch.int32), *operands)
    else:
        attend_pages(shape, batch, *operands)


def _resources(ptx: str, capability: int) -> dict[str, int]:
    """Return the registers of a thread, and the bytes that it spills."""
    with NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        name = f"sm_{capability}" + ("a" if capability >= 90 else "")
        command = [str(PTXAS), "-v", "--gpu-name", name, file.name, "-o", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    found = re.search(r"(\d+) bytes spill stores.*Used (\d+) registers", said, re.DOTALL)
    assert found is not None, said
    return {"registers": int(found[2]), "spilled": int(found[1])}


if __name__ == "__main__":
    main()
