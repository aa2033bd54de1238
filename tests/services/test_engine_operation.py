"""Engine operation: abort, drain, cache flush, health, shutdown and failures."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.torch import load_file, save_file

from services.engine.frontend.frontend import Frontend
from services.engine.frontend.loop_client import spawn_loop
from services.engine.frontend.matchers import Matchers
from services.engine.settings import EngineSettings
from tests.services.engine_client import (
    SessionClient,
    generate,
    ids_of,
    make_request,
    refused,
    start,
)
from tests.stack import (
    RunningService,
    is_idle,
    loop_process,
    metrics_of,
    running_service,
    watch_load,
)
from tests.unit.engine.tiny import VOCABULARY, make_checkpoint
from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2 import SessionCancel, SessionCommand
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub, EngineServiceStub
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec, SamplingParams


async def test_disconnected_client_frees_its_sequences(
    channel: grpc.aio.Channel, engine: RunningService
) -> None:
    session = SessionClient(channel)
    await session.send(start(1, make_request([1, 2, 3], n=4, max_tokens=90), credit=10))
    await session.until("delta", 1)
    await watch_load(engine.target, until=lambda load: load.running_sequences == 4)
    session.call.cancel()
    await watch_load(engine.target, until=is_idle)
    call = EngineServiceStub(channel).Generate(make_request([1, 2], n=64, max_tokens=90))
    await call.read()
    call.cancel()
    await watch_load(engine.target, until=is_idle)


async def test_abort_ends_a_request_by_its_id(channel: grpc.aio.Channel) -> None:
    session = SessionClient(channel)
    command = start(1, make_request([1, 2], max_tokens=90), credit=2)
    command.start.request_id = "abort-me"
    await session.send(command)
    await session.until("delta", 1)
    control = EngineControlServiceStub(channel)
    answer = await control.Abort(engine_pb2.AbortRequest(request_ids=["abort-me", "nobody"]))
    assert answer.aborted == 1
    event = await session.until("error", 1)
    assert ServiceError.from_status(event.error).reason == "ABORTED"
    session.call.cancel()


async def outcomes(engine: RunningService) -> dict[str, float]:
    """Return the number of requests by outcome."""
    name = re.compile(r'tokenwire_engine_requests_total{outcome="(\w+)"}')
    metrics = (await metrics_of(engine.target)).items()
    return {found[1]: count for sample, count in metrics if (found := name.match(sample))}


async def test_metrics_count_requests_by_outcome(
    channel: grpc.aio.Channel, engine: RunningService
) -> None:
    before = await outcomes(engine)
    session = SessionClient(channel)
    commands = [start(handle, make_request([1], max_tokens=90), credit=1) for handle in range(1, 6)]
    served, refused, cancelled, aborted, expired = commands
    at_once = start(6, make_request([1]))
    served.start.request.stopping.max_tokens = 1
    refused.start.request.prompts[0].ids[0] = VOCABULARY
    aborted.start.request_id = "count-me"
    expired.start.timeout_seconds = 0.2
    await session.send(*commands, at_once, SessionCommand(handle=6, cancel=SessionCancel()))
    await session.until("delta", aborted.handle)
    await session.send(SessionCommand(handle=cancelled.handle, cancel=SessionCancel()))
    abort = engine_pb2.AbortRequest(request_ids=["count-me"])
    await EngineControlServiceStub(channel).Abort(abort)
    await session.until_all_ended(1, 2, 3, 4, 5, 6)
    after = await outcomes(engine)
    more = {outcome: count - before.get(outcome, 0) for outcome, count in after.items()}
    expected = dict.fromkeys(("ok", "refused", "aborted", "expired"), 1.0) | {"cancelled": 2.0}
    assert {outcome: count for outcome, count in more.items() if count} == expected
    session.call.cancel()


async def test_cancelled_cache_flush_keeps_requests_running(channel: grpc.aio.Channel) -> None:
    control = EngineControlServiceStub(channel)
    running = EngineServiceStub(channel).Generate(make_request([1, 2], n=64, max_tokens=90))
    await running.read()
    for milliseconds in range(1, 20):
        with suppress(grpc.aio.AioRpcError):
            await control.FlushCache(engine_pb2.FlushCacheRequest(), timeout=milliseconds / 1e3)
    running.cancel()
    assert len(ids_of(await generate(channel, make_request([1, 2])))) == 8


async def test_flush_evicts_cached_prefixes(channel: grpc.aio.Channel) -> None:
    prompt = [9, 8, 7, 6] * 20
    control = EngineControlServiceStub(channel)
    await generate(channel, make_request(prompt))
    cached = (await generate(channel, make_request(prompt)))[-1].completed.usage.cached_tokens
    assert cached >= 64
    assert (await control.FlushCache(engine_pb2.FlushCacheRequest())).freed_blocks > 0
    assert (await generate(channel, make_request(prompt)))[-1].completed.usage.cached_tokens == 0


@asynccontextmanager
async def stopped_grammar(model: Path, logs: Path) -> AsyncIterator[RunningService]:
    """Yield an engine that has compiled one grammar, at a service that has stopped since."""
    few = ("--model", str(model), "--dtype", "float32", "--kv-memory", "64MiB", "--grammar")
    async with (
        running_service("grammar", "--model", str(model), log=logs / "grammar") as grammar,
        running_service("engine", *few, grammar.target, log=logs / "engine") as engine,
        connect(engine.target) as channel,
    ):
        await generate(channel, constrained("a"))
        grammar.process.send_signal(signal.SIGSTOP)
        try:
            yield engine
        finally:
            grammar.process.send_signal(signal.SIGCONT)


def constrained(regex: str) -> engine_pb2.GenerateRequest:
    return make_request([1, 2], ignore_eos=False, grammar=GrammarSpec(regex=regex))


async def test_request_whose_grammar_compiles_ends_at_its_deadline_or_if_it_is_cancelled_or_aborted(
    embedded_model: Path, tmp_path: Path
) -> None:
    """Without this, a drain loses the request, and an operator can't abort it."""
    late, cancelled, aborted = (start(handle, constrained("b")) for handle in (1, 2, 3))
    late.start.timeout_seconds = 0.5
    aborted.start.request_id = "compiles"
    async with (
        stopped_grammar(embedded_model, tmp_path) as engine,
        connect(engine.target) as channel,
    ):
        session, control = SessionClient(channel), EngineControlServiceStub(channel)
        await session.send(late, cancelled, aborted, start(4, make_request([1])))
        await session.until("completed", 4)

        async def reason_of(handle: int) -> str | None:
            return ServiceError.from_status((await session.until("error", handle)).error).reason

        await session.send(SessionCommand(handle=2, cancel=SessionCancel()))
        assert await reason_of(2) == "CANCELLED"
        assert await reason_of(1) == "DEADLINE_EXCEEDED"
        assert await outcomes(engine) == {"ok": 2.0, "cancelled": 1.0, "expired": 1.0}
        drain = engine_pb2.DrainRequest(timeout_seconds=0.1)
        assert (await control.Drain(drain)).remaining_requests == 1
        abort = engine_pb2.AbortRequest(request_ids=["compiles"])
        assert (await control.Abort(abort)).aborted == 1
        assert await reason_of(3) == "ABORTED"
        assert (await control.Drain(drain)).remaining_requests == 0
        session.call.cancel()


