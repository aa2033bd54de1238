"""Passes of draft models and of MTP layers: with CUDA graphs and kernel by kernel."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.gpu.checkpoints import LLAMAS
from benchmarks.gpu.context import Context, Row, Rows, release
from services.engine.checked_request import CheckedRequest, SamplingSettings, StoppingSettings
from services.engine.execution.draft_loader import (
    LoadedDraft,
    load_draft,
    load_mtp_draft,
    tap_for_mtp,
)
from services.engine.execution.draft_model import DraftModel
from services.engine.execution.kept_states import KeptStates
from services.engine.execution.model_runner import StepCapacity
from services.engine.messages import AddRequest
from services.engine.model.loader import load_model
from services.engine.scheduling.draft_plan import DraftPart
from services.engine.scheduling.sequence import Request, TokenSequence
from services.engine.scheduling.sequence_cache import BlockTable
from services.engine.scheduling.token_ids import Prompt

if TYPE_CHECKING:
    from services.engine.batch.step_batch import StepBatch

__all__ = ["check_draft_passes"]

_LENGTH = 4
"""Draft tokens of a sequence, unless each layer makes one"""
_STREAMS = 32
_LEAST_EQUAL = 0.9
"""Least share of draft tokens that graphs do not change; sizes of passes change the rounding"""
_AROUND = ("enorm", "hnorm", "shared_head.norm")
"""Norms around an MTP layer"""


def check_draft_passes(context: Context) -> Rows:
    """Compare draft tokens, and time drafts of one token after another in a batch."""
    size = context.size("1b", "tiny")
    small = {**LLAMAS[size], "num_hidden_layers": 2}
    yield from _rows(context, "draft model", context.checkpoint(f"{size}-draft", small), 0)
    for layers in (1, 3):
        path = _with_mtp(context, size, layers)
        yield from _rows(context, f"{layers} MTP layers", path, layers)


def _rows(context: Context, name: str, path: Path, layers: int) -> Rows:
    """Yield rows of a source. layers: number of MTP layers; 0 = a draft model."""
    dtype = torch.bfloat16 if context.on_gpu else torch.float32
    target = load_model(path, dtype, device=context.device)
    if layers:
        tap_for_mtp(target)
        loaded = load_mtp_draft(path, target, "model", _STREAMS)
    else:
        loaded = load_draft(path, path, target, "model", _STREAMS)
    if not context.on_gpu:  # padded passes run like graphs
        loaded = replace(loaded, capacity=StepCapacity(512, _STREAMS, 16))
    tokens = context.size(200, 20)
    blocks = -(-tokens // loaded.block_size) + 1
    both = [
        each.allocate(_STREAMS * blocks, target.allocate_cache(1))
        for each in (loaded, replace(loaded, capacity=None))
    ]
    both[0].warm_up()
    sequences = [_sequence(number, tokens, blocks, loaded) for number in range(_STREAMS)]
    with patch.object(KeptStates, "rows", _states_of(sequences, loaded, tokens)):
        for sequence in sequences:
            for drafts in both:
                drafts.make([DraftPart(sequence, int(layers > 0), tokens, 0)])
        for count in context.size((1, 8, _STREAMS), (1, 3)):
            for rows in (layers,) if layers > 1 else (1, _LENGTH):
                yield {"drafts": name, **_compare(context, both, sequences[:count], layers, rows)}
    release()


def _compare(
    context: Context,
    both: Sequence[DraftModel],
    sequences: Sequence[TokenSequence],
    layers: int,
    rows: int,
) -> Row:
    """Return the times of a draft, and the share of tokens that are the same in both ways.

    both: drafts with graphs and without them. rows: tokens of each sequence in the first pass.
    """
    length = layers if layers > 1 else _LENGTH
    parts = [DraftPart(each, each.length - rows, each.length, length) for each in sequences]
    made = [drafts.make(parts).tokens for drafts in both]
    pairs = zip(*map(chain.from_iterable, made), strict=True)
    same = [mine == other for mine, other in pairs]
    share = sum(same) / len(same)
    waits = None
    if layers <= 1:
        with _waiting(context):
            waits = _milliseconds(context, both[0], parts)
    return {
        "streams": len(sequences),
        "tokens in the first pass": rows,
        "tokens of a draft": length,
        "ms with graphs": _milliseconds(context, both[0], parts),
        "ms with graphs, the host waits for each": waits,
        "ms kernel by kernel": _milliseconds(context, both[1], parts),
        "equal tokens": share,
        "ok": share >= _LEAST_EQUAL,
    }


def _milliseconds(context: Context, drafts: DraftModel, parts: Sequence[DraftPart]) -> float:
    """Return the median time of a draft, from the host's first call to the last token."""
    times = []
    for _ in range(context.size(30, 2)):
        began = time.perf_counter()
        drafts.make(parts)
        times.append(time.perf_counter() - began)
    return 1000 * median(times)


