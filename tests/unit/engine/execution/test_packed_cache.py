"""Packed weights that later starts read from a file in place of packing them."""

import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaConfig

from services.common.settings import StartupError
from services.engine.kernels.library import InstructionSet, native
from services.engine.model.checkpoint import fingerprint
from services.engine.settings import EngineSettings
from services.engine.start_check import check_start
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.checkpoints.shapes import SHAPE
from tests.unit.engine.execution.packed_logits import RANKS, logits, logits_of_ranks
from tests.unit.engine.gguf_checkpoints import write_gguf

WIDE = LlamaConfig(**SHAPE | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128})
K = GGMLQuantizationType

if native is None or native.instruction_set() < InstructionSet.AVX2:
    pytest.skip("the kernels were not built", allow_module_level=True)

needs_tiles = pytest.mark.skipif(
    native.instruction_set() < InstructionSet.AVX512_BF16, reason="weights in bfloat16 stay plain"
)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    directory.mkdir()
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "checkpoint", WIDE), K.Q4_0)
    return tmp_path / "model.gguf"


def assert_cached(
    path: Path, cache: Path, dtype: torch.dtype = torch.float32, weights: str = "full"
) -> None:
    """Check that a first start writes the file, and a second computes the same from it."""
    expected, _ = logits(path, None, dtype, weights)
    for is_second in (False, True):
        computed, was_read = logits(path, cache, dtype, weights)
        assert was_read == is_second
        assert torch.equal(computed, expected)


@pytest.mark.parametrize("kind", [K.Q4_0, K.Q4_K, K.Q8_0], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_are_read_as_they_were_packed(
    tmp_path: Path, cache: Path, dtype: torch.dtype, kind: K
) -> None:
    write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "checkpoint", WIDE), kind)
    assert_cached(tmp_path / "model.gguf", cache, dtype)
    [file] = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


@needs_tiles
@pytest.mark.parametrize("weights", ["full", "int8"])
def test_tiles_are_read_as_they_were_packed(tmp_path: Path, cache: Path, weights: str) -> None:
    make_checkpoint(tmp_path / "model", WIDE)
    assert_cached(tmp_path / "model", cache, torch.bfloat16, weights)


def test_each_rank_has_a_file(tmp_path: Path, model: Path, cache: Path) -> None:
    computed = [logits_of_ranks(model, cache, tmp_path / f"logits{start}") for start in range(2)]
    assert [was_read for _, was_read in computed] == [False, True]
    assert torch.equal(computed[0][0], computed[1][0])
    assert len(list(cache.iterdir())) == RANKS


def test_changed_file_is_not_served_from_the_cache(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if its size, its date and every sampled byte are the same."""
    monkeypatch.setattr(fingerprint, "_SAMPLES", 1)
    logits(model, cache)
    before = model.stat()
    content = bytearray(model.read_bytes())
    content[len(content) // 2 + 5000] ^= 0xFF
    model.write_bytes(content)
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert_cached(model, cache)
    assert len(list(cache.iterdir())) == 1


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip_first_weight(file: Path) -> None:
    _flip(file, 4096 + 100)


def flip_index(file: Path) -> None:
    _flip(file, file.stat().st_size - 50)


def _flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def replace_by_other_bytes(file: Path) -> None:
    file.write_bytes(b"something else")


def replace_by_link(file: Path) -> None:
    elsewhere = file.parent.parent / "elsewhere"
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "damage",
    [truncate, flip_first_weight, flip_index, replace_by_other_bytes, replace_by_link],
)
def test_damaged_file_is_made_anew(
    model: Path, cache: Path, damage: Callable[[Path], None]
) -> None:
    expected, _ = logits(model, cache)
    [file] = cache.iterdir()
    damage(file)
    starts = [logits(model, cache) for _ in range(3)]
    assert all(torch.equal(computed, expected) for computed, _ in starts)
    assert [was_read for _, was_read in starts][::2] == [False, True]


def test_second_writer_leaves_the_file_to_the_first(model: Path, cache: Path) -> None:
    expected, _ = logits(model, cache)
    [file] = cache.iterdir()
    file.rename(file.with_name(f"{file.name}.new"))
    with file.with_name(f"{file.name}.new").open("r+b") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        size = os.fstat(first.fileno()).st_size
        computed, was_read = logits(model, cache)
        assert not was_read
        assert torch.equal(computed, expected)
        assert os.fstat(first.fileno()).st_size == size
        assert not file.exists()
    assert_cached(model, cache)


def test_full_disk_is_a_warning(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(cache)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with caplog.at_level(logging.WARNING, "loop"):
        logits(model, cache)
    assert "1,000 are free" in caplog.text
    assert not list(cache.iterdir())


def settings(model: Path, cache: Path, weights: str = "full") -> EngineSettings:
    return EngineSettings(model=model, packed_cache=str(cache), weights=weights)


def test_missing_directory_is_refused_before_loading(model: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="is not a directory"):
        check_start(settings(model, tmp_path / "missing"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_directory_that_can_only_be_read_is_refused(model: Path, cache: Path) -> None:
    cache.chmod(0o500)
    with pytest.raises(StartupError, match="not writable"):
        check_start(settings(model, cache))


def test_mapped_weights_are_refused(model: Path, cache: Path) -> None:
    with pytest.raises(StartupError, match="nothing is packed"):
        settings(model, cache, weights="mapped")
