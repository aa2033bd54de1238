"""Test of a checkpoint for images, without torch and transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.json_values import Json
from services.engine.frontend.image_client import ImageClient
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.settings import EngineSettings
from services.engine.vision.support import has_vision, image_token_id
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.vision_checkpoints import make_vision_checkpoint


def test_text_model_has_no_vision(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama"])
    assert not has_vision(tmp_path)


def test_checkpoint_without_a_tower_has_no_vision(tmp_path: Path) -> None:
    """Text-only releases keep the architecture's name."""
    make_vision_checkpoint(tmp_path, "gemma3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensors[name] for name in tensors if "language_model" in name}, file)
    assert not has_vision(tmp_path)


async def test_checkpoint_without_an_image_processor_has_no_vision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_vision_checkpoint(tmp_path, "llava")
    (tmp_path / "preprocessor_config.json").unlink()
    assert not has_vision(tmp_path)
    assert await ImageClient.start_for(EngineSettings(model=tmp_path), lambda _: None) is None
    assert "refused: the model has no preprocessor_config.json or processor_con" in caplog.text


def test_sharded_checkpoint_has_vision(tmp_path: Path) -> None:
    make_vision_checkpoint(tmp_path, "qwen2 vl")
    places = dict.fromkeys(load_file(tmp_path / "model.safetensors"), "part.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    index = {"weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert has_vision(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x07", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{]"])
def test_damaged_checkpoint_has_no_vision(content: bytes, tmp_path: Path) -> None:
    """The loop says what is wrong with it."""
    make_vision_checkpoint(tmp_path, "llava")
    (tmp_path / "model.safetensors").write_bytes(content)
    assert not has_vision(tmp_path)


def test_directory_without_a_checkpoint_has_no_vision(tmp_path: Path) -> None:
    assert not has_vision(tmp_path)


async def test_start_says_that_a_tower_is_not_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator learns at the start, and not from a client, that images are refused."""
    make_checkpoint(tmp_path, CONFIGS["llama4"])
    file = tmp_path / "config.json"
    architecture = {"architectures": ["Llama4ForConditionalGeneration"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | architecture))
    save_file({"vision_model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    assert await ImageClient.start_for(EngineSettings(model=tmp_path), lambda _: None) is None
    assert "the tower of Llama4ForConditionalGeneration is not supported" in caplog.text


@pytest.mark.parametrize("key", ["image_token_id", "image_token_index"])
def test_image_token_is_read_under_both_names(key: str) -> None:
    values: dict[str, Json] = {key: 32_000}
    assert image_token_id(Config("config.json", values)) == 32_000


def test_absent_image_token_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="image_token"):
        image_token_id(Config("config.json", {}))
