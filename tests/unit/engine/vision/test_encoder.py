"""Image encoder: the features of every architecture equal transformers' own."""

import io
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from services.common.images import ImageError, decode
from services.engine.vision.encoder import ImageEncoder, ImageFeatures
from services.engine.vision.support import has_vision
from tests.unit.engine.vision_checkpoints import (
    IMAGE_TOKEN,
    VISION_MODELS,
    features,
    make_vision_checkpoint,
    png,
)

SIZES = [(40, 40), (70, 30), (30, 90), (28, 28), (40, 40)]


class Loaded:
    def __init__(self, name: str, directory: Path) -> None:
        self.processor = VISION_MODELS[name].processor
        self.directory = directory
        self.model: PreTrainedModel = make_vision_checkpoint(directory, name)
        self.encoder = ImageEncoder.load(directory, torch.float32, torch.device("cpu"))

    def expected(self, file: bytes) -> Tensor:
        return features(self.model, self.processor, decode(file))


@pytest.fixture(scope="module", params=VISION_MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(request.param, tmp_path_factory.mktemp("checkpoint"))


def test_features_equal_those_of_transformers(loaded: Loaded) -> None:
    """Images of several sizes, one by one and together."""
    files = [png(width, height, seed) for seed, (width, height) in enumerate(SIZES)]
    together = loaded.encoder.encode(files)
    for file, batched in zip(files, together, strict=True):
        (alone,) = loaded.encoder.encode([file])
        assert isinstance(alone, ImageFeatures)
        assert isinstance(batched, ImageFeatures)
        expected = loaded.expected(file)
        torch.testing.assert_close(alone.embeddings, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(batched.embeddings, expected, atol=1e-5, rtol=1e-5)
        if alone.grid is not None:
            assert alone.grid[0] * alone.grid[1] == expected.shape[1]


def test_checkpoint_is_known_to_have_vision(loaded: Loaded) -> None:
    assert has_vision(loaded.directory)
    assert loaded.encoder.image_token_id == IMAGE_TOKEN


def test_broken_image_fails_alone(loaded: Loaded) -> None:
    """The other images of a batch belong to other clients."""
    good = png(40, 40)
    results = loaded.encoder.encode([good, good[:200], b"no image", good])
    assert [isinstance(each, ImageError) for each in results] == [False, True, True, False]


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "LA", "1", "CMYK", "I;16"])
def test_every_color_mode_is_read(loaded: Loaded, mode: str) -> None:
    file = io.BytesIO()
    Image.new("L", (40, 40), 100).convert(mode).save(file, "JPEG" if mode == "CMYK" else "PNG")
    (result,) = loaded.encoder.encode([file.getvalue()])
    assert isinstance(result, ImageFeatures)
