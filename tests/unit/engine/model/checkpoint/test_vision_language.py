"""Vision-language checkpoints: their decoders are read, however the file names the tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlavaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

from services.common.json_values import Json
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.loader import load_model
from services.engine.vision.support import has_vision, unserved_vision
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits

_ARCHITECTURES = {
    "gemma3, with images": "Gemma3ForConditionalGeneration",
    "qwen3 vl": "Qwen3VLForConditionalGeneration",
}
LLAVA = ("language_model.model.", "language_model.lm_head.")
TRANSFORMERS_5 = ("model.language_model.", "lm_head.")
LAYOUTS = [
    ("llava, llama", LLAVA),
    ("llava, llama", TRANSFORMERS_5),
    ("mistral3", LLAVA),
    ("mistral3", TRANSFORMERS_5),
    ("qwen2 vl", ("model.", "lm_head.")),
    ("qwen2 vl", TRANSFORMERS_5),
    ("qwen3 vl", TRANSFORMERS_5),
    ("qwen3.5 vl", TRANSFORMERS_5),
]


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_every_published_layout_is_read(
    family: str, layout: tuple[str, str], tmp_path: Path
) -> None:
    """Releases of transformers named the decoder's tensors differently."""
    model = make_checkpoint(tmp_path, CONFIGS[family])
    file = tmp_path / "model.safetensors"
    renamed = {_rename(name, layout): tensor for name, tensor in load_file(file).items()}
    save_file(renamed, file)
    assert any(name.startswith(layout[0] + "layers.") for name in renamed)
    tokens = random_tokens(20, 1)
    driver = Driver(load_model(tmp_path, torch.float32), [tokens])
    driver.step([(0, 20)])
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)


def test_experts_are_read_in_both_orders_of_their_dimensions(tmp_path: Path) -> None:
    """Published files stack [experts, inputs, outputs], those of transformers 5 the reverse."""
    model = make_checkpoint(tmp_path, CONFIGS["qwen3 vl moe"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].mT.contiguous()
    save_file(tensors, file)
    tokens = random_tokens(20, 1)
    driver = Driver(load_model(tmp_path, torch.float32), [tokens])
    driver.step([(0, 20)])
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)


def test_settings_of_the_decoder_are_read_beside_those_of_images(tmp_path: Path) -> None:
    """Qwen2-VL's published config.json has no text_config, and a RoPE of type mrope."""
    model = make_checkpoint(tmp_path, CONFIGS["qwen2 vl"])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    section = config.pop("text_config")
    rope = section.pop("rope_parameters")
    old = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**section, **config, "rope_theta": rope["rope_theta"], "rope_scaling": old}
    file.write_text(json.dumps(flat))
    tokens = random_tokens(20, 1)
    driver = Driver(load_model(tmp_path, torch.float32), [tokens])
    driver.step([(0, 20)])
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("decoder", [LlamaConfig, MistralConfig, Qwen2Config])
def test_absent_settings_of_the_decoder_are_those_of_transformers(
    decoder: type[PreTrainedConfig],
) -> None:
    """LLaVA-1.5's text_config names little more than its model_type."""
    values: dict[str, Json] = {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": decoder.model_type},
    }
    ours = ModelSpec.from_config(values)
    theirs: Any = LlavaConfig(text_config={"model_type": decoder.model_type}).text_config
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    attention = ours.attention(0)
    assert ours.layers[0].feed_forward.width == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert attention.num_heads == theirs.num_attention_heads
    assert attention.num_kv_heads == theirs.num_key_value_heads
    assert ours.context_length == theirs.max_position_embeddings
    assert ours.norm_epsilon == theirs.rms_norm_eps
    assert {layer.window for layer in ours.attention_layers.values()} == {
        getattr(theirs, "sliding_window", None) or 0
    }


def test_unknown_decoder_is_refused_by_name() -> None:
    values: dict[str, Json] = {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "mamba"},
    }
    with pytest.raises(CheckpointError, match="text_config's model_type mamba is not supported"):
        ModelSpec.from_config(values)


@pytest.mark.parametrize(
    ("family", "section", "key", "value"),
    [
        ("gemma3, with images", None, "mm_tokens_per_image", 10),
        ("qwen3 vl", "vision_config", "deepstack_visual_indexes", [0, 1, 2]),
    ],
)
def test_images_that_the_decoder_cannot_take_are_refused_at_start(
    family: str, section: str | None, key: str, value: Json
) -> None:
    """Gemma 3's images must lie in one window. Qwen3-VL adds no features behind the last layer."""
    config: Any = CONFIGS[family].to_dict() | {"architectures": [_ARCHITECTURES[family]]}
    ModelSpec.from_config(config)
    (config if section is None else config[section])[key] = value
    with pytest.raises(CheckpointError, match=key):
        ModelSpec.from_config(config)


