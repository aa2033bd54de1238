"""Tiny EAGLE-3 heads in the published format."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from services.engine.model.checkpoint.eagle_config import eagle_depths
from services.engine.model.checkpoint.tensors import Checkpoint
from services.engine.model.decoder import Decoder
from services.engine.model.eagle_head import EagleHead, load_eagle
from services.engine.model.loader import load_model

INNER, HEADS, KV_HEADS, DIM = 48, 4, 2, 8
DRAFTED = 24
"""Number of ids that a head drafts"""


def make_eagle(
    directory: Path,
    target: Path,
    *,
    seed: int = 7,
    repeats: bool = False,
    layer: str = "midlayer.",
    without: tuple[str, ...] = (),
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write a head for the tiny model in `target`.

    repeats: the head drafts the token whose hidden state it reads; False = its weights are random.
    without: names of tensors that the file lacks. more: further values of config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    vocabulary, hidden = embeddings.shape

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (0.0 if repeats else 0.3)

    drafted = torch.randperm(vocabulary, generator=generator)[:DRAFTED].sort().values
    known = torch.zeros(vocabulary, dtype=torch.bool)
    known[drafted] = True
    fusion = weight(hidden, 3 * hidden)
    if repeats:
        fusion[:, :hidden] = torch.eye(hidden)
    tensors = {
        "fc.weight": fusion,
        f"{layer}input_layernorm.weight": 1 + weight(hidden),
        f"{layer}hidden_norm.weight": 1 + weight(hidden),
        f"{layer}post_attention_layernorm.weight": 1 + weight(hidden),
        f"{layer}self_attn.q_proj.weight": weight(HEADS * DIM, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": weight(KV_HEADS * DIM, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": weight(KV_HEADS * DIM, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": weight(hidden, HEADS * DIM),
        f"{layer}mlp.gate_proj.weight": weight(INNER, hidden),
        f"{layer}mlp.up_proj.weight": weight(INNER, hidden),
        f"{layer}mlp.down_proj.weight": weight(hidden, INNER),
        "norm.weight": 1 + weight(hidden),
        "lm_head.weight": embeddings[drafted].clone() if repeats else weight(DRAFTED, hidden),
        "d2t": drafted - torch.arange(DRAFTED),
        "t2d": known,
    }
    directory.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor for name, tensor in tensors.items() if name not in without}
    save_file(kept, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "vocab_size": vocabulary,
        "draft_vocab_size": DRAFTED,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 0]},
        **(more or {}),
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_repeater(directory: Path, target: Path) -> Path:
    """Write a copy of the tiny model in `target` whose most likely next token is the newest one."""
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_bytes((target / "config.json").read_bytes())
    return directory


def load_tapped(model: Path, head: Path) -> Decoder:
    """Load a model that copies the hidden states for a head."""
    decoder = load_model(model, torch.float32)
    assert isinstance(decoder, Decoder)
    decoder.tap(eagle_depths(Checkpoint.config(head), decoder.spec.num_layers))
    return decoder


def load_with_head(model: Path, head: Path) -> tuple[Decoder, EagleHead]:
    """Load a model and a head of it."""
    decoder = load_tapped(model, head)
    return decoder, load_eagle(head, decoder, "model")
