"""Correctness on a GPU: kernels against torch, families against float32 on the CPU, graphs."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.engine import MeasuredEngine
from benchmarks.gpu.checkpoints import FAMILIES
from benchmarks.gpu.context import Context, Row, Rows, release
from benchmarks.gpu.parts.answers import Question, answer, differences, verdict
from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend, AttentionStep, choose_backend
from services.engine.model.attention.torch_backend import TorchAttention
from services.engine.model.loader import load_spec
from services.engine.model.operators.fp8_weights import Fp8Rounding

__all__ = ["check_attention", "check_families", "check_fp8", "check_graphs"]

_CASES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "decode, 1 row": ((1,), (700,), 1),
    "decode, 37 rows": ((1,) * 37, tuple(range(1, 1100, 30))[:37], 37),
    "prompts": ((200, 33, 1), (200, 33, 1), 0),
    "prompts behind prefixes": ((100, 64, 7), (400, 64, 1030), 0),
    "decodes beside prompts": ((1, 1, 90), (300, 65, 190), 2),
}
"""Query lengths, context lengths and number of decodes of each step"""
_ATTENTIONS = ("llama", "mistral, window", "gemma2", "gpt-oss", "phi3, head of 96", "qwen3")
_DRY_FAMILIES = ("llama", "gpt-oss")
_WITH_GRAPHS = ("llama", "gemma2", "qwen3 moe", "gpt-oss")
_WITH_FP8 = (8, 9)
"""Least compute capability of caches in FP8"""
_MOST_DIFFERENCE = 0.02
"""Largest difference from float32 attention, of values near 1 in bfloat16"""
_FP8_DIFFERENCE = 0.02
"""Largest error of a product of FP8 numbers, of the largest result"""


def check_attention(context: Context) -> Rows:
    """Compare the backend of this device with torch's in float32, for all kinds of attention."""
    device = context.device
    has_fp8 = context.on_gpu and torch.cuda.get_device_capability() >= _WITH_FP8
    types = ("model", "fp8") if has_fp8 else ("model",)
    for family in context.size(_ATTENTIONS, _ATTENTIONS[:2]):
        path = context.checkpoint(f"family-{family}", FAMILIES[family], small=True)
        spec = load_spec(path)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        exact = TorchAttention(spec, torch.float32, device)
        for kind, (name, (queries, contexts, decodes)) in product(types, _CASES.items()):
            ours = choose_backend(spec, dtype, device, kv_dtype=kind)
            found, expected = _attend(spec, ours, exact, queries, contexts, decodes, dtype, device)
            difference = (found.float() - expected).abs().max().item()
            yield {
                "attention": family,
                "KV type": kind,
                "step": name,
                "difference": difference,
                "ok": difference <= _MOST_DIFFERENCE,
            }


