"""GGUF files of GLM-4V, whose queries and keys llama.cpp reorders for multimodal RoPE."""

from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from torch import Tensor
from transformers import Glm4Config, Glm4ForCausalLM

from services.common.model_files.checkpoint import opened_checkpoint
from services.engine.model.loader import load_model
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits
from tests.unit.engine.gguf_checkpoints import write_gguf

TOKENS = 40


def with_apart_pairs(rows: Tensor, head_dim: int, rotated: int) -> Tensor:
    """Return rows of heads in which the two of a RoPE pair lie half of the rotated part apart."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    parts = heads[:, :rotated:2], heads[:, 1:rotated:2], heads[:, rotated:]
    return torch.cat(parts, dim=1).reshape(rows.shape)


@pytest.mark.parametrize("family", ["glm4v", "glm ocr"])
def test_text_of_a_file_has_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    whole = make_checkpoint(tmp_path, CONFIGS[family])
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

    def add_sections(writer: GGUFWriter) -> None:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])

    write_gguf(tmp_path / "model.gguf", stored, further=add_sections)
    with opened_checkpoint(tmp_path / "model.gguf") as directory:
        decoder = load_model(directory, torch.float32)
    tokens = random_tokens(TOKENS, 1)
    driver = Driver(decoder, [tokens])
    driver.step([(0, TOKENS)])
    expected = reference_logits(whole, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)
