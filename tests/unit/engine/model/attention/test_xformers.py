"""Paged, causal attention through xformers, without a GPU.

The tests need xformers. `TRITON_INTERPRET=1 pytest …` also runs the decode kernel (Triton 3.6 with
numpy before 2.4). Flash attention has no CPU path: a definition in torch replaces it.
"""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.interface import AttentionStep
from services.engine.model.attention.torch_backend import TorchAttention
from services.engine.model.loader import load_spec
from tests.unit.engine.checkpoints import CONFIGS, make_checkpoint

backend = pytest.importorskip("services.engine.model.attention.xformers_backend")

CPU = torch.device("cpu")
PAGE = 64


def visible(bias: object, shape: tuple[int, int]) -> Tensor:
    """Return the keys that a bias leaves visible: bool [queries, keys]."""
    written: Tensor = bias.materialize((1, 1, *shape))  # type: ignore[attr-defined]
    return written[0, 0] == 0


@pytest.mark.parametrize("window", [0, 3, 100])
def test_prefill_bias_shows_the_prefix_and_earlier_tokens(window: int) -> None:
    lengths, contexts = (3, 1, 5), (3, 9, 70)
    seen = visible(backend.prefill_bias(lengths, contexts, window, CPU), (9, 82))
    expected = torch.zeros(9, 82, dtype=torch.bool)
    row = column = 0
    for length, context in zip(lengths, contexts, strict=True):
        for i in range(length):
            last = context - length + i
            first = max(last - window + 1, 0) if window else 0
            expected[row + i, column + first : column + last + 1] = True
        row, column = row + length, column + context
    assert torch.equal(seen, expected)


