"""Encoders and heads that llama.cpp has besides BERT, in GGUF files, against transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGUFWriter, PoolingType
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    EuroBertConfig,
    Gemma3TextConfig,
    JinaEmbeddingsV3Config,
    ModernBertConfig,
    PreTrainedConfig,
    Qwen3Config,
    XLMRobertaConfig,
)

from services.common.model_files.checkpoint import opened_checkpoint
from services.engine.engine import Engine
from tests.unit.engine.gguf_checkpoints import write_gguf
from tests.unit.engine.model.test_encoders import hidden_states, save_model
from tests.unit.engine.model.test_gguf_encoders import SHAPE, settings, write_file
from tests.unit.engine.model.test_jina_v2 import FIRST_PRODUCT, jina_v2, tensors_of
from tests.unit.engine.model.test_jina_v2 import means as jina_v2_means
from tests.unit.engine.model.test_nomic_experts import save as save_nomic_experts

IDS = [[2, 7, 8, 9, 3], [5], [*range(4, 60)]]
Write = Callable[[GGUFWriter], None]


def embedded(folder: Path, **arguments: Any) -> Tensor:
    """Return the vectors that the engine makes of the file in a folder."""
    with (
        opened_checkpoint(folder / "model.gguf") as directory,
        Engine(directory, settings()) as engine,
    ):
        return torch.as_tensor(engine.embed(IDS, **arguments))


def means(model: Any) -> Tensor:
    """Return the vectors of transformers' model."""
    return normalize(torch.stack([hidden_states(model, ids).mean(dim=0) for ids in IDS]), dim=1)


def write_model(
    folder: Path,
    architecture: MODEL_ARCH,
    config: PreTrainedConfig,
    further: Write,
    kind: Any = AutoModel,
) -> Any:
    model = save_model(folder / "checkpoint", config, kind)
    tensors = {
        name.removeprefix("model.").removeprefix("roberta."): tensor
        for name, tensor in load_file(folder / "checkpoint/model.safetensors").items()
    }
    write_file(folder, architecture, config, tensors, further)
    return model


def pooled(writer: GGUFWriter) -> None:
    writer.add_causal_attention(False)
    writer.add_pooling_type(PoolingType.MEAN)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_modern_bert(activation: str, tmp_path: Path) -> None:
    """Its layers differ in windows and rotations, which files name under keys of their own."""
    config: Any = ModernBertConfig(
        **SHAPE | {"num_hidden_layers": 4}, local_attention=8, hidden_activation=activation
    )

    def further(writer: GGUFWriter) -> None:
        pooled(writer)
        writer.add_sliding_window(8)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
        writer.add_string("modern-bert.hidden_activation", activation)

    model = write_model(tmp_path, MODEL_ARCH.MODERN_BERT, config, further)
    torch.testing.assert_close(embedded(tmp_path), means(model), atol=1e-5, rtol=1e-5)


def test_jina_v3(tmp_path: Path) -> None:
    model = write_model(tmp_path, MODEL_ARCH.JINA_BERT_V3, JinaEmbeddingsV3Config(**SHAPE), pooled)
    torch.testing.assert_close(embedded(tmp_path), means(model), atol=1e-5, rtol=1e-5)


