"""Whole small vision-language checkpoints: random weights, a tokenizer, an image processor."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.vision_checkpoints import VISION_MODELS
from tests.unit.tokenizer.images.checkpoints import KINDS, write_kind

__all__ = ["WHOLE", "Whole", "write_whole"]


@dataclass(frozen=True, slots=True)
class Whole:
    """Which tokenizer belongs to the model of the same name in VISION_MODELS."""

    kind: str
    """In KINDS"""
    image_token: str
    processor: dict[str, Any]
    """processor_config.json"""


_LLAVA = {
    "patch_size": 7,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}
_IDEFICS = {"image_seq_len": 4}

WHOLE = {
    "llava": Whole("llava", "<image>", _LLAVA),
    "llava, pixtral": Whole("llava, pixtral", "[IMG]", {"patch_size": 7}),
    "mistral3": Whole("mistral3", "[IMG]", {"patch_size": 7, "spatial_merge_size": 2}),
    "gemma3": Whole("gemma3", "<image_soft_token>", {"image_seq_length": 4}),
    "gemma3n": Whole("gemma3n", "<image_soft_token>", {"image_seq_length": 4}),
    "gemma4": Whole("gemma4", "<|image|>", {}),
    "gemma4, images see ahead": Whole("gemma4", "<|image|>", {}),
    "gemma4 unified": Whole("gemma4 unified", "<|image|>", {}),
    "idefics3": Whole("idefics3", "<image>", _IDEFICS),
    "smolvlm": Whole("smolvlm", "<image>", _IDEFICS),
    "exaone4.5": Whole("exaone4.5", "<|image_pad|>", {}),
    "glm4v": Whole("glm4v", "<|image|>", {}),
    "glm4v moe": Whole("glm4v moe", "<|image|>", {}),
    "glm4.6v flash": Whole("glm4.6v flash", "<|image|>", {}),
    "glm ocr": Whole("glm ocr", "<|image|>", {}),
    "qwen2 vl": Whole("qwen2_vl", "<|image_pad|>", {}),
    "qwen2.5 vl": Whole("qwen2_5_vl", "<|image_pad|>", {}),
    "qwen3 vl": Whole("qwen3_vl", "<|image_pad|>", {}),
    "qwen3 vl moe": Whole("qwen3_vl", "<|image_pad|>", {}),
}


def write_whole(directory: Path, name: str) -> Path:
    """Write the checkpoint of a model of VISION_MODELS; return its directory."""
    whole = WHOLE[name]
    write_kind(directory, KINDS[whole.kind])
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    config: Any = copy.deepcopy(VISION_MODELS[name].config)
    text = config.text_config
    text.vocab_size = tokenizer.get_vocab_size()
    text.max_position_embeddings = 2_048
    text.bos_token_id = tokenizer.token_to_id("<s>")
    text.eos_token_id = tokenizer.token_to_id("</s>")
    config.image_token_id = tokenizer.token_to_id(whole.image_token)
    if name == "gemma3":
        config.boi_token_index = tokenizer.token_to_id("<start_of_image>")
        config.eoi_token_index = tokenizer.token_to_id("<end_of_image>")
    if name == "gemma3n":
        text.vocab_size_per_layer_input = text.vocab_size
        config.vision_config.vocab_offset = tokenizer.token_to_id("<image_soft_token>")
        config.vision_config.vocab_size = text.vocab_size
        config.audio_config.vocab_offset = text.vocab_size
        config.boi_token_id = tokenizer.token_to_id("<start_of_image>")
        config.eoi_token_id = tokenizer.token_to_id("<end_of_image>")
    if name.startswith("gemma4"):
        if name != "gemma4 unified":
            text.vocab_size_per_layer_input = text.vocab_size
        config.boi_token_id = tokenizer.token_to_id("<|image>")
        config.eoi_token_id = tokenizer.token_to_id("<image|>")
    make_checkpoint(directory, config)
    VISION_MODELS[name].save_processor(directory)
    (directory / "processor_config.json").write_text(json.dumps(whole.processor))
    return directory
