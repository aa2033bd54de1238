"""Adapters of tasks inside a checkpoint (Jina v3 and v5), behind the whole path."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from torch.nn.functional import normalize

from tests.services.text_stack import running_text_stack
from tests.text_models import JINA_TASKS, RANK, make_jina_v3, make_jina_v5, make_jina_v5_nano

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXTS = ["What is a mutex?", "a lock.", "the keys, the keys"]
INSTRUCTION = "what is the key "


@dataclass(frozen=True)
class Served:
    client: httpx.AsyncClient
    path: Path
    model: Any
    """transformers' model without adapters"""


@asynccontextmanager
async def serving(folder: Path, make: Callable[[Path], Any]) -> AsyncIterator[Served]:
    path = folder / "model"
    model = make(path)
    async with running_text_stack(path) as stack:
        yield Served(stack.client, path, model)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("tasks"), make_jina_v3) as served:
        yield served


async def embedded(served: Served, **body: Any) -> npt.NDArray[np.float32]:
    response = await served.client.post("/v1/embeddings", json={"input": TEXTS, **body})
    assert response.status_code == 200, response.text
    return np.array([each["embedding"] for each in response.json()["data"]], dtype=np.float32)


async def expected(served: Served, task: str | None, before: str = "") -> npt.NDArray[np.float32]:
    """Return the vectors of transformers' model with a task's adapter in its weights."""
    base = {name: tensor.clone() for name, tensor in served.model.state_dict().items()}
    merged = _merged(served, base, task)
    served.model.load_state_dict(merged)
    vectors = []
    try:
        for text in TEXTS:
            encoded = await served.client.post("/tokenize", json={"prompt": before + text})
            with torch.no_grad():
                states = served.model(torch.tensor([encoded.json()["tokens"]])).last_hidden_state[0]
            vectors.append(states.mean(dim=0))
    finally:
        served.model.load_state_dict(base)
    return torch.stack(vectors).numpy()


def _merged(
    served: Served, base: dict[str, torch.Tensor], task: str | None
) -> dict[str, torch.Tensor]:
    if task is None:
        return base
    number, stored = JINA_TASKS.index(task), load_file(served.path / "model.safetensors")
    changes = {}
    for name, down in stored.items():
        if name.endswith(".0.lora_A"):
            up = stored[name.removesuffix("A") + "B"][number]
            pair = (down[number], up) if "embeddings." in name else (up, down[number])
            layer = name.removeprefix("roberta.").partition(".parametrizations")[0]
            changes[layer] = pair[0] @ pair[1] * 3 / RANK
    merged = dict(base)
    for layer, change in changes.items():
        if layer.endswith("mixer.Wqkv"):
            prefix = layer.replace("encoder.layers", "layers").removesuffix("mixer.Wqkv")
            for part, rows in zip("qkv", change.chunk(3), strict=True):
                merged[f"{prefix}self_attn.{part}_proj.weight"] = (
                    base[f"{prefix}self_attn.{part}_proj.weight"] + rows
                )
            continue
        own = layer.replace("encoder.layers", "layers").replace(
            "mixer.out_proj", "self_attn.o_proj"
        )
        merged[f"{own}.weight"] = base[f"{own}.weight"] + change
    return merged


@pytest.mark.parametrize("task", JINA_TASKS)
async def test_task_has_its_adapter_and_instruction(served: Served, task: str) -> None:
    before = INSTRUCTION if task == "retrieval.query" else ""
    wanted = await expected(served, task, before)
    np.testing.assert_allclose(await embedded(served, task=task), wanted, atol=1e-4, rtol=1e-4)
    by_model = await embedded(served, model=task)
    np.testing.assert_allclose(by_model, wanted, atol=1e-4, rtol=1e-4)


async def test_model_alone_has_no_adapter(served: Served) -> None:
    wanted = await expected(served, None)
    np.testing.assert_allclose(await embedded(served), wanted, atol=1e-5, rtol=1e-4)


async def test_requests_of_several_tasks_run_beside_one_another(served: Served) -> None:
    alone = [await embedded(served, task=task) for task in JINA_TASKS]
    together = await asyncio.gather(*(embedded(served, task=task) for task in JINA_TASKS * 3))
    for one, other in zip(alone * 3, together, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


async def test_unknown_task_is_answered_with_all_known_ones(served: Served) -> None:
    body = {"input": "a", "task": "clustering"}
    response = await served.client.post("/v1/embeddings", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "task")
    assert all(task in error["message"] for task in JINA_TASKS)


async def test_task_beside_another_adapter_is_refused(served: Served) -> None:
    """Else the answer names one task, and has the vectors of the other."""
    body = {"input": "a", "model": "separation", "task": "retrieval.query"}
    response = await served.client.post("/v1/embeddings", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "task")
    assert (await embedded(served, model="separation", task="separation")).shape[0] == len(TEXTS)


@pytest.mark.parametrize("make", [make_jina_v5, make_jina_v5_nano])
async def test_adapters_may_lie_in_directories_of_the_checkpoint(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    """As those of Jina v5, whose vectors are the last token's, of length 1."""
    async with serving(tmp_path, make) as served:
        ids = [
            (await served.client.post("/tokenize", json={"prompt": text})).json()["tokens"]
            for text in TEXTS
        ]
        for task in (*JINA_TASKS, None):
            found = await embedded(served, **({} if task is None else {"task": task}))
            np.testing.assert_allclose(found, _vectors_of(served, task, ids), atol=1e-5, rtol=1e-4)


def _vectors_of(served: Served, task: str | None, ids: list[list[int]]) -> npt.NDArray[np.float32]:
    base = {name: tensor.clone() for name, tensor in served.model.state_dict().items()}
    merged = dict(base)
    if task is not None:
        stored = load_file(served.path / "adapters" / task / "adapter_model.safetensors")
        for name, down in stored.items():
            if ".lora_A." in name:
                layer = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
                up = stored[name.replace(".lora_A.", ".lora_B.")]
                merged[layer] = base[layer] + up @ down * 3 / RANK
    served.model.load_state_dict(merged)
    with torch.no_grad():
        states = [served.model(torch.tensor([each])).last_hidden_state[0, -1] for each in ids]
    served.model.load_state_dict(base)
    vectors: npt.NDArray[np.float32] = normalize(torch.stack(states), dim=1).numpy()
    return vectors