async def test_request_whose_grammar_compiles_fails_with_engine_lost(
    embedded_model: Path, tmp_path: Path
) -> None:
    """With CANCELLED instead, the client would not retry."""
    async with (
        stopped_grammar(embedded_model, tmp_path) as engine,
        connect(engine.target) as channel,
    ):
        session = SessionClient(channel)
        await session.send(start(1, constrained("b")), start(2, make_request([1])))
        await session.until("completed", 2)
        os.kill(loop_process(engine.process.pid), signal.SIGKILL)
        error = ServiceError.from_status((await session.until("error", 1)).error)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")
        session.call.cancel()


async def test_abort_after_the_deadline_timer_reports_aborted(embedded_model: Path) -> None:
    """The deadline's timer has fired, but the request has not ended yet."""
    settings = EngineSettings(model=embedded_model, grammar="127.0.0.1:1")
    loop = spawn_loop()
    frontend = Frontend(settings, loop, lambda why: None)
    matchers = Matchers(
        [settings.grammar],
        vocabulary_size=8192,
        eos_token_ids=[0],
        on_masks=lambda masks: None,
        on_failed=lambda handle, error: None,
    )
    spec = GrammarSpec(regex="a")
    compilation = frontend._preparations.run(lambda: matchers.compile(spec), "late", 0.0)
    compiling = asyncio.ensure_future(compilation)
    await asyncio.sleep(0)  # the compilation starts, and its timer is due
    await asyncio.sleep(0)  # the timer fires
    assert frontend.abort(["late"]) == 1
    with pytest.raises(ServiceError) as ended:
        await compiling
    assert ended.value.reason == "ABORTED"
    await matchers.aclose()
    loop.link.close()


