"""Weight fingerprint: clients that pin system_fingerprint notice changed weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.model.checkpoint.fingerprint import weights_fingerprint
from tests.unit.engine.tiny import make_checkpoint


def test_copies_agree_and_new_weights_differ(tmp_path: Path) -> None:
    first, second = make_checkpoint(tmp_path / "a"), make_checkpoint(tmp_path / "b")
    assert weights_fingerprint(first) == weights_fingerprint(second)
    tensors = load_file(second / "model.safetensors")
    save_file(
        {k: v + torch.full_like(v, 1e-3) for k, v in tensors.items()}, second / "model.safetensors"
    )
    assert weights_fingerprint(first) != weights_fingerprint(second)


def test_rounded_states_make_another_model(tmp_path: Path) -> None:
    """An engine with --state-dtype bfloat16 can't go on with a stream of one without it."""
    path = make_checkpoint(tmp_path)
    assert weights_fingerprint(path, states="bfloat16") != weights_fingerprint(path)


def test_rounded_keys_make_another_model(tmp_path: Path) -> None:
    """An engine with --kv-dtype int8 can't go on with a stream of one with 16 bits."""
    path = make_checkpoint(tmp_path)
    assert weights_fingerprint(path, keys="int8") != weights_fingerprint(path)
    assert weights_fingerprint(path, keys="float16") == weights_fingerprint(path)


@pytest.mark.parametrize("name", ["sparse_linear.pt", "adapters/separation/adapter_config.json"])
def test_further_weights_make_another_model(name: str, tmp_path: Path) -> None:
    """Engines of which one alone has the heads of BGE-M3 would not answer alike."""
    path = make_checkpoint(tmp_path)
    before = weights_fingerprint(path)
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(b"weights")
    assert weights_fingerprint(path) != before
