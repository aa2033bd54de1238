"""Vision towers in mmproj files: images beside a GGUF model equal those of its checkpoint."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from services.common.model_files.checkpoint import opened_checkpoint
from services.engine.engine import Engine
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.settings import EngineSettings
from services.engine.vision.encoder import ImageEncoder, ImageFeatures
from services.engine.vision.support import has_vision
from tests.unit.engine.mmproj_checkpoints import PAIRS, tower_of, write_mmproj, write_pair
from tests.unit.engine.vision.test_logits import (
    NONE,
    ONE,
    THREE,
    Models,
    compare,
    compare_output,
    generate,
)

CPU = torch.device("cpu")


class PairModels(Models):
    """A pair of GGUF files as our engine runs it, and the model that it was made of."""

    def __init__(self, name: str, directory: Path, kind: str = "F32") -> None:
        self.processor = PAIRS[name].model.processor
        self.theirs = write_pair(directory, name, GGMLQuantizationType[kind])
        with opened_checkpoint(directory / "model.gguf", "") as checkpoint:
            assert has_vision(checkpoint)
            self._encoder = ImageEncoder.load(checkpoint, torch.float32, CPU)
        settings = EngineSettings(dtype="float32", device="cpu", kv_memory="16MiB")
        self.engine = Engine(directory / "model.gguf", settings)


@pytest.fixture(scope="module", params=PAIRS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PairModels:
    return PairModels(request.param, tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("files", [NONE, ONE, THREE], ids=["none", "one", "three"])
def test_log_probabilities_equal_those_of_transformers(
    models: PairModels, files: list[bytes]
) -> None:
    ids, images = models.prompt(files)
    answer = generate(models.engine, ids, images)
    compare(answer.prompt_scores, models.expected(ids, files)[:-1])
    compare_output(models, ids, answer, files)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_towers_of_other_types_are_read(kind: str, tmp_path: Path) -> None:
    models = PairModels("gemma3", tmp_path, kind)
    ids, images = models.prompt(ONE)
    compare(generate(models.engine, ids, images).prompt_scores, models.expected(ids, ONE)[:-1])


def test_file_whose_layers_have_exchanged_names_is_read(tmp_path: Path) -> None:
    """llama.cpp's converters called a layer's first product ffn_down until 2025."""
    whole = write_pair(tmp_path, "gemma3")
    with opened_checkpoint(tmp_path, "") as checkpoint:
        (expected,) = ImageEncoder.load(checkpoint, torch.float32, CPU).encode(ONE)
    tower = {
        re.sub(r"mlp\.fc(\d)", lambda match: f"mlp.fc{3 - int(match[1])}", name): tensor
        for name, tensor in tower_of(whole).items()
    }
    write_mmproj(tmp_path / "mmproj-model.gguf", PAIRS["gemma3"], tower)
    with opened_checkpoint(tmp_path, "") as checkpoint:
        (found,) = ImageEncoder.load(checkpoint, torch.float32, CPU).encode(ONE)
    assert isinstance(expected, ImageFeatures)
    assert isinstance(found, ImageFeatures)
    torch.testing.assert_close(found.embeddings, expected.embeddings)


@pytest.mark.parametrize("change", ["lacks", "has another"])
def test_tower_with_other_tensors_is_refused_by_name(change: str, tmp_path: Path) -> None:
    whole = write_pair(tmp_path, "qwen2 vl")
    tower = tower_of(whole)
    if change == "lacks":
        del tower["visual.blocks.1.norm1.weight"]
        wanted = "is damaged: it lacks visual.blocks.1.norm1.weight"
    else:
        tower["v.surprise.weight"] = torch.ones(3)
        wanted = "the tensor v.surprise.weight is not part"
    write_mmproj(tmp_path / "mmproj-model.gguf", PAIRS["qwen2 vl"], tower)
    with opened_checkpoint(tmp_path, "") as checkpoint, pytest.raises(CheckpointError) as raised:
        ImageEncoder.load(checkpoint, torch.float32, CPU)
    assert f"{tmp_path}/mmproj-model.gguf" in str(raised.value)
    assert wanted in str(raised.value)


def test_parts_of_a_tensor_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    tower = tower_of(write_pair(tmp_path, "qwen2 vl"))
    whole = tower.pop("visual.patch_embed.proj.weight")
    tower["v.patch_embd.weight"] = whole[:, :, 0]
    tower["v.patch_embd.weight.1"] = whole[:, :, 1, 1:]
    write_mmproj(tmp_path / "mmproj-model.gguf", PAIRS["qwen2 vl"], tower)
    with opened_checkpoint(tmp_path, "") as checkpoint, pytest.raises(CheckpointError) as raised:
        ImageEncoder.load(checkpoint, torch.float32, CPU)
    assert f"{tmp_path}/mmproj-model.gguf is damaged: the parts of" in str(raised.value)


def test_tensor_of_an_unread_type_is_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    """The directory of links is gone when the user reads the message."""
    tower = tower_of(write_pair(tmp_path, "gemma3"))
    del tower["vision_tower.post_layernorm.bias"]

    def write_doubles(writer: GGUFWriter) -> None:
        writer.add_tensor("v.post_ln.bias", np.zeros(32, np.float64))

    write_mmproj(tmp_path / "mmproj-model.gguf", PAIRS["gemma3"], tower, further=write_doubles)
    with opened_checkpoint(tmp_path, "") as checkpoint, pytest.raises(CheckpointError) as raised:
        ImageEncoder.load(checkpoint, torch.float32, CPU)
    assert str(raised.value).startswith(f"{tmp_path}/mmproj-model.gguf: the tensor v.post_ln.bias")
