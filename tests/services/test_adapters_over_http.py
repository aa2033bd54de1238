"""Adapters behind the whole path: shim, tokenizer service and two engines."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedModel

from tests.services.shim import running_shim
from tests.stack import RunningService, running_service
from tests.unit.engine.checkpoints.files import reference_logits
from tests.unit.engine.model.adapters.adapter_folders import make_adapter
from tokenwire.channel import connect
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub

HANG_SECONDS = 120
PROMPT = "def first(self, items):\n    for item in items:\n" * 6
TOKENS = 8


@dataclass(frozen=True)
class Replica:
    """Two engines, of which the first alone began with the adapter "one"."""

    url: str
    tokenizer_target: str
    engines: list[RunningService]
    folder: Path
    models: dict[str, PreTrainedModel]
    """The model "m", and it with each adapter merged"""
    tokenizer: Tokenizer

    def greedy(self, model: str) -> str:
        """Return the text that transformers generates."""
        ids = list(self.tokenizer.encode(PROMPT).ids)
        for _ in range(TOKENS):
            logits = reference_logits(self.models[model], torch.tensor(ids))
            ids.append(int(logits[-1].argmax()))
        return str(self.tokenizer.decode(ids[-TOKENS:]))

    async def change(self, engine: int, request: Any) -> None:
        """Load or unload an adapter at one engine."""
        async with connect(self.engines[engine].target) as channel:
            control = EngineControlServiceStub(channel)
            loads = isinstance(request, engine_pb2.LoadAdapterRequest)
            await (control.LoadAdapter(request) if loads else control.UnloadAdapter(request))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def replica(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Replica]:
    folder = tmp_path_factory.mktemp("adapters")
    base: PreTrainedModel = LlamaForCausalLM.from_pretrained(embedded_model, dtype=torch.float32)
    base.train(False)
    models = {"m": base}
    for seed, name in enumerate(("one", "two")):
        models[name] = make_adapter(base, folder / name, seed, rank=8, lora_alpha=32.0)
    template = folder / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    model = ("--model", str(embedded_model), "--model-id", "m")
    few = (*model, "--kv-memory", "64MiB", "--dtype", "float32")
    adapters = ("--adapters", f"one={folder / 'one'}")
    async with (
        running_service("engine", *few, *adapters, log=folder / "first.log") as first,
        running_service("engine", *few, log=folder / "second.log") as second,
        running_service(
            *("tokenizer", *model, "--engine", f"{first.target},{second.target}"),
            *("--chat-template", str(template)),
            log=folder / "tokenizer.log",
        ) as tokenizer,
        running_shim("--tokenizer", tokenizer.target) as shim,
    ):
        yield Replica(
            shim.url,
            tokenizer.target,
            [first, second],
            folder,
            models,
            Tokenizer.from_file(str(embedded_model / "tokenizer.json")),
        )


@pytest_asyncio.fixture(loop_scope="session")
async def http(replica: Replica) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=replica.url, timeout=HANG_SECONDS) as client:
        yield client


async def complete(http: httpx.AsyncClient, model: str, **fields: object) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    answer = await http.post("/v1/completions", json=body | {"ignore_eos": True} | fields)
    made: dict[str, Any] = answer.json()
    return made | {"status": answer.status_code}


async def names(http: httpx.AsyncClient) -> list[str]:
    return [card["id"] for card in (await http.get("/v1/models")).json()["data"]]


async def until_known(http: httpx.AsyncClient, name: str, *, known: bool = True) -> None:
    """Wait until the tokenizer service has heard of a change."""
    async with asyncio.timeout(HANG_SECONDS):
        while (name in await names(http)) is not known:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


async def test_adapter_is_listed_with_its_parent(http: httpx.AsyncClient) -> None:
    cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
    assert {name: card["parent"] for name, card in cards.items()} == {"m": None, "one": "m"}
    assert cards["one"]["max_model_len"] == cards["m"]["max_model_len"]
    assert (await http.get("/v1/models/one")).json() == cards["one"]


async def test_completions_and_chats_name_an_adapter_as_their_model(
    http: httpx.AsyncClient, replica: Replica
) -> None:
    """Requests go to the engine that has the adapter, however busy it is."""
    wanted = ["one", "m"] * 6
    answers = await asyncio.gather(*(complete(http, name) for name in wanted))
    assert [answer["model"] for answer in answers] == wanted
    texts = {name: replica.greedy(name) for name in ("one", "m")}
    assert texts["one"] != texts["m"]
    assert [answer["choices"][0]["text"] for answer in answers] == [texts[n] for n in wanted]
    message = {"role": "user", "content": "import"}
    chat = {"model": "one", "messages": [message], "max_tokens": 4}
    answer = await http.post("/v1/chat/completions", json=chat)
    assert (answer.status_code, answer.json()["model"]) == (200, "one")
    ids = await http.post("/tokenize", json={"model": "one", "prompt": "import"})
    assert ids.status_code == 200


async def test_cached_prefixes_are_those_of_the_adapter(http: httpx.AsyncClient) -> None:
    prompt = f"# of the adapter alone\n{PROMPT}"
    first, again, other = [
        (await complete(http, name, prompt=prompt))["usage"] for name in ("one", "one", "m")
    ]
    cached = [each["prompt_tokens_details"]["cached_tokens"] for each in (first, again, other)]
    assert cached[0] == cached[2] == 0
    assert cached[1] > first["prompt_tokens"] // 2


async def test_adapters_that_an_operator_loads_and_unloads_are_known_at_once(
    http: httpx.AsyncClient, replica: Replica
) -> None:
    assert (await complete(http, "two"))["status"] == 404
    for engine in (1, 0):
        path = str(replica.folder / "two")
        await replica.change(engine, engine_pb2.LoadAdapterRequest(name="two", path=path))
        await until_known(http, "two")
        assert (await complete(http, "two"))["choices"][0]["text"] == replica.greedy("two")
    for engine in (1, 0):
        await replica.change(engine, engine_pb2.UnloadAdapterRequest(name="two"))
    await until_known(http, "two", known=False)
    error = (await complete(http, "two"))["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_adapter_works_with_choices_scores_and_grammars_of_a_stream(
    http: httpx.AsyncClient,
) -> None:
    body = {
        "model": "one",
        "prompt": [PROMPT, "import"],
        "n": 2,
        "logprobs": 2,
        "echo": True,
        "seed": 5,
        "max_tokens": 5,
        "stream": True,
    }
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
    assert answer.status_code == 200
    assert all('"model":"one"' in line for line in lines)


CATALOG = """
[[models]]
id = "acme/m"
target = "{target}"

