"""Delivery: the loop's own speed beside gRPC to the engine and HTTP through all services."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gpu.context import Context, Row, Rows, release
from benchmarks.gpu.load_clients import Load, OverGrpc, OverHttp, Way, run_at_once
from benchmarks.gpu.parts.loads import llama, start, streams_row
from benchmarks.gpu.random_tokenizer import add_tokenizer
from benchmarks.peers import Tokenwire
from benchmarks.processes import ProcessTree, ServiceUse, free_port, running
from benchmarks.prompts import vocabulary_size
from tokenwire.load.load_run import Target

__all__ = ["measure_delivery"]

_LEAST_SHARE = 0.95
"""Least speed over HTTP, as a share of the loop's"""


def measure_delivery(context: Context, model: str) -> Rows:
    """Yield output tokens/s along each path by number of streams, and the CPU of each service.

    model: a name of LLAMAS. The services have their defaults. On a card the second run counts.
    """
    path = llama(context, model, eos_token_id=0)  # grammars need a token that ends a text
    add_tokenizer(path)
    loads = context.size((Load(64, 256, 256), Load(256, 256, 256)), (Load(4, 16, 8),))
    rates = {}
    with start(context, path) as engine:
        for load in loads:
            row = streams_row(engine, load.streams, load.prompt, load.output)
            rates[load] = float(row["tokens/s"] or 0)
            yield {"path": "loop", "streams": load.streams, "tokens/s": rates[load]}
    release()
    vocabulary = vocabulary_size(path)
    with _serving(context, path) as (server, url, tree):
        ways: dict[str, Way] = {
            "gRPC to the engine": OverGrpc(server.engine_port, vocabulary),
            "HTTP": OverHttp(Target(url, server.served_name(path)), vocabulary),
        }
        for load in loads:
            for name, way in ways.items():
                if context.on_gpu:
                    run_at_once(way, load, "warm")
                before = tree.by_service()
                rate = run_at_once(way, load, "measured")
                share = rate / rates[load]
                found: Row = {
                    "path": name,
                    "streams": load.streams,
                    "tokens/s": rate,
                    "share of the loop": share,
                }
                if name == "HTTP" and load is loads[-1] and context.on_gpu:
                    found["ok"] = share >= _LEAST_SHARE
                yield found | _cpu(before, tree)


@contextmanager
def _serving(context: Context, path: Path) -> Iterator[tuple[Tokenwire, str, ProcessTree]]:
    """Run all services with their defaults. Yield the server, its URL and its processes."""
    kv_memory = " --kv-memory 64MiB" if context.is_dry else ""
    server = Tokenwire(f"--device {context.device.type}{kv_memory}")
    launch = server.launch(server.install(path), path, free_port())
    with running(launch, context.checkpoints / f"delivery-{path.name}.log") as tree:
        yield server, launch.url, tree


def _cpu(before: dict[str, ServiceUse], tree: ProcessTree) -> Row:
    """Return the CPU seconds of each service since `before`."""
    return {
        f"CPU s, {name}": use.cpu_seconds - (before[name].cpu_seconds if name in before else 0.0)
        for name, use in sorted(tree.by_service().items())
    }