async def test_refused_requests_hold_nothing_and_are_told_different_times(
    embedded_model: Path, tmp_path: Path
) -> None:
    """If all came again at the same time, most of them would be refused again."""
    few = ("--max-running", "1", "--max-waiting", "2", "--kv-memory", "64MiB")
    arguments = ("--model", str(embedded_model), "--dtype", "float32", *few)
    long = make_request([1, 2], max_tokens=1_900)
    async with (
        running_service("engine", *arguments, log=tmp_path / "log") as service,
        connect(service.target) as channel,
    ):
        await generate(channel, make_request([1, 2], max_tokens=400))  # a length to judge by
        session = SessionClient(channel)
        # Without more credit the first one runs for ever, however fast the machine is.
        await session.send(start(1, long, credit=8))
        await session.until("delta", 1)  # it no longer takes one of the two places that wait
        await session.send(start(2, long), start(3, long))
        await watch_load(service.target, until=lambda load: load.waiting_sequences == 2)
        times = [(await refused(channel, long)).retry_seconds or 0 for _ in range(30)]
        assert times == sorted(times)
        assert 1 <= times[0] < times[-1] or times[-1] == 300
        session.call.cancel()
        await watch_load(service.target, until=is_idle)
        assert ids_of(await generate(channel, make_request([1, 2], max_tokens=4)))


async def test_request_that_never_fits_is_invalid(checkpoint: Path, tmp_path: Path) -> None:
    few = ("--max-running", "4", "--max-waiting", "2", "--kv-memory", "16MiB")
    arguments = ("--model", str(checkpoint), "--dtype", "float32", *few)
    async with (
        running_service("engine", *arguments, log=tmp_path / "log") as service,
        connect(service.target) as channel,
    ):
        model = await EngineControlServiceStub(channel).GetModel(engine_pb2.GetModelRequest())
        assert model.max_sequences_per_request == 6
        error = await refused(channel, make_request([1], n=7))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "n")
        error = await refused(channel, make_request(*[[1]] * 7))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompts")
        assert len(ids_of(await generate(channel, make_request([1], n=6)), sequence=5)) == 8


async def test_nan_weights_fail_requests_and_log_one_error(tmp_path: Path) -> None:
    """A truncated copy or a diverged training run leaves NaN in the weights."""
    broken = make_checkpoint(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, broken / "model.safetensors")
    arguments = ("--model", str(broken), "--dtype", "float32", "--kv-memory", "16MiB")
    async with (
        running_service("engine", *arguments, log=tmp_path / "log") as service,
        connect(service.target) as channel,
    ):
        error = await refused(channel, make_request([1, 2], n=8, max_tokens=80))
        assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "NOT_FINITE")
        await watch_load(service.target, until=is_idle)
        assert await outcomes(service) == {"failed": 1.0}
    lines = (tmp_path / "log").read_text().splitlines()
    [told] = [line for line in map(json.loads, lines) if line["level"] == "error"]
    assert told["message"] == error.message
    assert told["request_id"]


