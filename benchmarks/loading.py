"""Seconds and memory that it takes to load a model's weights, without a KV cache.

    python -m benchmarks.loading --model FILE.gguf

Read the file once before, so that it is in the page cache. `rest` is what stays in memory besides
the weights, most of which is the imported libraries.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import psutil
import torch

from benchmarks.tables import markdown
from services.common.model_files.checkpoint import opened_checkpoint
from services.engine.frontend.child_process import limit_thread_spinning
from services.engine.model.loader import load_model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--weights", default="full", choices=("full", "mapped", "decoded", "int4", "int8")
    )
    arguments = parser.parse_args()
    limit_thread_spinning()
    files = (
        [arguments.model] if arguments.model.is_file() else arguments.model.glob("*.safetensors")
    )
    size = sum(file.stat().st_size for file in files)
    with opened_checkpoint(arguments.model) as directory:
        began = time.perf_counter()
        decoder = load_model(directory, torch.float32, weights=arguments.weights)
        seconds = time.perf_counter() - began
    resident = psutil.Process().memory_info().rss
    row = (
        f"{seconds:.2f}",
        f"{size / seconds / 1e9:.2f}",
        f"{decoder.weight_bytes / 1e9:.2f}",
        f"{resident / 1e9:.2f}",
        f"{(resident - size) / 1e9:.2f}",
    )
    columns = (
        "seconds",
        "GB of file/s",
        "weights of a step, GB",
        "resident, GB",
        "beyond file, GB",
    )
    print(markdown([columns, row]))


if __name__ == "__main__":
    main()
