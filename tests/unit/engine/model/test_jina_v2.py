"""Jina v2's checkpoints, against BERT of transformers with the same changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import AutoModel, BertConfig, BertModel

from services.engine.engine import Engine
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.loader import load_spec
from tests.unit.engine.model.test_encoders import ENCODER, _change, settings, texts

SLOPES = {2: [2**-4, 2**-8], 3: [2**-4, 2**-8, 2**-2]}
"""Factors of ALiBi by the number of heads"""
FIRST_PRODUCT = "intermediate.gated_layers.weight"


class _Gated(nn.Module):
    """The first product of the feed-forward layer, with its gate."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gated_layers = nn.Linear(width, 2 * inner, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = self.gated_layers(rows).chunk(2, dim=-1)
        gated: Tensor = gelu(gate) * up
        return gated


def jina_v2(heads: int, shape: dict[str, Any]) -> BertModel:
    """Return BERT without positions, and with a gate in its feed-forward layers."""
    torch.manual_seed(0)
    changes = {"num_attention_heads": heads, "hidden_size": 32 * heads}
    config = BertConfig(**shape | changes | {"attn_implementation": "eager"})
    auto: Any = AutoModel
    model: BertModel = auto.from_config(config).eval()
    for layer in model.encoder.layer:
        layer.intermediate = _Gated(config.hidden_size, config.intermediate_size)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    nn.init.zeros_(model.embeddings.position_embeddings.weight)
    return model


def tensors_of(model: BertModel) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint holds, by BERT's names."""
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if "position" not in name and not name.startswith("pooler.")
    }


def means(model: BertModel, ids_of_texts: list[list[int]]) -> Tensor:
    """Return the means of the last states, [texts, hidden_size]; attention has ALiBi."""
    slopes = torch.tensor(SLOPES[model.config.num_attention_heads])[:, None, None]
    vectors = []
    for ids in ids_of_texts:
        index = torch.arange(len(ids))
        mask = -slopes * (index[:, None] - index).abs()
        with torch.no_grad():
            states = model(torch.tensor([ids]), attention_mask=mask[None]).last_hidden_state[0]
        vectors.append(states.mean(dim=0))
    return torch.stack(vectors)


def save(path: Path, model: BertModel, root: str = "", **changes: Any) -> None:
    """Save a checkpoint by the names of Jina's own code."""
    names = {
        FIRST_PRODUCT: "mlp.gated_layers.weight",
        ".attention.output.": ".attention.output.",  # before its own end
        ".output.dense.": ".mlp.wo.",
        ".output.LayerNorm.": ".mlp.layernorm.",
    }
    tensors = {}
    for name, tensor in tensors_of(model).items():
        old = next((part for part in names if part in name), "")
        tensors[root + (name.replace(old, names[old]) if old else name)] = tensor.contiguous()
    save_file(tensors, path / "model.safetensors")
    model.config.save_pretrained(path)
    described = {
        "architectures": ["JinaBertForMaskedLM" if root else "JinaBertModel"],
        "feed_forward_type": "geglu",
        "position_embedding_type": "alibi",
    }
    _change("config.json", **described | changes)(path)


@pytest.mark.parametrize("root", ["", "bert."])
@pytest.mark.parametrize("heads", SLOPES)
def test_vectors_equal_those_of_the_changed_bert(heads: int, root: str, tmp_path: Path) -> None:
    model = jina_v2(heads, ENCODER)
    save(tmp_path, model, root)
    with Engine(tmp_path, settings()) as engine:
        vectors = torch.as_tensor(engine.embed(texts()))
    torch.testing.assert_close(vectors, means(model, texts()), atol=1e-4, rtol=1e-4)


def test_other_feed_forward_layers_are_refused(tmp_path: Path) -> None:
    """A "reglu" has the tensors of a "geglu", so a wrong activation would load unnoticed."""
    save(tmp_path, jina_v2(2, ENCODER), feed_forward_type="reglu")
    with pytest.raises(CheckpointError, match="feed_forward_type must be geglu, got reglu"):
        load_spec(tmp_path)