def make_spec(directory: Path, heads: int, kv_heads: int, window: int) -> ModelSpec:
    make_checkpoint(directory, CONFIGS["llama"])
    return dataclasses.replace(
        load_spec(directory),
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=16,
        windows=(window,),
        attention_scale=0.25,
    )


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="needs Triton's interpreter")
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (8, 1)])
def test_decode_equals_the_torch_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, window: int
) -> None:
    """Five sequences, which the backend pads to eight rows."""
    split_k = backend.fmha.triton_splitk
    monkeypatch.setattr(split_k.FwOp, "SUPPORTED_DEVICES", {"cpu"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    spec = make_spec(tmp_path, heads, kv_heads, window)
    torch.manual_seed(0)
    contexts = (1, 63, 64, 65, 700)
    count = len(contexts)
    pages = [-(-context // PAGE) for context in contexts]
    tables = torch.zeros(count, 16, dtype=torch.int32)
    for row, blocks in enumerate(torch.split(torch.randperm(sum(pages)), pages)):
        tables[row, : len(blocks)] = blocks
    last = torch.tensor(contexts) - 1
    batch = StepBatch(
        token_ids=last,
        positions=last,
        slots=tables[torch.arange(count), last // PAGE].long() * PAGE + last % PAGE,
        query_starts=torch.arange(count + 1, dtype=torch.int32),
        context_lengths=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        num_decodes=count,
        query_lengths_host=(1,) * count,
        context_lengths_host=contexts,
    )
    dtype = torch.float16
    tried = backend.XformersAttention(spec, dtype, CPU)
    plain = TorchAttention(spec, dtype, CPU)
    caches = [each.allocate(sum(pages), PAGE) for each in (tried, plain)]
    for kind in ("keys", "values"):
        [one], [other] = (getattr(cache, kind) for cache in caches)
        other.copy_(one.copy_(torch.randn(one.shape)))
    queries, keys, values = (
        torch.randn(count, n, 16, dtype=dtype) for n in (heads, kv_heads, kv_heads)
    )
    outs = [torch.empty(count, heads * 16, dtype=dtype) for _ in caches]
    for each, cache, out in zip((tried, plain), caches, outs, strict=True):
        each.attend(0, AttentionStep(queries, keys, values, batch, cache, out))
    torch.testing.assert_close(outs[0], outs[1], atol=2e-3, rtol=2e-3)


class _Flash:
    """Flash attention of packed sequences, computed in torch."""

    @staticmethod
    def forward(
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        query_starts: Tensor,
        key_starts: Tensor,
        seqused: None,
        most_queries: int,
        most_keys: int,
        dropout: float,
        scale: float,
        causal: bool,
        window_left: int,
        window_right: int,
        **rest: object,
    ) -> tuple[Tensor, None, None]:
        assert causal
        out = torch.empty_like(queries)
        group = queries.shape[1] // keys.shape[1]
        for i in range(len(query_starts) - 1):
            mine = slice(*query_starts[i : i + 2].tolist())
            theirs = slice(*key_starts[i : i + 2].tolist())
            some = queries[mine].float().transpose(0, 1)
            seen = keys[theirs].float().transpose(0, 1).repeat_interleave(group, 0)
            scores = some @ seen.transpose(1, 2) * scale
            behind = scores.shape[2] - scores.shape[1]
            mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril(behind)
            if window_left >= 0:
                mask = mask.triu(behind - window_left)
            weights = scores.masked_fill(~mask, -torch.inf).softmax(2)
            content = values[theirs].float().transpose(0, 1).repeat_interleave(group, 0)
            out[mine] = (weights @ content).transpose(0, 1).to(out.dtype)
        return out, None, None


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (8, 1)])
@pytest.mark.parametrize("contexts", [(5, 70, 1), (5, 130, 64)])
def test_prefill_equals_the_torch_backend(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    window: int,
    contexts: tuple[int, ...],
) -> None:
    """Contexts with and without prefixes; `_Flash` replaces the operator."""
    flash = backend.fmha.flash
    monkeypatch.setattr(flash.FwOp, "SUPPORTED_DEVICES", {"cpu"})
    monkeypatch.setattr(flash.FwOp, "OPERATOR", _Flash.forward)
    spec = make_spec(tmp_path, heads, kv_heads, window)
    torch.manual_seed(0)
    lengths = (5, 70, 1)
    pages = [-(-context // PAGE) for context in contexts]
    tables = torch.zeros(len(contexts), 16, dtype=torch.int32)
    for row, blocks in enumerate(torch.split(torch.randperm(sum(pages)), pages)):
        tables[row, : len(blocks)] = blocks
    spans = list(zip(lengths, contexts, strict=True))
    positions = torch.cat([torch.arange(context - n, context) for n, context in spans])
    owners = torch.arange(len(contexts)).repeat_interleave(torch.tensor(lengths))
    batch = StepBatch(
        token_ids=positions,
        positions=positions,
        slots=tables[owners, positions // PAGE].long() * PAGE + positions % PAGE,
        query_starts=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        context_lengths=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        num_decodes=0,
        query_lengths_host=lengths,
        context_lengths_host=contexts,
    )
    dtype, count = torch.float16, sum(lengths)
    tried = backend.XformersAttention(spec, dtype, CPU)
    plain = TorchAttention(spec, dtype, CPU)
    caches = [each.allocate(sum(pages), PAGE) for each in (tried, plain)]
    for kind in ("keys", "values"):
        [one], [other] = (getattr(cache, kind) for cache in caches)
        other.copy_(one.copy_(torch.randn(one.shape)))
    together = torch.randn(count, heads + 2 * kv_heads, 16, dtype=dtype)
    queries, keys, values = together.tensor_split((heads, heads + kv_heads), dim=1)
    outs = [torch.empty(count, heads * 16, dtype=dtype) for _ in caches]
    for each, cache, out in zip((tried, plain), caches, outs, strict=True):
        each.attend(0, AttentionStep(queries, keys, values, batch, cache, out))
    torch.testing.assert_close(outs[0], outs[1], atol=2e-3, rtol=2e-3)


def test_prefill_gathers_the_slots_of_all_contexts() -> None:
    tables = torch.tensor([[5, 9, 0], [2, 7, 4]], dtype=torch.int32)
    batch = StepBatch(
        token_ids=torch.empty(0),
        positions=torch.empty(0),
        slots=torch.empty(0),
        query_starts=torch.empty(0),
        context_lengths=torch.empty(0),
        block_tables=tables,
        num_decodes=1,
        query_lengths_host=(1, 10),
        context_lengths_host=(70, 150),
    )
    slots = backend._StepMetadata(batch, PAGE).slots
    expected = [block * PAGE + offset for block in (2, 7, 4) for offset in range(PAGE)]
    assert slots.tolist() == expected[:150]
