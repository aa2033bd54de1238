"""Training of the decoder on packed shards: warm-up, stable phase, linear decay to zero.

The stable phase runs until SIGTERM or --steps and leaves a state file. The decay phase is a second
run over the same state with --decay-steps. Every optimizer step reads --batch-tokens tokens. Rows
repeat only when the shards are exhausted.

    python train.py --shards shards-512 --state state.pt
    python train.py --shards shards-512 --long-shards shards-2048 --state state.pt --decay-steps 600

With --from, a new state starts from the weights of an exported checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from model import CausalModel, ModelShape
from optimizer import make_optimizers

SEED = 1
WARMUP_STEPS = 60
GRADIENT_NORM = 1.0
INFILL_IDS = [1, 2, 3]  # tokenizer.py's FIM_PREFIX, FIM_SUFFIX and FIM_MIDDLE
PIECES_EVERY = 3  # interval in steps between those that read pieces


@dataclass(slots=True)
class Progress:
    """Progress of training, saved with the weights."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    decay_start: int | None = None
    shards: str = ""
    rows_read: int = 0
    long_rows_read: int = 0


def read_rows(folder: Path, skip: int) -> Iterator[Tensor]:
    """Yield rows [length] of all shards in a shuffled order, endlessly, from row `skip` on."""
    rows = np.concatenate([np.load(path) for path in sorted(folder.glob("shard-???.npy"))])
    order = np.random.default_rng(SEED).permutation(len(rows))
    for index in itertools.count(skip):
        yield torch.from_numpy(rows[order[index % len(rows)]].astype(np.int64))


def learning_rate_factor(step: int, decay_start: int | None, decay_steps: int) -> float:
    """Return the factor: warm-up from 0, then 1, then linear decay to 0.

    A decay that starts at step 0, from the weights of a checkpoint, has its warm-up within it.
    """
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    if decay_start is None:
        return warmup
    return warmup * max(0.0, 1.0 - (step - decay_start) / decay_steps)


def save_state(
    path: Path, model: CausalModel, optimizers: list[torch.optim.Optimizer], progress: Progress
) -> None:
    """Write the state file atomically."""
    state = {
        "shape": asdict(model.model.shape),
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": asdict(progress),
    }
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def load_state(
    path: Path,
    model: CausalModel,
    optimizers: list[torch.optim.Optimizer],
    checkpoint: Path | None,
) -> Progress:
    """Restore model and optimizers from the state file; without one, `checkpoint`'s weights."""
    if not path.exists():
        if checkpoint is not None:
            model.load_state_dict(load_file(checkpoint / "model.safetensors"))
        return Progress()
    state = torch.load(path)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Progress(**state["progress"])


def set_learning_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set every learning rate to its peak times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def train(arguments: argparse.Namespace) -> None:
    """Run one phase of training."""
    torch.manual_seed(SEED)
    torch.set_num_threads(arguments.threads)
    model = CausalModel(ModelShape())
    optimizers = make_optimizers(model, arguments.matrix_lr, arguments.other_lr)
    progress = load_state(arguments.state, model, optimizers, arguments.checkpoint)
    if progress.shards != arguments.shards.name:
        progress.shards, progress.rows_read, progress.long_rows_read = arguments.shards.name, 0, 0
    if arguments.decay_steps and progress.decay_start is None:
        progress.decay_start = progress.step
    last_step = arguments.steps
    if progress.decay_start is not None:
        last_step = progress.decay_start + arguments.decay_steps
    model.compile_parts()

    stopping = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    short = read_rows(arguments.shards, progress.rows_read)
    long = read_rows(arguments.long_shards or arguments.shards, progress.long_rows_read)
    saved_at = time.monotonic()
    while progress.step < last_step and not stopping:
        began = time.monotonic()
        factor = learning_rate_factor(progress.step, progress.decay_start, arguments.decay_steps)
        set_learning_rates(optimizers, arguments.peak * factor)
        is_long = arguments.long_shards is not None and progress.step % arguments.long_every == 0
        rows = long if is_long else short
        piece = arguments.piece if progress.step % PIECES_EVERY == 1 else None
        loss, read, tokens = accumulate(
            model, rows, arguments.batch_tokens, arguments.micro_tokens, piece
        )
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.monotonic() - began
        progress.step += 1
        progress.tokens += tokens
        if is_long:
            progress.long_rows_read += read
        else:
            progress.rows_read += read
        progress.seconds += seconds
        line = {
            "step": progress.step,
            "loss": round(loss, 4),
            "norm": round(float(norm), 3),
            "rate": round(arguments.peak * factor, 4),
            "tokens": progress.tokens,
            "per_second": round(tokens / seconds),
            "seconds": round(progress.seconds),
        }
        print(json.dumps(line), flush=True)
        if time.monotonic() - saved_at > arguments.save_seconds:
            save_state(arguments.state, model, optimizers, progress)
            saved_at = time.monotonic()
    save_state(arguments.state, model, optimizers, progress)


