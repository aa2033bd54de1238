"""Scores and vectors of published weights, beside those of transformers in float32."""

from collections.abc import Callable

import httpx
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM

from tests.real.checkpoints import GEMMA, MINILM, SMOLLM, Package, obtain
from tests.stack import Stack

TEXT = (
    "The capital of France is Paris. Water boils at one hundred degrees. A mutex is a lock that "
    "one thread holds at a time: the others wait until it is released. In 1969 two people walked "
    "on the Moon, and a third one stayed in orbit around it."
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", [SMOLLM, GEMMA], ids=lambda package: package.name)
def test_scores_equal_those_of_exact_weights(
    serve: Callable[[Package], Stack], package: Package
) -> None:
    """Wrong dequantization, rotation or norms make answers of a real model worse, or nonsense."""
    stack = serve(package)
    body = {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 0, "return_token_ids": True}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    ids, scores = answer["prompt_token_ids"], answer["logprobs"]["token_logprobs"]
    checkpoint = obtain(package)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint.parent, gguf_file=checkpoint.name, dtype=torch.float32
    )
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    exact = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    difference = (torch.tensor(scores[1:]) - exact).abs()
    assert difference.mean() < 0.12  # inputs of products are rounded to 8 bits
    assert difference.max() < 1


@pytest.mark.timeout(600)
def test_vectors_equal_those_of_sentence_transformers(serve: Callable[[Package], Stack]) -> None:
    stack = serve(MINILM)
    texts = [TEXT, "lock", "A lock that one thread holds"]
    answer = httpx.post(f"{stack.url}/v1/embeddings", json={"input": texts}, timeout=60).json()
    vectors = torch.tensor([each["embedding"] for each in answer["data"]])
    exact = SentenceTransformer(str(obtain(MINILM)), device="cpu").encode(texts)
    assert (vectors - torch.from_numpy(exact)).abs().max() < 1e-4
