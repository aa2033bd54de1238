"""Passes of draft heads are recorded once, then replayed by one call, as the model's passes are."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.engine.model.draft_head import DraftHead
from services.engine.model.eagle_head import load_eagle
from services.engine.model.layered_head import LayeredHead
from services.engine.model.operators.recording import Recording
from tests.unit.engine.checkpoints.driver import Driver, keep_last
from tests.unit.engine.eagle import load_tapped, make_eagle
from tests.unit.engine.mtp import load_mtp_pair, make_tiny_mtp
from tests.unit.engine.tiny import make_checkpoint

PASSES: Sequence[tuple[Sequence[tuple[int, int]], Sequence[int] | None]] = (
    ([(0, 20), (1, 7)], (1, 1)),
    ([(0, 1), (1, 1)], None),
    ([(1, 1), (0, 4)], (1, 1)),
    ([(0, 1), (1, 70)], (1, 2)),  # needs larger buffers
    ([(0, 1), (1, 1)], None),
    ([(1, 1)], None),
    ([(0, 30), (1, 3)], (1, 1)),
)
"""Chunks of sequences, and the rows that each keeps; as in `Driver.step`"""


def make_eagle_head(directory: Path) -> DraftHead:
    target = make_checkpoint(directory / "model")
    path = make_eagle(directory / "head", target)
    return load_eagle(path, load_tapped(target, path), "model").model


def make_mtp_head(directory: Path) -> DraftHead:
    return load_mtp_pair(make_tiny_mtp(directory, 1)).head


def make_layered_head(directory: Path) -> DraftHead:
    return load_mtp_pair(make_tiny_mtp(directory, 3)).head


@pytest.mark.parametrize("make", [make_eagle_head, make_mtp_head, make_layered_head])
def test_replayed_passes_equal_single_kernels(
    make: Callable[[Path], DraftHead], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else drafts would take a quarter more time, or be of another pass."""
    head = make(tmp_path)
    runs = 0
    run_layers = head._run_layers

    def counted(*args: Any) -> None:
        nonlocal runs
        runs += 1
        run_layers(*args)

    monkeypatch.setattr(head, "_run_layers", counted)
    replayed = run_all(head)
    assert runs == 2 * head.draft_layers  # the first pass, and that with larger buffers
    single = run_all(head, records_anew=True)
    assert runs == (2 + len(PASSES)) * head.draft_layers
    for ours, theirs in zip(replayed, single, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def run_all(head: DraftHead, *, records_anew: bool = False) -> list[Tensor]:
    """Return the hidden states of all passes. records_anew: run each pass kernel by kernel."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(head.spec.vocab_size, (120,), generator=generator) for _ in range(2)]
    driver, found = Driver(head, ids), []
    for number, (chunks, kept) in enumerate(PASSES):
        batch = driver.batch(chunks)
        if kept is not None:
            batch = replace(batch, output_rows=keep_last(batch.query_lengths_host, kept))
        if records_anew:
            for recording in recordings_of(head):
                recording.discard()
        states = torch.randn(len(batch.token_ids), head.states_width, generator=generator)
        if isinstance(head, LayeredHead):
            for layer in range(head.draft_layers):
                hidden, states = head.run_layer(layer, batch, driver.cache, states)
                found.append(hidden.clone())
        else:
            is_own = number % 2 == 1 and head.own_width == head.states_width
            found.append(head.run(batch, driver.cache, states, is_own=is_own).clone())
        driver.advance(chunks)
    return found


def recordings_of(head: DraftHead) -> Sequence[Recording]:
    found = head._recordings if isinstance(head, LayeredHead) else [head._recording]
    return [recording for recording in found if recording is not None]
