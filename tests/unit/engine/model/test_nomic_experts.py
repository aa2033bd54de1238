"""Nomic's encoder with experts against the mathematics of its published code."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import JinaEmbeddingsV3Config

from services.engine.engine import Engine
from services.engine.model.checkpoint.config import CheckpointError
from tests.unit.engine.model.test_encoders import (
    ENCODER,
    hidden_states,
    save_model,
    settings,
    texts,
)

EXPERTS = 4
WIDTH, INNER = 64, 96
CONFIG: dict[str, Any] = {
    "activation_function": "gelu",
    "architectures": ["NomicBertModel"],
    "expert_choice_router": False,
    "layer_norm_epsilon": 1e-5,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "model_type": "nomic_bert",
    "moe_every_n_layers": 2,
    "moe_normalize_expert_weights": False,
    "moe_top_k": 2,
    "n_embd": WIDTH,
    "n_head": 2,
    "n_inner": INNER,
    "n_layer": 4,
    "n_positions": 128,
    "num_experts": EXPERTS,
    "num_shared_experts": 0,
    "pad_token_id": 1,
    "qkv_proj_bias": True,
    "rotary_emb_base": 10000.0,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "type_vocab_size": 1,
    "vocab_size": 97,
}


class PublishedExperts(nn.Module):
    """Experts in the layout and the order of operations of nomic-bert-2048."""

    def __init__(self, normalizes: bool) -> None:
        super().__init__()
        self.normalizes = normalizes
        self.router = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.w1 = nn.Parameter(0.2 * torch.randn(EXPERTS * INNER, WIDTH))
        self.w2 = nn.Parameter(0.2 * torch.randn(EXPERTS * INNER, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        flat = rows.view(-1, WIDTH)
        weights, chosen = (flat @ self.router.T).softmax(dim=-1).topk(2, dim=-1)
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        first, second = (each.view(EXPERTS, INNER, WIDTH) for each in (self.w1, self.w2))
        out = torch.zeros_like(flat)
        for row, (factors, numbers) in enumerate(zip(weights, chosen, strict=True)):
            for factor, number in zip(factors, numbers.tolist(), strict=True):
                out[row] += factor * (gelu(flat[row] @ first[number].T) @ second[number])
        return (out + self.bias).view(rows.shape)


def save(path: Path, **changes: Any) -> Any:
    """Save a random model as nomic's code names it. Return one of the same numbers.

    Jina v3's dense layers are Nomic's.
    """
    shape = ENCODER | {"num_hidden_layers": CONFIG["n_layer"], "pad_token_id": 1}
    rope = {"rope_type": "default", "rope_theta": CONFIG["rotary_emb_base"]}
    model = save_model(path, JinaEmbeddingsV3Config(**shape, rope_parameters=rope))
    tensors = {
        name.replace(".mixer.", ".attn."): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    for layer in (1, 3):
        experts = PublishedExperts(changes.get("moe_normalize_expert_weights", False))
        model.layers[layer].mlp = experts
        prefix = f"encoder.layers.{layer}.mlp."
        tensors = {name: each for name, each in tensors.items() if not name.startswith(prefix)}
        tensors[f"{prefix}router.layer.weight"] = experts.router.detach()
        tensors[f"{prefix}experts.mlp.w1"] = experts.w1.detach()
        tensors[f"{prefix}experts.mlp.w2"] = experts.w2.detach()
        tensors[f"{prefix}experts.bias"] = experts.bias.detach()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("normalizes", [False, True])
def test_vectors_equal_those_of_the_published_code(
    normalizes: bool, dtype: str, tmp_path: Path
) -> None:
    model = save(tmp_path, moe_normalize_expert_weights=normalizes)
    with Engine(tmp_path, settings(dtype=dtype)) as engine:
        vectors = engine.embed(texts())
    expected = torch.stack([hidden_states(model, ids).mean(dim=0) for ids in texts()])
    if dtype == "float32":
        torch.testing.assert_close(vectors, expected, atol=1e-4, rtol=1e-4)
    assert torch.cosine_similarity(vectors, expected, dim=1).min() > 0.98


@pytest.mark.parametrize("key", ["expert_choice_router", "num_shared_experts"])
def test_other_experts_are_refused_by_name(key: str, tmp_path: Path) -> None:
    save(tmp_path, **{key: 1})
    with pytest.raises(CheckpointError, match=f"{key} is set"):
        Engine(tmp_path, settings())
