"""Process that runs parts: their functions come as lines of JSON, and rows go out as such.

    python -m benchmarks.gpu.worker --messages FD …

Parts share the process as long as they succeed, since the import of torch takes seconds. After a
failure the check starts another one, because an error of a CUDA kernel disables the device for a
whole process.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import traceback
from importlib import import_module, metadata
from pathlib import Path
from typing import IO

from benchmarks.gpu.bundle import use_bundle
from benchmarks.gpu.report import Figure

__all__ = ["main"]

_VERSIONS = ("torch", "triton", "numpy", "transformers", "tokenizers")


def main() -> None:
    """Run the parts whose functions come over stdin, until it ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--messages", type=int, required=True, help="descriptor to write to")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, required=True)
    options = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # tells where a part hangs
    use_bundle(options.bundle)
    with os.fdopen(options.messages, "w", buffering=1) as messages:
        _serve(messages, options.checkpoints, is_dry=options.dry)


def _serve(messages: IO[str], checkpoints: Path, *, is_dry: bool) -> None:
    if is_dry:
        os.environ["TRITON_INTERPRET"] = "1"
    # imported here: on a bare machine, what these import lies in the bundle
    import torch

    from benchmarks.gpu.context import Context, UnavailableError, release

    if not is_dry and not torch.cuda.is_available():
        _send(messages, "unusable", reason="torch finds no CUDA device; --dry needs none")
        return
    torch.set_grad_enabled(False)
    context = Context(torch.device("cpu" if is_dry else "cuda"), is_dry, checkpoints)
    _send(messages, "ready", machine=_machine(is_dry=is_dry))
    for line in sys.stdin:
        call = json.loads(line)
        module, _, function = call["function"].partition(":")
        try:
            for row in getattr(import_module(module), function)(context, **call["options"]):
                _send(messages, "row", row=row)
            release()
            context.synchronize()
        except UnavailableError as reason:
            _send(messages, "unavailable", reason=str(reason))
        except Exception:
            _send(messages, "failed", failure=traceback.format_exc())
        else:
            _send(messages, "ran")


def _send(messages: IO[str], kind: str, **values: object) -> None:
    messages.write(json.dumps({"kind": kind, **values}) + "\n")


def _machine(*, is_dry: bool) -> dict[str, Figure]:
    import torch

    found: dict[str, Figure] = {"device": "CPU", "python": sys.version.split()[0]}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    if not is_dry:
        about = torch.cuda.get_device_properties(0)
        found |= {
            "device": about.name,
            "capability": f"{about.major}.{about.minor}",
            "multiprocessors": about.multi_processor_count,
            "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
    return found


if __name__ == "__main__":
    main()
