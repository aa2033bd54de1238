"""Heads of BGE-M3 that are not read are refused before the model loads."""

from collections.abc import Callable
from pathlib import Path

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


def test_one_head_alone_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "sparse_linear.pt").unlink()
    with pytest.raises(CheckpointError, match="but not both heads of BGE-M3"):
        Engine(tmp_path, settings())
