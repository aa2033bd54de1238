"""Loading of vision towers: every published layout, and nothing but the tower."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from services.common.images import decode
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.vision.encoder import ImageEncoder, ImageFeatures
from services.engine.vision.tower import load_tower
from tests.unit.engine.vision_checkpoints import (
    VISION_MODELS,
    features,
    make_vision_checkpoint,
    png,
)

CPU = torch.device("cpu")
FILE = png(60, 40)
TOWERS = ("vision_tower.", "multi_modal_projector.", "visual.", "vision_model.", "connector.")


def old_clip(name: str) -> str:
    """LLaVA and Gemma 3 before transformers 5."""
    return name.replace("vision_tower.", "vision_tower.vision_model.")


def in_model(name: str) -> str:
    """Everything within `model`, as in the classes of today."""
    return name if name.startswith("model.") else f"model.{name}"


def beside_model(name: str) -> str:
    return name.removeprefix("model.")


def in_model_old_clip(name: str) -> str:
    return in_model(old_clip(name))


LAYOUTS: list[tuple[str, Callable[[str], str]]] = [
    ("llava", beside_model),
    ("llava", in_model),
    ("llava", old_clip),
    ("llava", in_model_old_clip),
    ("llava, pixtral", beside_model),
    ("llava, pixtral", in_model),
    ("mistral3", beside_model),
    ("mistral3", in_model),
    ("gemma3", beside_model),
    ("gemma3", in_model),
    ("gemma3", old_clip),
    ("gemma3", in_model_old_clip),
    ("idefics3", in_model),
    ("smolvlm", in_model),
    ("qwen2 vl", beside_model),
    ("qwen2 vl", in_model),
    ("qwen2.5 vl", beside_model),
    ("qwen2.5 vl", in_model),
    ("qwen3 vl", beside_model),
    ("qwen3 vl", in_model),
    ("qwen3 vl moe", in_model),
]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_every_published_layout_is_read(
    name: str, layout: Callable[[str], str], tmp_path: Path
) -> None:
    """Releases of transformers named the tensors differently."""
    model = make_vision_checkpoint(tmp_path, name)
    renamed = {layout(each): tensor for each, tensor in towers(tmp_path).items()}
    save_file(renamed, tmp_path / "model.safetensors")
    expected = features(model, VISION_MODELS[name].processor, decode(FILE))
    torch.testing.assert_close(encoded(tmp_path), expected, atol=1e-5, rtol=1e-5)


def test_tensors_of_the_decoder_are_not_read(tmp_path: Path) -> None:
    """They would take the memory of the model a second time."""
    make_vision_checkpoint(tmp_path, "llava")
    save_file(towers(tmp_path), tmp_path / "model.safetensors")
    tower = load_tower(tmp_path, torch.float32, CPU)
    names = {name for name, _ in tower.named_parameters()}
    assert names
    assert all(name.startswith(("vision_tower.", "multi_modal_projector.")) for name in names)


def test_no_tensor_stays_without_values(tmp_path: Path) -> None:
    for name in VISION_MODELS:
        make_vision_checkpoint(tmp_path / name, name)
        tower = load_tower(tmp_path / name, torch.bfloat16, CPU)
        assert all(parameter.dtype == torch.bfloat16 for parameter in tower.parameters())
        assert not any(each.is_meta for each in [*tower.parameters(), *tower.buffers()])


@pytest.mark.parametrize("name", VISION_MODELS)
def test_bfloat16_features_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    make_vision_checkpoint(tmp_path, name)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = features(model, VISION_MODELS[name].processor, decode(FILE))
    found = encoded(tmp_path, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_sharded_checkpoint_is_read(tmp_path: Path) -> None:
    model = make_vision_checkpoint(tmp_path, "qwen3 vl")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    places = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(tensors)}
    for part in set(places.values()):
        held = {name: tensor for name, tensor in tensors.items() if places[name] == part}
        save_file(held, tmp_path / part)
    index = {"weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = features(model, VISION_MODELS["qwen3 vl"].processor, decode(FILE))
    torch.testing.assert_close(encoded(tmp_path), expected, atol=1e-5, rtol=1e-5)


def test_stored_buffers_are_ignored(tmp_path: Path) -> None:
    """Old files hold position ids and RoPE frequencies, which follow from config.json."""
    make_vision_checkpoint(tmp_path, "llava")
    ids = {"vision_tower.vision_model.embeddings.position_ids": torch.zeros(1, 17)}
    change(tmp_path, lambda tensors: tensors | ids)
    load_tower(tmp_path, torch.float32, CPU)


def test_attention_of_config_json_need_not_be_installed(tmp_path: Path) -> None:
    make_vision_checkpoint(tmp_path, "smolvlm")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for section in (config, config["vision_config"], config["text_config"]):
        section["_attn_implementation"] = "flash_attention_2"
    file.write_text(json.dumps(config))
    assert encoded(tmp_path).shape[0] == 1


def without(ending: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {n: tensor for n, tensor in tensors.items() if not n.endswith(ending)}


def reshaped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"multi_modal_projector.linear_1.bias": torch.zeros(3)}


def with_fourth_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"vision_tower.encoder.layers.3.layer_norm1.bias": torch.zeros(32)}


def quantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    name = "multi_modal_projector.linear_1.weight"
    return tensors | {name: tensors[name].to(torch.int8)}


@pytest.mark.parametrize(
    ("change_tensors", "words"),
    [
        (without("linear_2.bias"), ["multi_modal_projector.linear_2.bias", "no file"]),
        (reshaped, ["multi_modal_projector.linear_1.bias", "[3]", "[64]"]),
        (with_fourth_layer, ["vision_tower.encoder.layers.3", "not part of the model"]),
        (quantized, ["multi_modal_projector.linear_1.weight", "I8"]),
    ],
    ids=["missing", "shape", "unexpected", "dtype"],
)
def test_wrong_tensor_is_named(
    change_tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    words: Iterable[str],
    tmp_path: Path,
) -> None:
    """The operator must learn which file does not fit, not read a traceback."""
    make_vision_checkpoint(tmp_path, "llava")
    change(tmp_path, change_tensors)
    refused(tmp_path, words)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_act": "foo"}, ["config.json", "foo"]),
        ({"hidden_size": "wide"}, ["config.json", "hidden_size"]),
        ({"num_attention_heads": 5}, ["config.json", "heads"]),
        ({"num_hidden_layers": 4}, ["layers.3"]),
    ],
)
def test_wrong_setting_is_named(
    settings: dict[str, Any], words: Iterable[str], tmp_path: Path
) -> None:
    make_vision_checkpoint(tmp_path, "llava")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["vision_config"] |= settings
    file.write_text(json.dumps(config))
    refused(tmp_path, words)


@pytest.mark.parametrize(
    ("section", "key", "value", "word"),
    [
        ("vision_config", "architecture", "resnet50", "mobilenetv5_300m_enc"),
        ("vision_config", "model_args", {"group_size": 4}, "group_size"),
        ("vision_config", "model_args", {"channel_multiplier": 2.0}, "channel_multiplier"),
        (None, "vision_soft_tokens_per_image", 5, "vision_soft_tokens_per_image"),
    ],
)
def test_unknown_tower_of_gemma3n_is_refused_by_name(
    section: str | None, key: str, value: Any, word: str, tmp_path: Path
) -> None:
    """The file names a model of timm, of which one is known."""
    make_vision_checkpoint(tmp_path, "gemma3n")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    (config if section is None else config[section])[key] = value
    file.write_text(json.dumps(config))
    refused(tmp_path, ["config.json", word])


def test_architecture_without_images_is_refused(tmp_path: Path) -> None:
    make_vision_checkpoint(tmp_path, "llava")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"architectures": ["PaliGemmaForConditionalGeneration"]}
    file.write_text(json.dumps(config))
    refused(tmp_path, ["PaliGemmaForConditionalGeneration", "not supported"])


def refused(directory: Path, words: Iterable[str]) -> None:
    with pytest.raises(CheckpointError) as error:
        load_tower(directory, torch.float32, CPU)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def encoded(directory: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    (result,) = ImageEncoder.load(directory, dtype, CPU).encode([FILE])
    assert isinstance(result, ImageFeatures)
    return result.embeddings


def towers(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of the tower and the projector."""
    tensors = load_file(directory / "model.safetensors")
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.removeprefix("model.").startswith(TOWERS)
    }


def change(
    directory: Path, change_tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    file = directory / "model.safetensors"
    save_file(change_tensors(load_file(file)), file)
