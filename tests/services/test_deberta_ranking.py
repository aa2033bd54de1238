"""Rankings by a cross-encoder of DeBERTa, such as mxbai-rerank, behind the whole path."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

from tests.services.shim import running_shim
from tests.stack import running_service
from tests.text_models import make_scorer

DOCUMENTS = ["a lock.", "the keys, the keys", "fruit", "what is a key?"]
QUERY = "What is a mutex?"


@pytest.mark.asyncio
async def test_scores_equal_those_of_sentence_transformers(tmp_path: Path) -> None:
    path = make_deberta(tmp_path / "scorer")
    expected = CrossEncoder(str(path), device="cpu").predict([(QUERY, each) for each in DOCUMENTS])
    model, flags = ("--model", str(path)), ("--dtype", "float32", "--device", "cpu")
    async with (
        running_service("engine", *model, *flags, log=tmp_path / "engine.log") as engine,
        running_service(
            "tokenizer", *model, "--engine", engine.target, log=tmp_path / "tokenizer.log"
        ) as tokenizer,
        running_shim("--tokenizer", tokenizer.target) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60) as client,
    ):
        ranking = await client.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS})
        scores = await client.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS})
    assert (ranking.status_code, scores.status_code) == (200, 200), ranking.text
    found = [each["score"] for each in scores.json()["data"]]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    results = ranking.json()["results"]
    assert [each["index"] for each in results] == np.argsort(-expected).tolist()


def make_deberta(path: Path) -> Path:
    """Make a cross-encoder of DeBERTa v3's shape, with the tokenizer of another one."""
    tokenizer = json.loads((make_scorer(path) / "tokenizer.json").read_text())
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer["model"]["vocab"]),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "position_buckets": 16,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "type_vocab_size": 0,
        "num_labels": 1,
    }
    DebertaV2ForSequenceClassification(DebertaV2Config(**shape)).save_pretrained(path)
    return path
