"""Image encoder: the features of every architecture equal transformers' own."""

import io
import json
from dataclasses import replace
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
from tests.unit.tokenizer.images.checkpoints import KINDS, seeing
from tests.unit.tokenizer.images.processors import reference_ids
from tests.vision import WHOLE, write_whole

CPU = torch.device("cpu")
SIZES = [(40, 40), (70, 30), (30, 90), (28, 28), (40, 40)]
ODD_SIZES = [(1, 1), (3, 2), (8, 8), (9, 100), (101, 17), (257, 255), (55, 57)]


class Loaded:
    def __init__(self, name: str, directory: Path) -> None:
        self.processor = VISION_MODELS[name].processor
        self.directory = directory
        self.model: PreTrainedModel = make_vision_checkpoint(directory, name)
        self.encoder = ImageEncoder.load(directory, torch.float32, CPU)

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


@pytest.mark.parametrize("name", WHOLE)
def test_features_are_as_many_as_the_tokens_of_the_processor(name: str, tmp_path: Path) -> None:
    """A request with other numbers of both is refused."""
    whole = WHOLE[name]
    checkpoint = seeing(write_whole(tmp_path, name))
    images = json.loads((tmp_path / "preprocessor_config.json").read_text())
    kind = replace(KINDS[whole.kind], images=images, processor=whole.processor)
    encoder = ImageEncoder.load(tmp_path, torch.float32, CPU)
    files = [png(*size) for size in (*SIZES, *ODD_SIZES)]
    for file, result in zip(files, encoder.encode(files), strict=True):
        assert isinstance(result, ImageFeatures)
        ids = reference_ids(kind, checkpoint, kind.mark, [decode(file)])
        assert result.embeddings.shape[1] == ids.count(encoder.image_token_id)


def test_image_of_a_single_token_equals_that_of_transformers(tmp_path: Path) -> None:
    """transformers' Mistral 3 fails on it, unless another image follows."""
    loaded = Loaded("mistral3", tmp_path)
    file = png(10, 5)
    (result,) = loaded.encoder.encode([file])
    assert isinstance(result, ImageFeatures)
    picture = decode(file)
    both = features(loaded.model, loaded.processor, picture, picture)
    torch.testing.assert_close(result.embeddings, both[:, :1], atol=1e-5, rtol=1e-5)


def test_image_on_which_the_tower_fails_fails_alone(tmp_path: Path) -> None:
    """Settings without a resize let images through that CLIP's tower refuses."""
    make_vision_checkpoint(tmp_path, "llava")
    file = tmp_path / "preprocessor_config.json"
    settings = json.loads(file.read_text()) | {"do_resize": False, "do_center_crop": False}
    file.write_text(json.dumps(settings))
    encoder = ImageEncoder.load(tmp_path, torch.float32, CPU)
    results = encoder.encode([png(28, 28), png(40, 40, 1), png(40, 40, 2), png(28, 28)])
    assert [isinstance(each, ImageError) for each in results] == [False, True, True, False]
