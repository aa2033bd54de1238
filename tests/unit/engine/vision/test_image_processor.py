"""Image processors of checkpoints: which settings are read, and which are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig

from services.common.images import decode
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.vision.image_processor import ImageProcessor
from tests.unit.engine.vision_checkpoints import (
    VISION_MODELS,
    inputs,
    make_vision_checkpoint,
    png,
)

PICTURE = decode(png(90, 50))


def load(directory: Path) -> ImageProcessor:
    return ImageProcessor.load(directory, AutoConfig.from_pretrained(directory))


def settings(directory: Path, **changes: Any) -> dict[str, Any]:
    """Change preprocessor_config.json, and return its content."""
    file = directory / "preprocessor_config.json"
    content: dict[str, Any] = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(content))
    return content


def expected(name: str) -> dict[str, Tensor]:
    return inputs(VISION_MODELS[name].processor, [PICTURE])


@pytest.mark.parametrize("name", VISION_MODELS)
def test_names_of_torchvision_processors_are_read(name: str, tmp_path: Path) -> None:
    """Most checkpoints name them, and torchvision is not needed."""
    make_vision_checkpoint(tmp_path, name)
    kind = settings(tmp_path)["image_processor_type"]
    settings(tmp_path, image_processor_type=f"{kind}Fast")
    pixels = load(tmp_path).pixels(PICTURE)
    assert torch.equal(pixels["pixel_values"], expected(name)["pixel_values"])


@pytest.mark.parametrize("name", VISION_MODELS)
def test_settings_within_those_of_the_processor_are_read(name: str, tmp_path: Path) -> None:
    """Since transformers 5, files are saved so."""
    make_vision_checkpoint(tmp_path, name)
    nested = {"image_processor": settings(tmp_path)}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    (tmp_path / "preprocessor_config.json").unlink()
    pixels = load(tmp_path).pixels(PICTURE)
    assert torch.equal(pixels["pixel_values"], expected(name)["pixel_values"])


def test_images_are_not_cropped_by_gemma_3(tmp_path: Path) -> None:
    """`Gemma3Processor` does it for callers that ask; the tokens of crops would be missing."""
    make_vision_checkpoint(tmp_path, "gemma3")
    settings(tmp_path, do_pan_and_scan=True, pan_and_scan_max_num_crops=4)
    pixels = load(tmp_path).pixels(Image.new("RGB", (900, 100)))
    assert pixels["pixel_values"].shape[0] == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_processor_type": "FooImageProcessor"}, "FooImageProcessor|image_processor_type"),
        ({"size": "large"}, "large"),
        ({"image_mean": [0.5]}, "mean must have 3 elements"),
        ({"rescale_factor": None}, "rescale_factor"),
    ],
)
def test_settings_that_do_not_work_are_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """At the start: later, every client would be told that its image is wrong."""
    make_vision_checkpoint(tmp_path, "llava")
    settings(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=words) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_code_in_a_checkpoint_is_not_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question on the terminal would stop the start for good."""
    make_vision_checkpoint(tmp_path, "llava")
    code = {"AutoImageProcessor": "processor.Processor"}
    settings(tmp_path, image_processor_type="FooImageProcessor", auto_map=code)
    with pytest.raises(CheckpointError, match="custom code"):
        load(tmp_path)
    assert "[y/N]" not in capsys.readouterr().out
