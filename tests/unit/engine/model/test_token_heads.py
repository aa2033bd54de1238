"""Heads of BGE-M3 that are not read are refused before the model loads."""

from collections.abc import Callable
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from transformers import XLMRobertaConfig

from services.engine.engine import Engine
from services.engine.model.checkpoint.config import CheckpointError
from tests.unit.engine.model.test_encoders import ENCODER, save_model, settings

HEADS = {"colbert_linear.pt": (24, 64), "sparse_linear.pt": (1, 64)}


class Code:
    """A pickle that would run a function when it is read."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return print, ("run",)


def layer(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": weight, "bias": torch.ones(1).expand(len(weight))}


def save(path: Path, **changes: object) -> None:
    save_model(path, XLMRobertaConfig(**ENCODER | {"pad_token_id": 1}))
    for name, (outputs, inputs) in HEADS.items():
        stored: object = torch.nn.Linear(inputs, outputs).state_dict()
        torch.save(changes.get(name.partition("_")[0], stored), path / name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse": Code()}, "sparse_linear.pt can't be read"),
        ({"sparse": [1, 2]}, "sparse_linear.pt must hold a weight and a bias alone"),
        (
            {"sparse": torch.nn.Linear(64, 2).state_dict()},
            "a token has 2 weights, and must have one",
        ),
        ({"colbert": torch.nn.Linear(32, 8).state_dict()}, r"have the shapes \[8, 32\] and \[8\]"),
        ({"colbert": layer(torch.ones(0, 64))}, r"have the shapes \[0, 64\] and \[0\]"),
        ({"colbert": layer(torch.ones(1, 64).half().expand(10**9, 64))}, "must be dense tensors"),
        ({"colbert": layer(torch.ones(8, 64).to_sparse())}, "must be dense tensors"),
        ({"colbert": layer(torch.ones(8, 64, dtype=torch.complex64))}, "must be dense tensors"),
    ],
)
def test_other_files_are_refused_by_name(
    changes: dict[str, object],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        Engine(tmp_path, settings())
    assert "run" not in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1", b"PK\x05\x06" + bytes(18)]
)
def test_damaged_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    """As one of Git LFS, whose first letters are codes of a pickle."""
    save(tmp_path)
    (tmp_path / "sparse_linear.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"sparse_linear\.pt can't be read: ."):
        Engine(tmp_path, settings())


def test_compressed_file_is_refused(tmp_path: Path) -> None:
    """It may take a thousand times its own size."""
    save(tmp_path)
    file = tmp_path / "sparse_linear.pt"
    with ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with ZipFile(file, "w", ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
        archive.writestr("archive/zeros", bytes(1_000_000))
    with pytest.raises(CheckpointError, match=r"sparse_linear\.pt is compressed"):
        Engine(tmp_path, settings())


def test_one_head_alone_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "sparse_linear.pt").unlink()
    with pytest.raises(CheckpointError, match="but not both heads of BGE-M3"):
        Engine(tmp_path, settings())