def _rename(name: str, layout: tuple[str, str]) -> str:
    if "vis" in name or "projector" in name:
        return name
    if "lm_head." in name:
        return layout[1] + name.split("lm_head.")[1]
    decoder = name.replace("language_model.", "").replace("model.", "")
    return layout[0] + decoder


@pytest.mark.parametrize(
    ("family", "architecture", "prefix", "towers"),
    [
        (
            "gemma3n",
            "Gemma3nForConditionalGeneration",
            "model.language_model.",
            ("model.audio_tower", "model.embed_audio"),
        ),
        (
            "gemma4, shared keys",
            "Gemma4ForConditionalGeneration",
            "model.language_model.",
            ("model.audio_tower", "model.embed_audio"),
        ),
        (
            "cohere2 moe",
            "Cohere2VisionForConditionalGeneration",
            "language_model.model.",
            ("vision_tower", "multi_modal_projector"),
        ),
        (
            "deepseek v3",
            "KimiK25ForConditionalGeneration",
            "language_model.model.",
            ("vision_tower", "mm_projector"),
        ),
        (
            "llama4",
            "Llama4ForConditionalGeneration",
            "language_model.model.",
            ("vision_model", "multi_modal_projector"),
        ),
    ],
    ids=["Gemma 3n", "Gemma 4", "Command A+", "Kimi K2.5", "Llama 4"],
)
def test_text_is_served_from_a_file_with_other_tensors(
    family: str, architecture: str, prefix: str, towers: tuple[str, ...], tmp_path: Path
) -> None:
    """Published files hold towers that are not served, and keys that no layer reads.

    These are the keys of Gemma's layers that read those of earlier ones.
    """
    model = make_checkpoint(tmp_path, CONFIGS[family])
    tensors = {
        name.replace("model.", prefix, 1).replace("lm_head", "language_model.lm_head"): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    for tower in towers:
        tensors[f"{tower}.some.weight"] = torch.zeros(3)
    if "gemma" in family:
        layer = f"{prefix}layers.{CONFIGS[family].num_hidden_layers - 1}.self_attn"
        for name in ("k_proj", "v_proj", "k_norm"):
            assert tensors.setdefault(f"{layer}.{name}.weight", torch.zeros(3)).shape == (3,)
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": [architecture], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert not has_vision(tmp_path)
    has_only_sounds = "gemma" in family
    assert unserved_vision(tmp_path) == (None if has_only_sounds else architecture)
    tokens = random_tokens(20, 1)
    driver = Driver(load_model(tmp_path, torch.float32), [tokens])
    driver.step([(0, 20)])
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("text", "see_ahead"),
    [
        ({}, True),
        ({"use_bidirectional_attention": "vision"}, True),
        ({"use_bidirectional_attention": None}, False),
    ],
)
def test_images_of_gemma4_unified_see_ahead_unless_the_file_denies_it(
    text: dict[str, Json], see_ahead: bool
) -> None:
    """Files may lack the key, whose default in transformers is not that of Gemma 4."""
    values: dict[str, Any] = CONFIGS["gemma4 unified"].to_dict()
    del values["use_bidirectional_attention"]
    whole: dict[str, Json] = {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "text_config": values | text,
    }
    assert ModelSpec.from_config(whole).images_see_ahead == see_ahead


def test_table_that_lacks_marks_of_images_is_refused() -> None:
    """A mark without a row would have the embedding of another one."""
    config: Any = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "text_config": CONFIGS["gemma3n"].to_dict(),
        "vision_config": {"vocab_offset": 90, "vocab_size": 5},
        "audio_config": {"vocab_offset": 95, "vocab_size": 2},
    }
    ModelSpec.from_config(config)
    config["vision_config"]["vocab_size"] = 4
    with pytest.raises(CheckpointError, match="vision_config's vocab_size must be at least 5"):
        ModelSpec.from_config(config)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("activation_sparsity_pattern", [0.5], "each of the 5 layers"),
        ("activation_sparsity_pattern", [1.0] * 5, "from 0 to below 1"),
        ("altup_active_idx", 4, r"altup_active_idx \(4\)"),
        ("altup_num_inputs", 1, "altup_num_inputs must be at least 2"),
        ("num_kv_shared_layers", 6, "num_kv_shared_layers exceeds"),
        ("num_kv_shared_layers", 4, "layer 1 shares the keys"),
        ("intermediate_size", [96], "intermediate_size"),
    ],
)
def test_contradictory_settings_of_gemma3n_are_refused_by_name(
    key: str, value: Json, complaint: str
) -> None:
    config: Any = CONFIGS["gemma3n"].to_dict() | {"architectures": ["Gemma3nForCausalLM"]}
    ModelSpec.from_config(config)
    with pytest.raises(CheckpointError, match=complaint):
        ModelSpec.from_config(config | {key: value})