[[models]]
id = "one"
aliases = ["first"]
adapter_of = "acme/m"
max_output_length = 5

[[models]]
id = "two"
adapter_of = "acme/m"
"""


@pytest_asyncio.fixture(loop_scope="session")
async def catalog(replica: Replica, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a shim whose clients may load the adapters that its catalog lists."""
    path = tmp_path / "catalog.toml"
    path.write_text(CATALOG.format(target=replica.tokenizer_target))
    async with (
        running_shim("--catalog", str(path), "--adapter-routes") as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=HANG_SECONDS) as client,
    ):
        yield client


async def test_catalog_lists_adapters_with_limits_of_their_own(
    catalog: httpx.AsyncClient, replica: Replica
) -> None:
    cards = {card["id"]: card for card in (await catalog.get("/v1/models")).json()["data"]}
    assert {name: card["parent"] for name, card in cards.items()} == {
        "acme/m": None,
        "one": "acme/m",
        "two": "acme/m",
    }
    assert cards["one"]["max_output_length"] == 5
    answer = await complete(catalog, "first")
    assert (answer["model"], answer["usage"]["completion_tokens"]) == ("one", 5)
    assert replica.greedy("one").startswith(answer["choices"][0]["text"])
    assert (await complete(catalog, "default"))["model"] == "acme/m"


async def test_clients_load_and_unload_adapters_where_they_may(
    catalog: httpx.AsyncClient, http: httpx.AsyncClient, replica: Replica
) -> None:
    body = {"lora_name": "two", "lora_path": str(replica.folder / "two")}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        refused = await http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "adapter_routes_off")
    for _ in range(2):
        loaded = await catalog.post("/v1/load_lora_adapter", json=body)
        assert (loaded.status_code, "added successfully" in loaded.text) == (200, True)
    answers = await asyncio.gather(*(complete(catalog, "two") for _ in range(4)))
    assert {each["choices"][0]["text"] for each in answers} == {replica.greedy("two")}
    for engine in replica.engines:
        async with connect(engine.target) as channel:
            model = await EngineControlServiceStub(channel).GetModel(engine_pb2.GetModelRequest())
            assert "two" in {adapter.name for adapter in model.adapters}
    unloaded = await catalog.post("/v1/unload_lora_adapter", json={"lora_name": "two"})
    assert (unloaded.status_code, "removed successfully" in unloaded.text) == (200, True)
    assert (await complete(catalog, "two"))["status"] == 404


@pytest.mark.parametrize(
    ("route", "fields", "status", "param"),
    [
        ("load", {}, 400, "lora_name"),
        ("load", {"lora_name": "two"}, 400, "lora_path"),
        ("load", {"lora_name": "two", "lora_path": "/nowhere"}, 400, "lora_path"),
        ("load", {"lora_name": "two", "lora_path": 3}, 400, "lora_path"),
        ("load", {"lora_name": "acme/m", "lora_path": "/nowhere"}, 400, "lora_name"),
        ("load", {"lora_name": "three", "lora_path": "/nowhere"}, 404, "model"),
        ("unload", {"lora_name": "two"}, 404, "lora_name"),
        ("unload", {"lora_name": ""}, 400, "lora_name"),
    ],
)
async def test_wrong_change_of_adapters_names_the_field_at_fault(
    catalog: httpx.AsyncClient, route: str, fields: dict[str, object], status: int, param: str
) -> None:
    answer = await catalog.post(f"/v1/{route}_lora_adapter", json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