async def test_health_is_not_serving_while_the_loop_hangs(checkpoint: Path, tmp_path: Path) -> None:
    """A load balancer sees the hang in the health status; the loop may recover."""
    arguments = ("--model", str(checkpoint), "--dtype", "float32", "--silence-seconds", "0.2")
    async with (
        running_service("engine", *arguments, log=tmp_path / "log") as service,
        connect(service.target) as channel,
        asyncio.timeout(60),
    ):
        name = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
        request = health_pb2.HealthCheckRequest(service=name)
        health = aiter(health_pb2_grpc.HealthStub(channel).Watch(request))
        assert (await anext(health)).status == health_pb2.HealthCheckResponse.SERVING
        loop = loop_process(service.process.pid)
        os.kill(loop, signal.SIGSTOP)
        call = EngineServiceStub(channel).Generate(make_request([1, 2]))
        assert (await anext(health)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        os.kill(loop, signal.SIGCONT)
        assert len(ids_of([response async for response in call])) == 8
        assert (await anext(health)).status == health_pb2.HealthCheckResponse.SERVING
    assert "sent no output" in (tmp_path / "log").read_text()


async def test_sigterm_finishes_running_requests(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ("--model", str(checkpoint), "--dtype", "float32", "--kv-memory", "16MiB")
    async with running_service("engine", *arguments, log=tmp_path / "log") as service:
        async with connect(service.target) as channel:
            call = EngineServiceStub(channel).Generate(make_request([1, 2], max_tokens=80))
            responses = aiter(call)
            first = await anext(responses)
            stopping = asyncio.ensure_future(service.stop())
            rest = [first, *[response async for response in responses]]
            assert len(ids_of(rest)) == 80
            assert rest[-1].HasField("completed")
        assert await stopping == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda s: s.name)
async def test_death_of_the_step_loop_fails_its_requests_and_ends_the_service(
    embedded_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """The OOM killer or a faulty kernel kills the loop; no client may wait forever."""
    arguments = ("--model", str(embedded_model), "--dtype", "float32", "--kv-memory", "64MiB")
    async with running_service("engine", *arguments, log=tmp_path / "log") as service:
        async with connect(service.target) as channel:
            request = make_request([1, 2], n=32, max_tokens=1_900)
            calls = [EngineServiceStub(channel).Generate(request) for _ in range(3)]
            for call in calls:
                await anext(aiter(call))
            os.kill(loop_process(service.process.pid), number)
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    async for _ in call:
                        pass
                error = ServiceError.from_rpc_error(raised.value)
                assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")
                assert error.retry_seconds
        assert await service.process.wait() == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--model", "/nowhere"), "does not exist"),
        (("--model", "{model}", "--port", "99999"), "--port"),
        (("--model", "{model}", "--stall-seconds", "0"), "--stall-seconds must be between"),
        (("--model", "{model}", "--kv-memory", "lots"), "not an amount of memory"),
        (("--model", "{model}", "--kv-memory", "900GiB"), "iB of memory are missing"),
        (("--model", "{model}", "--mixed-step-factor", "nan"), "--mixed-step-factor"),
        (("--model", "{model}", "--threads", "-1"), "--threads must be between 0"),
        (("--model", "{model}", "--device", "cuda"), "CUDA"),
        (("--model", "{empty}"), "config.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_invalid_flag_ends_the_start_with_one_sentence_and_exit_code_2(
    checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    filled = [a.format(model=checkpoint, empty=tmp_path) for a in arguments]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.engine", "--port", "0", "--metrics-port", "-1", *filled,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, stderr = await process.communicate()
    lines = [line for line in stderr.decode().splitlines() if not line.startswith("{")]
    assert process.returncode == 2, stderr.decode()
    assert complaint in lines[-1]
    assert "Traceback" not in stderr.decode()


async def test_ids_that_the_checkpoint_suppresses_are_left_out_unless_a_request_wants_them(
    tmp_path: Path,
) -> None:
    make_checkpoint(tmp_path)
    suppressed = [token for token in range(VOCABULARY) if token != 3]
    values = {"suppress_tokens": suppressed}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    bias, allowed = SamplingParams(), SamplingParams()
    bias.logit_bias[9] = 100
    allowed.allowed_token_ids.ids.extend([7, 8])
    model = ("--model", str(tmp_path))
    async with (
        running_service("engine", *model, log=tmp_path / "log") as engine,
        connect(engine.target) as channel,
    ):
        for sampling, expected in ((SamplingParams(), {3}), (bias, {9}), (allowed, {7, 8})):
            request = make_request([1, 2, 3], max_tokens=40)
            request.sampling.CopyFrom(sampling)
            assert {*ids_of(await generate(channel, request))} == expected


async def test_recommended_sampling_fills_what_a_request_leaves_open(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    recommended = {"do_sample": False, "top_k": 500, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))

    async def outputs(engine: RunningService, **sampling: float) -> list[list[int]]:
        async with connect(engine.target) as channel:
            requests = [make_request([1, 2, 3], max_tokens=40) for _ in range(4)]
            for seed, request in enumerate(requests):
                request.sampling.Clear()
                request.sampling.seed = seed
                for field, value in sampling.items():
                    setattr(request.sampling, field, value)
            return [ids_of(await generate(channel, request)) for request in requests]

    model = ("--model", str(tmp_path))
    log = tmp_path / "log"
    async with running_service("engine", *model, "--generation-config", log=log) as engine:
        greedy = await outputs(engine)
        assert all(ids == greedy[0] for ids in greedy)
        drawn = await outputs(engine, temperature=1.5)
        assert any(ids != drawn[0] for ids in drawn)
    async with running_service("engine", *model, log=log) as engine:
        plain = await outputs(engine)
        assert any(ids != plain[0] for ids in plain)