def test_nomic_experts(tmp_path: Path) -> None:
    """Converters drop the bias of the experts' sum, which is zero in published files."""
    (tmp_path / "checkpoint").mkdir()
    model = save_nomic_experts(tmp_path / "checkpoint")
    values = json.loads((tmp_path / "checkpoint/config.json").read_text())
    experts = values["num_experts"]
    tensors = {}
    for name, tensor in load_file(tmp_path / "checkpoint/model.safetensors").items():
        stack = tensor.view(experts, -1, tensor.shape[-1]) if ".experts.mlp." in name else tensor
        if name.endswith(".w2"):
            stack = stack.transpose(1, 2)
        if not name.endswith(".experts.bias"):
            tensors[f"{name}.weight" if ".experts.mlp." in name else name] = stack
    for layer in (1, 3):
        nn.init.zeros_(model.layers[layer].mlp.bias)

    def further(writer: GGUFWriter) -> None:
        pooled(writer)
        writer.add_moe_every_n_layers(values["moe_every_n_layers"])
        writer.add_expert_count(experts)
        writer.add_expert_used_count(values["moe_top_k"])

    write_file(tmp_path, MODEL_ARCH.NOMIC_BERT_MOE, model.config, tensors, further)
    torch.testing.assert_close(embedded(tmp_path), means(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("fuses", [True, False])
def test_jina_v2(fuses: bool, heads: int, tmp_path: Path) -> None:
    """BERT with ALiBi in place of positions, and with a gate, which older files store apart."""
    model = jina_v2(heads, SHAPE)
    tensors = {}
    for name, tensor in tensors_of(model).items():
        layer = name.removesuffix(FIRST_PRODUCT)
        if layer == name:
            tensors[name] = tensor
        elif fuses:
            tensors[f"{layer}mlp.up_gated_layer.weight"] = tensor
        else:
            gate, up = tensor.chunk(2)
            tensors |= {
                f"{layer}mlp.gated_layers_w.weight": gate,
                f"{layer}mlp.gated_layers_v.weight": up,
            }
    write_file(tmp_path, MODEL_ARCH.JINA_BERT_V2, model.config, tensors, pooled)
    expected = normalize(jina_v2_means(model, IDS), dim=1)
    torch.testing.assert_close(embedded(tmp_path), expected, atol=1e-5, rtol=1e-5)


def test_embedding_gemma_with_its_linear_layers(tmp_path: Path) -> None:
    shape = SHAPE | {"num_hidden_layers": 6, "head_dim": 32, "num_key_value_heads": 1}
    config = Gemma3TextConfig(
        **shape, sliding_window=14, query_pre_attn_scalar=32, use_bidirectional_attention=True
    )
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config).eval()
    dense = [torch.randn(96, 64), torch.randn(64, 96)]

    def further(writer: GGUFWriter) -> None:
        pooled(writer)
        writer.add_sliding_window(14)
        for number, weight in enumerate(dense, 2):
            writer.add_tensor(f"dense_{number}.weight", weight.numpy())

    write_gguf(
        tmp_path / "model.gguf", model, architecture=MODEL_ARCH.GEMMA_EMBEDDING, further=further
    )
    vectors = torch.stack([hidden_states(model.model, ids).mean(dim=0) for ids in IDS])
    expected = normalize(vectors @ dense[0].T @ dense[1].T, dim=1)
    torch.testing.assert_close(embedded(tmp_path), expected, atol=1e-5, rtol=1e-5)


def test_eurobert(tmp_path: Path) -> None:
    torch.manual_seed(0)
    auto: Any = AutoModel
    config = EuroBertConfig(**SHAPE | {"num_key_value_heads": 1})
    model = auto.from_config(config).eval()
    write_gguf(tmp_path / "model.gguf", model, architecture=MODEL_ARCH.EUROBERT, further=pooled)
    torch.testing.assert_close(embedded(tmp_path), means(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("labels", [["LABEL_0"], ["low", "middle", "high"]])
@pytest.mark.parametrize("family", ["xlm roberta", "modernbert"])
def test_head_scores_texts(family: str, labels: list[str], tmp_path: Path) -> None:
    names = dict(enumerate(labels))
    if family == "modernbert":
        config: Any = ModernBertConfig(**SHAPE, classifier_pooling="mean", id2label=names)
    else:
        config = XLMRobertaConfig(**SHAPE | {"type_vocab_size": 1, "id2label": names})
    model = save_model(tmp_path / "checkpoint", config, AutoModelForSequenceClassification)
    tensors = {
        name.removeprefix("model.").removeprefix("roberta."): tensor
        for name, tensor in load_file(tmp_path / "checkpoint/model.safetensors").items()
    }
    if family == "modernbert":  # as the converter calls it
        for suffix in ("weight", "bias"):
            tensors[f"classifier.out_proj.{suffix}"] = tensors.pop(f"classifier.{suffix}")
    else:  # whose positions begin behind the one of padding
        positions = "embeddings.position_embeddings.weight"
        tensors[positions] = tensors[positions][1:]
        config.max_position_embeddings -= 1

    def further(writer: GGUFWriter) -> None:
        writer.add_causal_attention(False)
        writer.add_classifier_output_labels(labels)
        if family == "modernbert":
            rope = config.rope_parameters
            writer.add_sliding_window(config.local_attention)
            writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
            writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])

    kinds = {"modernbert": MODEL_ARCH.MODERN_BERT, "xlm roberta": MODEL_ARCH.BERT}
    write_file(tmp_path, kinds[family], config, tensors, further)
    scores = embedded(tmp_path)
    with torch.no_grad():
        logits = torch.cat([model(input_ids=torch.tensor([ids])).logits for ids in IDS])
    expected = logits.sigmoid() if len(labels) == 1 else logits.softmax(dim=1)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_reranker_that_answers_yes_or_no_has_one_score(tmp_path: Path) -> None:
    """Qwen3-Reranker's head are the rows of both words in the output projection."""
    config = Qwen3Config(**SHAPE | {"num_key_value_heads": 1, "head_dim": 32})
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config).eval()
    words = [11, 12]
    rows = model.lm_head.weight.detach()[words]

    def further(writer: GGUFWriter) -> None:
        writer.add_pooling_type(PoolingType.RANK)
        writer.add_classifier_output_labels(["yes", "no"])
        writer.add_tensor("cls.output.weight", np.ascontiguousarray(rows.numpy()))

    write_gguf(tmp_path / "model.gguf", model, further=further)
    with torch.no_grad():
        logits = torch.stack([model(torch.tensor([ids])).logits[0, -1, words] for ids in IDS])
    scores, raw = embedded(tmp_path), embedded(tmp_path, is_raw=True)
    torch.testing.assert_close(scores, logits.softmax(dim=1)[:, :1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(raw, logits[:, :1] - logits[:, 1:], atol=1e-5, rtol=1e-5)
