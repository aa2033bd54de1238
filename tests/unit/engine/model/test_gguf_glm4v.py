"""GGUF files of GLM-4V, whose queries and keys llama.cpp reorders for multimodal RoPE."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from torch import Tensor
from transformers import Glm4Config, Glm4ForCausalLM, PreTrainedModel

from services.common.model_files.checkpoint import opened_checkpoint
from services.engine.model.loader import load_model
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits
from tests.unit.engine.gguf_checkpoints import write_gguf
from tests.unit.engine.model.test_mtp_head import (
    FOLLOWING,
    LENGTH,
    computed_logits,
    expected_logits,
    random_ids,
)
from tests.unit.engine.mtp import make_mtp

TOKENS = 40


def with_apart_pairs(rows: Tensor, head_dim: int, rotated: int) -> Tensor:
    """Return rows of heads in which the two of a RoPE pair lie half of the rotated part apart."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    parts = heads[:, :rotated:2], heads[:, 1:rotated:2], heads[:, rotated:]
    return torch.cat(parts, dim=1).reshape(rows.shape)


def write_text(
    path: Path, whole: PreTrainedModel, further: Callable[[GGUFWriter], None] = lambda _: None
) -> None:
    """Write the text part of a model. further: writes more."""
    text = whole.config.text_config
    rope = text.rope_parameters
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    state = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in whole.state_dict().items()
        if "visual" not in name
    }
    for name, tensor in state.items():
        if any(f".{part}_proj." in name for part in "qk"):
            rotated = int(head_dim * rope["partial_rotary_factor"])
            state[name] = with_apart_pairs(tensor, head_dim, rotated)
    shape = {key: value for key, value in text.to_dict().items() if key != "model_type"}
    has_bias = "model.layers.0.self_attn.q_proj.bias" in state
    config = Glm4Config(**shape | {"head_dim": head_dim, "attention_bias": has_bias})
    stored = Glm4ForCausalLM(config)
    stored.load_state_dict(state)

    def write_more(writer: GGUFWriter) -> None:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
        further(writer)

    write_gguf(path, stored, further=write_more)


@pytest.mark.parametrize("family", ["glm4v", "glm ocr"])
def test_text_of_a_file_has_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    whole = make_checkpoint(tmp_path, CONFIGS[family])
    write_text(tmp_path / "model.gguf", whole)
    with opened_checkpoint(tmp_path / "model.gguf") as directory:
        decoder = load_model(directory, torch.float32)
    tokens = random_tokens(TOKENS, 1)
    driver = Driver(decoder, [tokens])
    driver.step([(0, TOKENS)])
    expected = reference_logits(whole, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)


def test_mtp_layer_of_a_file_computes_the_published_formulas(tmp_path: Path) -> None:
    parts = make_mtp(tmp_path, "glm ocr")
    number = parts.whole.config.text_config.num_hidden_layers - 1
    names = ("eh_proj", "enorm", "hnorm", "shared_head_norm")

    def add_inputs(writer: GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)
        for name, tensor in zip(names, parts.layers[0], strict=True):
            writer.add_tensor(f"blk.{number}.nextn.{name}.weight", tensor.numpy())

    write_text(tmp_path / "model.gguf", parts.whole, add_inputs)
    ids = random_ids(parts, LENGTH + FOLLOWING)
    with opened_checkpoint(tmp_path / "model.gguf") as directory:
        logits = computed_logits(directory, ids)
    torch.testing.assert_close(logits, expected_logits(parts, ids), atol=1e-4, rtol=1e-4)