def accumulate(
    model: CausalModel,
    rows: Iterator[Tensor],
    batch_tokens: int,
    micro_tokens: int,
    piece: int | None = None,
) -> tuple[float, int, int]:
    """Accumulate an optimizer step's gradients; return mean loss, rows read and tokens read."""
    first = next(rows)
    length = len(first)
    micro_rows = micro_tokens // length
    micro_batches = batch_tokens // micro_tokens
    total = 0.0
    for index in range(micro_batches):
        head = [first] if index == 0 else []
        batch = torch.stack([*head, *(next(rows) for _ in range(micro_rows - len(head)))])
        batch = _trim(batch) if piece is None else _cut(batch, piece)
        loss = model.loss(batch[:, :-1], batch[:, 1:]) / micro_batches
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total, micro_rows * micro_batches, micro_rows * micro_batches * length


def _trim(rows: Tensor) -> Tensor:
    """Drop one token per row: the leading <|endoftext|> of odd rows, the last of even rows."""
    return torch.stack(
        [row[index % 2 : len(row) - 1 + index % 2] for index, row in enumerate(rows)]
    )


def _cut(rows: Tensor, piece: int) -> Tensor:
    """Return half of the rows' pieces, those without infilling tokens first."""
    pieces = rows.reshape(-1, piece)
    marked = torch.isin(pieces, torch.tensor(INFILL_IDS)).any(dim=1)
    return pieces[marked.argsort(stable=True)][: len(pieces) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=Path, required=True, help="folder of samples.py")
    parser.add_argument("--long-shards", type=Path, help="folder of longer rows for some steps")
    parser.add_argument("--long-every", type=int, default=6, help="interval of long steps")
    parser.add_argument("--state", type=Path, required=True, help="state file, made or continued")
    parser.add_argument(
        "--from",
        type=Path,
        dest="checkpoint",
        help="exported folder to start from while there is no state file",
    )
    parser.add_argument(
        "--steps", type=int, default=1_000_000, help="last step of the stable phase"
    )
    parser.add_argument(
        "--decay-steps", type=int, default=0, help="run the decay phase over this many steps"
    )
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens an optimizer step")
    parser.add_argument("--micro-tokens", type=int, default=8192, help="tokens a forward pass")
    parser.add_argument("--peak", type=float, default=1.0, help="factor on both learning rates")
    parser.add_argument("--matrix-lr", type=float, default=0.02, help="peak learning rate of Muon")
    parser.add_argument("--other-lr", type=float, default=0.003, help="peak learning rate of AdamW")
    parser.add_argument(
        "--piece",
        type=int,
        help="tokens of a piece: every third step reads rows in pieces that begin anywhere",
    )
    parser.add_argument(
        "--save-seconds", type=float, default=240.0, help="time between state files"
    )
    parser.add_argument("--threads", type=int, default=2, help="cores to use")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