@contextmanager
def _waiting(context: Context) -> Iterator[None]:
    """Have the host wait for each pass, as it would if it read the token before the next one."""
    run = DraftModel._run

    def run_and_wait(
        drafts: DraftModel, batch: StepBatch, *, is_first: bool, is_last: bool
    ) -> Tensor:
        drawn = run(drafts, batch, is_first=is_first, is_last=is_last)
        context.synchronize()
        return drawn

    with patch.object(DraftModel, "_run", run_and_wait):
        yield


def _sequence(number: int, tokens: int, blocks: int, loaded: LoadedDraft) -> TokenSequence:
    """Return a sequence of random tokens with blocks of its own."""
    ids = random.Random(number).choices(range(3, loaded.vocabulary_size), k=tokens)
    checked = CheckedRequest(
        prompts=[ids],
        n=1,
        sampling=SamplingSettings(0.0, 1.0, 0, 0.0, 1),
        stopping=StoppingSettings(1, 0, True, tokens + _LENGTH, frozenset()),
        logprobs=None,
        prompt_logprobs=None,
        resume=(),
        constrained=False,
    )
    request = Request(AddRequest(number, checked, None, b"", 0, 0.0))
    sequence = TokenSequence(request, 0, Prompt(ids, b"", loaded.block_size), None, 1)
    sequence.tables = [BlockTable([*range(number * blocks, (number + 1) * blocks)])]
    return sequence


def _states_of(sequences: Sequence[TokenSequence], loaded: LoadedDraft, tokens: int) -> object:
    """Return a method in the place of `KeptStates.rows` that knows random hidden states."""
    decoder = loaded.decoder
    generator = torch.Generator(decoder.device).manual_seed(1)
    shape = (tokens, decoder.spec.hidden_size)
    states = {
        each: torch.randn(shape, generator=generator, device=decoder.device).to(decoder.dtype)
        for each in sequences
    }

    def rows(kept: KeptStates, sequence: TokenSequence, start: int, end: int) -> Tensor:
        return states[sequence][start:end]

    return rows


def _with_mtp(context: Context, size: str, layers: int) -> Path:
    """Return a checkpoint with random MTP layers in DeepSeek's format, which the first call makes.

    A model has no fewer layers than MTP layers.
    """
    out = context.checkpoints / f"{size}-mtp-{layers}"
    if (out / "config.json").exists():
        return out
    base = context.checkpoint(f"{size}-layers", {**LLAMAS[size], "num_hidden_layers": 3})
    config = json.loads((base / "config.json").read_text())
    tensors = load_file(base / "model.safetensors")
    first, hidden = "model.layers.0.", config["hidden_size"]
    for number in range(layers):
        prefix = f"model.layers.{config['num_hidden_layers'] + number}."
        for name in [name for name in tensors if name.startswith(first)]:
            tensors[prefix + name.removeprefix(first)] = tensors[name].flip(0).contiguous()
        for name in _AROUND:
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        projection = torch.randn(
            hidden, 2 * hidden, generator=torch.Generator().manual_seed(number)
        )
        tensors[f"{prefix}eh_proj.weight"] = (projection / hidden**0.5).bfloat16()
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors")
    config["num_nextn_predict_layers"] = layers
    (out / "config.json").write_text(json.dumps(config))
    return out