def _attend(
    spec: ModelSpec,
    ours: AttentionBackend,
    exact: AttentionBackend,
    queries: tuple[int, ...],
    contexts: tuple[int, ...],
    decodes: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return both outputs of the second layer, over caches that hold the same values.

    A cache in FP8 rounds the step's own keys and values, too, before the exact backend reads them.
    """
    layer = spec.attention(1)
    sinks = torch.randn(layer.num_heads, device=device) if layer.has_sinks else None
    size = ours.block_size
    needed = [-(-context // size) for context in contexts]
    order = torch.randperm(sum(needed), device=device).to(torch.int32)
    tables = torch.zeros(len(contexts), max(*needed, 16), dtype=torch.int32, device=device)
    begin = 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[begin : begin + count]
        begin += count
    outputs = []
    caches = [backend.allocate(sum(needed) + 1, size) for backend in (ours, exact)]
    pasts = [_batch(tuple(contexts), tuple(contexts), 0, tables, size, device)]
    pasts.append(_batch(queries, contexts, decodes, tables, size, device))
    steps = []
    for batch in pasts:
        tokens = len(batch.token_ids)
        shape = (tokens, layer.num_heads + 2 * layer.num_kv_heads, layer.head_dim)
        steps.append((batch, torch.randn(shape, device=device).to(dtype)))
    for backend, cache in zip((ours, exact), caches, strict=True):
        for batch, heads in steps:
            used = heads if backend is ours else heads.float()
            counts = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
            q, k, v = used.split_with_sizes(counts, dim=1)
            out = used.new_empty(len(batch.token_ids), layer.num_heads * layer.head_dim)
            backend.attend(1, AttentionStep(q, k, v, replace(batch), cache, out, sinks))
        outputs.append(out)
    return outputs[0], outputs[1]


def _batch(
    queries: tuple[int, ...],
    contexts: tuple[int, ...],
    decodes: int,
    tables: Tensor,
    size: int,
    device: torch.device,
) -> StepBatch:
    positions = torch.cat(
        [
            torch.arange(end - count, end, device=device)
            for count, end in zip(queries, contexts, strict=True)
        ]
    )
    rows = torch.repeat_interleave(
        torch.arange(len(queries), device=device), torch.tensor(queries, device=device)
    )
    slots = tables[rows, positions // size].long() * size + positions % size
    starts = torch.tensor([0, *queries], device=device).cumsum(0).to(torch.int32)
    return StepBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slots=slots,
        query_starts=starts,
        context_lengths=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables,
        num_decodes=decodes,
        query_lengths_host=queries,
        context_lengths_host=contexts,
    )


def check_families(context: Context) -> Rows:
    """Compare the log-probabilities of small families with those of float32 on the CPU."""
    for name in context.size(tuple(FAMILIES), _DRY_FAMILIES):
        path = context.checkpoint(f"family-{name}", FAMILIES[name], small=True)
        try:
            yield {"family": name, **_accuracy(path, context.device)}
        except Exception as error:  # one family must not hide the others
            traceback.print_exc()
            yield {"family": name, "ok": False, "failure": f"{type(error).__name__}: {error}"[:200]}
        release()


def _accuracy(path: Path, device: torch.device) -> Row:
    prompts = [random.Random(size).choices(range(3, 900), k=size) for size in (7, 64, 300)]
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    with MeasuredEngine(path, dtype, 4096, device=device.type) as engine:
        answers, _ = answer(engine, [Question(prompt) for prompt in prompts], 24)
    release()
    with MeasuredEngine(path, "float32", 4096) as exact:
        found = differences(exact, answers)
    return verdict(found, has_experts=load_spec(path).has_experts)


def check_graphs(context: Context) -> Rows:
    """Compare greedy tokens of 8 streams with CUDA graphs and without them."""
    device = context.device
    for name in context.size(_WITH_GRAPHS, _WITH_GRAPHS[:1]):
        path = context.checkpoint(f"family-{name}", FAMILIES[name], small=True)
        prompts = [random.Random(i).choices(range(3, 900), k=20 + i) for i in range(8)]
        results = []
        for with_graphs in (True, False):
            with (
                _graphs(with_graphs),
                MeasuredEngine(path, "auto", 4096, device=device.type) as engine,
            ):
                results.append(
                    [
                        engine.generate(prompt, max_tokens=32, temperature=0, ignore_eos=True)
                        for prompt in prompts
                    ]
                )
            release()
        pairs = zip(*results, strict=True)
        equal = sum(a.token_ids == b.token_ids for a, b in pairs)
        yield {"family": name, "equal streams of 8": equal, "ok": equal >= 7}


def check_fp8(context: Context) -> Rows:
    """Compare products of FP8 weights with those of the same rounded numbers in float32."""
    if context.on_gpu:
        context.require_capability(8, 9, "multiplication in FP8")
    device, dtype = context.device, context.dtype
    outputs, inputs = context.size((3072, 1664), (96, 256))
    # imported here: only GPU machines have Triton
    from services.engine.model.operators.fp8_operators import Fp8Operators
    from services.engine.model.operators.fp8_rounding import round_rows

    for group in (None, 128):
        rounding = Fp8Rounding(group)
        weight, bias = (
            torch.randn(outputs, inputs, device=device),
            torch.randn(outputs, device=device),
        )
        projection = Fp8Operators(dtype, device, rounding).projection(weight, bias)
        rounded = rounding.round(weight)
        exact = _decoded(rounded.numbers, rounded.scales.T)
        for count in context.size((1, 17, 37, 100, 300), (1, 17)):
            rows = torch.randn(count, inputs, device=device).to(dtype)
            residual = torch.randn(count, outputs, device=device).to(dtype)
            out = residual.clone()
            projection.add_to(rows, out)
            rounded_rows = round_rows(rows, group)
            product = _decoded(rounded_rows.numbers, rounded_rows.scales) @ exact.T
            expected = residual.float() + product + bias.to(dtype).float()
            difference = ((out.float() - expected).abs().max() / expected.abs().max()).item()
            yield {
                "inputs of a scale": group or "all",
                "rows": count,
                "difference": difference,
                "ok": difference <= _FP8_DIFFERENCE,
            }


def _decoded(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return FP8 numbers [n, width] times the scales [n, groups]."""
    return numbers.float() * scales.repeat_interleave(numbers.shape[1] // scales.shape[1], 1)


@contextmanager
def _graphs(allowed: bool) -> Iterator[None]:
    with ExitStack() as stack:
        if not allowed:
            name = "services.engine.execution.loaded_model.graph_capacity"
            stack.enter_context(patch(name, return_value=None))
        yield
