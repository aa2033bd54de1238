"""Traces: spans of all services at an OTLP collector."""

import itertools
import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio

from tests.services.collector import Collector, ReceivedSpan, running_collector
from tests.services.engine_client import generate, make_request
from tests.services.shim import running_shim
from tests.stack import Stack, free_ports, running_service, served_stack
from tokenwire.channel import connect
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineServiceStub

CALLER = "b7ad6b7169203331"
GRAMMAR = {"type": "regex", "value": "[0-9]+ traced"}
SERVICES = ("tokenwire-http-shim", "tokenwire-tokenizer", "tokenwire-engine")
_numbers = itertools.count(1)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def collector() -> AsyncIterator[Collector]:
    async with running_collector() as collector:
        yield collector


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def traced(
    collector: Collector, embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    """A stack that sends its spans to the collector."""
    logs = tmp_path_factory.mktemp("traced")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds
        with served_stack(embedded_model, logs, "--otlp-endpoint", collector.endpoint) as stack:
            yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(traced: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=traced.url, timeout=60) as http:
        yield http


def new_trace(*, sampled: bool = True) -> tuple[str, dict[str, str]]:
    """Return a trace id, and the header of a client whose span belongs to it."""
    trace = f"{next(_numbers):032x}"
    return trace, {"traceparent": f"00-{trace}-{CALLER}-0{int(sampled)}"}


async def spans_of(collector: Collector, trace: str) -> list[ReceivedSpan]:
    """Wait for the spans of all services, and return them from left to right."""
    found = await collector.trace(trace, until=lambda found: set(SERVICES) <= set(found))
    return [found[service] for service in SERVICES]


async def test_each_service_has_a_span_below_that_of_its_caller(
    http: httpx.AsyncClient, collector: Collector
) -> None:
    """An operator sees in one trace which service took how long, with the tokens of `usage`."""
    trace, headers = new_trace()
    headers["x-request-id"] = "traced"
    answer = await http.post(
        "/v1/chat/completions",
        headers=headers,
        json={
            "model": "tokenwire-code-6m",
            "messages": [{"role": "user", "content": "Count."}],
            "max_tokens": 8,
        },
    )
    assert answer.is_success, answer.text
    spans = await spans_of(collector, trace)
    callers = [CALLER, *(span.span_id for span in spans)]
    assert [span.parent_id for span in spans] == callers[: len(spans)]
    assert all(span.attributes["tokenwire.request_id"] == "traced" for span in spans)
    assert not any(span.is_error for span in spans)
    shim, tokenizer, engine = spans
    assert shim.name == "POST /v1/chat/completions"
    assert shim.attributes["http.response.status_code"] == 200
    usage = answer.json()["usage"]
    for span in (shim, tokenizer, engine):
        assert span.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert span.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
        assert span.attributes["gen_ai.request.model"] == "tokenwire-code-6m"
    assert [span.attributes["gen_ai.operation.name"] for span in (shim, tokenizer)] == ["chat"] * 2
    [choice] = answer.json()["choices"]
    for span in (tokenizer, engine):
        assert span.attributes["gen_ai.response.finish_reasons"] == [choice["finish_reason"]]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert engine.attributes["gen_ai.usage.cache_read.input_tokens"] == cached
    assert _seconds(tokenizer, "tokenwire.encode_seconds") > 0
    assert _seconds(tokenizer, "gen_ai.response.time_to_first_chunk") > 0
    for part in ("queue", "prefill", "decode"):
        assert _seconds(engine, f"tokenwire.{part}_seconds") >= 0


async def test_spans_of_a_constrained_request_tell_compilation_and_masks(
    http: httpx.AsyncClient, collector: Collector
) -> None:
    """An operator sees whether a slow answer waited for its grammar, and whether it was cached."""
    outcomes = []
    for _ in range(2):
        trace, headers = new_trace()
        body = {"prompt": "x = ", "max_tokens": 4, "grammar": GRAMMAR}
        answer = await http.post("/v1/completions", json=body, headers=headers)
        assert answer.is_success, answer.text
        found = await collector.trace(trace, until=lambda found: len(found) == 4)
        engine, grammar = found["tokenwire-engine"], found["tokenwire-grammar"]
        assert grammar.parent_id == engine.span_id
        assert grammar.attributes["tokenwire.grammar.kind"] == "regex"
        assert _seconds(engine, "tokenwire.mask_seconds") > 0
        outcomes.append(grammar.attributes["tokenwire.outcome"])
    assert outcomes == ["compiled", "cached"]


async def test_span_of_a_refused_request_has_the_reason(
    http: httpx.AsyncClient, collector: Collector
) -> None:
    """An operator finds failed requests by the status of their spans."""
    trace, headers = new_trace()
    body = {"prompt": "x", "temperature": -1}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 400
    found = await collector.trace(trace, until=lambda found: len(found) == 2)
    shim, tokenizer = (found[service] for service in SERVICES[:2])
    for span in (shim, tokenizer):
        assert span.is_error
        assert span.attributes["error.type"] == "INVALID_FIELD"
    assert shim.attributes["http.response.status_code"] == 400


async def test_span_of_the_engine_says_why_a_request_ended_early(
    traced: Stack, collector: Collector
) -> None:
    """A client of the token level sees its refusal, and an operator the client that left."""
    async with connect(traced.engine) as channel:
        refused, headers = new_trace()
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(channel, make_request([2**31]), **headers)
        left, headers = new_trace()
        call = EngineServiceStub(channel).Generate(
            make_request([100], max_tokens=2000), metadata=tuple(headers.items())
        )
        await call.read()
        call.cancel()
        span = (await collector.trace(refused, until=bool))["tokenwire-engine"]
        assert (span.parent_id, span.is_error) == (CALLER, True)
        assert span.attributes["error.type"] == "INVALID_FIELD"
        span = (await collector.trace(left, until=bool))["tokenwire-engine"]
        assert (span.is_error, span.attributes["tokenwire.outcome"]) == (False, "cancelled")


async def test_call_of_the_tokenizer_is_traced(
    http: httpx.AsyncClient, collector: Collector
) -> None:
    """Calls that generate nothing have spans too."""
    trace, headers = new_trace()
    assert (await http.post("/detokenize", json={"tokens": [3]}, headers=headers)).is_success
    found = await collector.trace(trace, until=lambda found: len(found) == 2)
    shim, tokenizer = (found[service] for service in SERVICES[:2])
    assert tokenizer.parent_id == shim.span_id
    assert tokenizer.name == "tokenwire.tokenizer.v1.TokenizerService/Decode"


async def test_request_that_its_caller_does_not_sample_has_no_spans(
    http: httpx.AsyncClient, collector: Collector
) -> None:
    """A caller that samples one request in a thousand is not billed for all of them."""
    body = {"prompt": "x = ", "max_tokens": 2}
    unsampled, headers = new_trace(sampled=False)
    assert (await http.post("/v1/completions", json=body, headers=headers)).is_success
    sampled, headers = new_trace()
    assert (await http.post("/v1/completions", json=body, headers=headers)).is_success
    await spans_of(collector, sampled)
    assert not await collector.trace(unsampled, until=lambda found: True)


async def test_unreachable_collector_harms_no_request_and_warns_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of the collector is neither an outage nor a full disk of logs."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")
    async with (
        running_shim("--tokenizer", stack.tokenizer) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
    ):
        body = {"prompt": "x = ", "max_tokens": 1}
        assert (await http.post("/v1/completions", json=body)).is_success
        await shim.logged("export of traces fails")
        for _ in range(20):
            assert (await http.post("/v1/completions", json=body)).is_success
        shim.process.terminate()
        assert await shim.process.wait() == 0
        assert shim.count("export of traces fails") == 1
        assert not shim.count("Exception")


async def test_opentelemetry_is_not_imported_without_an_endpoint(
    embedded_model: Path, tmp_path: Path
) -> None:
    """A server without traces neither needs the extra nor pays for it."""
    log, verbose = tmp_path / "grammar.log", ("-X", "importtime")
    model = ("--model", str(embedded_model))
    async with running_service("grammar", *model, launcher=verbose, log=log):
        pass
    imported = re.findall(r"import time:.*\| *(\S+)", log.read_text())
    assert "services.common.tracing" in imported
    assert not [name for name in imported if name.startswith("opentelemetry")]


def _seconds(span: ReceivedSpan, attribute: str) -> float:
    value = span.attributes[attribute]
    assert isinstance(value, float)
    return value
