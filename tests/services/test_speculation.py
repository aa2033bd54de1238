"""Draft tokens save steps and never change the output."""

import json
from collections.abc import Iterable
from pathlib import Path

import grpc
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.stack import metrics_of, running_service
from tests.unit.engine.model.adapters.adapter_folders import make_adapter
from tokenwire.channel import connect
from tokenwire.pb.engine.v1.engine_pb2 import GenerateRequest, SequenceFinished
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineServiceStub
from tokenwire.pb.types.v1.types_pb2 import (
    DRAFT_SOURCE_DRAFT_MODEL,
    DRAFT_SOURCE_PREDICTION,
    GrammarSpec,
    SamplingParams,
    StoppingParams,
    TokenIds,
)

RECORD = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "green"]}, "price": {"type": "integer"}},
    "required": ["kind", "price"],
    "additionalProperties": False,
}
GRAMMARS = (
    GrammarSpec(json_schema=json.dumps({"type": "array", "items": RECORD, "minItems": 30})),
    GrammarSpec(regex="([a-z]{4}=[0-9]{2};){30}"),
)


def request(grammar: GrammarSpec, temperature: float) -> GenerateRequest:
    return GenerateRequest(
        prompts=[TokenIds(ids=[40, 41, 42])],
        n=1 if temperature == 0 else 2,
        sampling=SamplingParams(temperature=temperature, seed=5),
        stopping=StoppingParams(max_tokens=240),
        grammar=grammar,
    )


async def run(
    model: Path, requests: Iterable[GenerateRequest], log: Path, *options: str
) -> tuple[list[object], float]:
    """Run requests one after the other; return their outputs and the number of steps."""
    arguments = ("--model", str(model), "--dtype", "float32", "--kv-memory", "128MiB")
    outputs: list[object] = []
    async with (
        running_service("engine", *arguments, *options, log=log) as engine,
        connect(engine.target) as channel,
    ):
        for each in requests:
            ids: dict[int, list[int]] = {}
            ends: dict[int, SequenceFinished] = {}
            async for event in EngineServiceStub(channel).Generate(each):
                if event.HasField("delta"):
                    ids.setdefault(event.delta.sequence, []).extend(event.delta.tokens.ids)
                elif event.HasField("finished"):
                    ends[event.finished.sequence] = event.finished
            outputs += [ids, ends]
        steps = (await metrics_of(engine.target))["tokenwire_engine_steps_total"]
    return outputs, steps


async def test_draft_tokens_under_a_grammar_save_steps_and_keep_the_output(
    embedded_model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "grammar.log"
    async with running_service("grammar", "--model", str(embedded_model), log=log) as grammar:
        requests = [request(each, temperature) for each in GRAMMARS for temperature in (0, 1)]
        (plain, steps), (guessed, fewer) = [
            await run(
                *(embedded_model, requests, tmp_path / speculate),
                *("--grammar", grammar.target, "--speculate", speculate),
            )
            for speculate in ("off", "ngram")
        ]
    assert guessed == plain
    assert fewer < steps


async def test_draft_tokens_of_an_adapter_save_steps_and_keep_the_output(
    embedded_model: Path, tmp_path: Path
) -> None:
    base = LlamaForCausalLM.from_pretrained(embedded_model, dtype=torch.float32)
    make_adapter(base, tmp_path / "one", 0, rank=8, lora_alpha=32.0)
    requests = [
        GenerateRequest(
            model=model,
            prompts=[TokenIds(ids=[40, 41, 42, 43] * 8)],
            sampling=SamplingParams(temperature=0),
            stopping=StoppingParams(max_tokens=120, ignore_eos=True),
        )
        for model in ("one", "", "one")
    ]
    (plain, steps), (guessed, fewer) = [
        await run(
            *(embedded_model, requests, tmp_path / f"{speculate}.log"),
            *("--adapters", f"one={tmp_path / 'one'}", "--speculate", speculate),
        )
        for speculate in ("off", "ngram")
    ]
    assert guessed == plain
    assert plain[0] != plain[2]
    assert fewer < steps


async def test_expected_answer_is_drafted_and_keeps_the_output(
    embedded_model: Path, tmp_path: Path
) -> None:
    plain = GenerateRequest(
        prompts=[TokenIds(ids=[40, 41, 42, 43])],
        sampling=SamplingParams(temperature=1, seed=5),
        stopping=StoppingParams(max_tokens=120, ignore_eos=True),
    )
    [ids, _], _ = await run(embedded_model, [plain], tmp_path / "plain.log")
    assert isinstance(ids, dict)
    edited = [*ids[0][:40], 7, *ids[0][41:]]
    requests = [GenerateRequest() for _ in range(3)]
    for request, expected in zip(requests, (ids[0], edited, [9] * 120), strict=True):
        request.CopyFrom(plain)
        request.prediction.ids.extend(expected)
    log = tmp_path / "expected.log"
    arguments = ("--model", str(embedded_model), "--dtype", "float32", "--kv-memory", "128MiB")
    async with (
        running_service("engine", *arguments, log=log) as engine,
        connect(engine.target) as channel,
    ):
        for request, least in zip(requests, (1, 1, 0), strict=True):
            found: list[int] = []
            async for event in EngineServiceStub(channel).Generate(request):
                found += event.delta.tokens.ids
                if event.HasField("completed"):
                    [drafts] = event.completed.usage.drafts
            assert found == ids[0]
            assert drafts.source == DRAFT_SOURCE_PREDICTION
            assert least <= drafts.accepted_tokens <= drafts.drafted_tokens
        refused = GenerateRequest(prompts=plain.prompts, n=2, prediction=TokenIds(ids=[1]))
        with pytest.raises(grpc.aio.AioRpcError, match="one prompt and n = 1"):
            await anext(aiter(EngineServiceStub(channel).Generate(refused)))


async def test_draft_model_is_counted_and_keeps_the_output(
    embedded_model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "engine.log"
    arguments = ("--model", str(embedded_model), "--dtype", "float32", "--kv-memory", "128MiB")
    requests = [
        GenerateRequest(
            prompts=[TokenIds(ids=[40, 41, first])],
            sampling=SamplingParams(temperature=temperature, seed=5),
            stopping=StoppingParams(max_tokens=60, ignore_eos=True),
        )
        for first in (42, 43)
        for temperature in (0, 1)
    ]
    plain, _ = await run(embedded_model, requests, tmp_path / "plain.log")
    async with (
        running_service("engine", *arguments, "--draft", str(embedded_model), log=log) as engine,
        connect(engine.target) as channel,
    ):
        accepted = 0
        for each, [ids, _] in zip(requests, batched(plain), strict=True):
            found: list[int] = []
            async for event in EngineServiceStub(channel).Generate(each):
                found += event.delta.tokens.ids
                for drafts in event.completed.usage.drafts:
                    assert drafts.source == DRAFT_SOURCE_DRAFT_MODEL
                    accepted += drafts.accepted_tokens
            assert ids == {0: found}
        metrics = await metrics_of(engine.target)
    name = 'tokenwire_engine_accepted_draft_tokens_total{source="draft_model"}'
    assert metrics[name] >= accepted > 0


def batched(outputs: list[object]) -> Iterable[tuple[object, object]]:
    """Return the tokens and the ends of each request."""
    return zip(outputs[::2], outputs[1::2], strict=True)
