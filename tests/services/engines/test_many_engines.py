"""Several engines behind one tokenizer service: each prompt where its prefix is, none lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.stack import (
    MortalEngine,
    metrics_of,
    mortal_engine,
    running_service,
    watch_load,
)
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.vision_checkpoints import png
from tests.vision import write_whole
from tokenwire.channel import connect
from tokenwire.client import AnswerStream, Client
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.completion.v1 import models_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.requests import text_start
from tokenwire.session import completion_session

# With this seed, no draw lies within 1e-4 of the boundary between two tokens (see test_failover).
ASKED: dict[str, Any] = {"temperature": 1.0, "seed": 231, "ignore_eos": True}
TOKENS = 240
HANG_SECONDS = 120
SERVING = models_pb2.ENGINE_STATE_SERVING
REFUSED = models_pb2.ENGINE_STATE_REFUSED


class Fleet:
    """Engines of the embedded model, and a tokenizer service in front of them."""

    def __init__(self, engines: list[MortalEngine], client: Client, target: str, log: Path) -> None:
        self.engines = engines
        self.client = client
        self.target = target
        self.log = log

    async def states(self) -> dict[str, int]:
        """Return the state of each engine by its address."""
        async with connect(self.target) as channel:
            answer = await CompletionServiceStub(channel).GetStatus(models_pb2.GetStatusRequest())
        return {engine.target: engine.state for engine in answer.models[0].engines}

    async def until_serving(self, count: int) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while list((await self.states()).values()).count(SERVING) != count:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def placed(self) -> dict[str, float]:
        """Return the number of requests that each engine was given, by its address."""
        name = "tokenwire_tokenizer_placed_requests_total"
        found = await metrics_of(self.target)
        targets = [engine.target for engine in self.engines]
        return {each: found.get(f'{name}{{engine="{each}"}}', 0) for each in targets}

    def of(self, target: str) -> MortalEngine:
        return next(engine for engine in self.engines if engine.target == target)


@asynccontextmanager
async def fleet(model: Path, log: Path, size: int, *flags: str) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(mortal_engine(model)) for _ in range(size)]
        targets = ",".join(engine.target for engine in engines)
        arguments = ("--model", str(model), "--engine-wait", "120", "--engine", targets, *flags)
        service = await stack.enter_async_context(
            running_service("tokenizer", *arguments, log=log / "tokenizer")
        )
        client = await stack.enter_async_context(Client(service.target))
        made = Fleet(engines, client, service.target, log / "tokenizer")
        await made.until_serving(size)
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fleet]:
    """Two engines, which each test leaves running."""
    async with fleet(embedded_model, tmp_path_factory.mktemp("log"), 2) as two:
        yield two


async def test_stream_goes_on_at_another_engine_whichever_is_killed(pair: Fleet) -> None:
    """The engine that has the stream is killed each time. Credit bounds what it sends."""
    calm = await pair.client.generate("import", max_tokens=TOKENS, **ASKED)
    start = text_start("import", {"max_tokens": TOKENS, **ASKED}, completion.DELIVERY_DELTAS)
    start.credit = granted = share = TOKENS // 3
    text, received, before = "", 0, await pair.placed()
    async with connect(pair.target) as channel:
        session = completion_session(channel)
        async with AnswerStream(session, start) as stream:
            async for delta in stream:
                text += delta.text
                received += len(delta.token_ids)
                if received < granted or granted >= TOKENS:
                    continue
                after = await pair.placed()
                [busy] = [each for each in after if after[each] > before[each]]
                await pair.of(busy).kill()
                await pair.of(busy).start()
                before = after
                granted += share
                more = completion.SessionCredit(tokens=share)
                session.send(completion.SessionCommand(handle=1, credit=more))
        await session.close()
    assert text == calm.text
    await pair.until_serving(2)


async def test_engine_that_stops_hands_its_streams_over_at_once(pair: Fleet) -> None:
    """The stream has no credit left, so the engine could never end it itself."""
    calm = await pair.client.generate("import", max_tokens=TOKENS, **ASKED)
    before = await pair.placed()
    start = text_start("import", {"max_tokens": TOKENS, **ASKED}, completion.DELIVERY_DELTAS)
    start.credit = 20
    async with connect(pair.target) as channel:
        session = completion_session(channel)
        async with AnswerStream(session, start) as stream:
            deltas = aiter(stream)
            text, received = "", 0
            while received < 20:
                delta = await anext(deltas)
                text += delta.text
                received += len(delta.token_ids)
            after = await pair.placed()
            [busy] = [each for each in after if after[each] > before[each]]
            pair.of(busy).terminate()
            async with asyncio.timeout(25):  # less than the engine's --grace
                await pair.of(busy).wait()
            more = completion.SessionCredit(tokens=TOKENS)
            session.send(completion.SessionCommand(handle=1, credit=more))
            text += "".join([delta.text async for delta in deltas])
        await session.close()
    assert text == calm.text
    await pair.of(busy).start()
    await pair.until_serving(2)


async def test_prompts_go_where_their_prefix_is_and_others_spread(pair: Fleet) -> None:
    asked: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    systems = [f"# Module {topic}\n" + f"{topic} = compute({topic})\n" * 40 for topic in "abcd"]
    before, logged = await pair.placed(), pair.log.read_text()
    firsts = [pair.client.generate(text, **asked) for text in systems]
    await asyncio.gather(*firsts)
    assert all(count > before[engine] for engine, count in (await pair.placed()).items())
    for turn in range(6):
        for text in systems:
            answer = await pair.client.generate(f"{text}# turn {turn}\n", **asked)
            assert answer.usage.cached_tokens > answer.usage.prompt_tokens // 2
    assert "read anew" not in pair.log.read_text().removeprefix(logged)


async def test_prompts_with_images_go_where_their_prefix_is(tmp_path: Path) -> None:
    """The text is the same, so the images alone tell the conversations apart."""
    model = write_whole(tmp_path / "model", "mistral3")
    asked: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    pictures = [png(56, 56, seed) for seed in range(4)]
    text = "<image>def a(b):\n" + "a b ab re turn return\n" * 12
    async with fleet(model, tmp_path, 2) as many:
        firsts = [many.client.generate(text, images=[each], **asked) for each in pictures]
        await asyncio.gather(*firsts)
        assert min((await many.placed()).values()) >= 1
        for turn in range(2):
            for each in pictures:
                answer = await many.client.generate(f"{text}{turn}", images=[each], **asked)
                assert answer.usage.cached_tokens > answer.usage.prompt_tokens // 2
        lacking = "tokenwire_tokenizer_lacking_prefix_tokens_total"
        assert (await metrics_of(many.target))[lacking] == 0


async def test_engine_of_another_model_is_refused_and_told(pair: Fleet, tmp_path: Path) -> None:
    """Ids of another vocabulary would continue the text with nonsense."""
    other = tmp_path / "other"
    make_checkpoint(other, CONFIGS["llama"])
    calm = await pair.client.generate("import", max_tokens=8, **ASKED)
    odd = pair.engines[0]
    await odd.kill()
    await odd.start(other)
    async with asyncio.timeout(HANG_SECONDS):
        while (await pair.states())[odd.target] != REFUSED:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert "serves another checkpoint" in pair.log.read_text()
    assert (await metrics_of(pair.target))['tokenwire_tokenizer_engines{state="refused"}'] == 1
    for _ in range(4):
        assert (await pair.client.generate("import", max_tokens=8, **ASKED)).text == calm.text
    await odd.kill()
    await odd.start()
    await pair.until_serving(2)


async def test_engine_of_other_weights_is_refused(
    pair: Fleet, embedded_model: Path, tmp_path: Path
) -> None:
    """A stream that moves would go on as another model's."""
    async with (
        running_service(
            *("engine", "--model", str(embedded_model), "--kv-memory", "64MiB"),
            *("--dtype", "bfloat16"),
            log=tmp_path / "odd",
        ) as odd,
        running_service(
            *("tokenizer", "--model", str(embedded_model)),
            *("--engine", f"{pair.engines[0].target},{odd.target}"),
            log=tmp_path / "both",
        ) as service,
        Client(service.target) as client,
    ):
        both = Fleet(pair.engines, client, service.target, tmp_path / "both")
        async with asyncio.timeout(HANG_SECONDS):
            while sorted((await both.states()).values()) != [SERVING, REFUSED]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert "its dtype is" in (tmp_path / "both").read_text()
        assert (await client.generate("import", max_tokens=4)).text


async def test_full_engine_leaves_a_request_to_another(
    embedded_model: Path, tmp_path: Path
) -> None:
    few = ("--model", str(embedded_model), "--dtype", "float32", "--kv-memory", "64MiB")
    full = ("--max-running", "1", "--max-waiting", "1")
    async with (
        running_service("engine", *few, *full, log=tmp_path / "one") as one,
        running_service("engine", *few, *full, log=tmp_path / "two") as two,
        running_service(
            *("tokenizer", "--model", str(embedded_model)),
            *("--engine", f"{one.target},{two.target}"),
            log=tmp_path / "tokenizer",
        ) as service,
        Client(service.target) as client,
    ):
        many = Fleet([], client, service.target, tmp_path / "tokenizer")
        await many.until_serving(2)
        start = text_start("import", {"max_tokens": 100, **ASKED}, completion.DELIVERY_DELTAS)
        start.credit = 1  # keeps the requests in their places
        async with connect(service.target) as channel, AsyncExitStack() as streams:
            session = completion_session(channel)

            async def begin() -> AnswerStream:
                return await streams.enter_async_context(AnswerStream(session, start))

            for stream in [await begin(), await begin()]:
                assert (await anext(aiter(stream))).token_ids
            for _ in range(2):  # these wait
                await begin()
            for engine in (one, two):
                await watch_load(engine.target, until=lambda load: load.waiting_sequences == 1)
            with pytest.raises(ServiceError) as refused:
                await client.generate("import", max_tokens=4)
            assert refused.value.reason == "QUEUE_FULL"


async def test_engines_are_found_by_dns(pair: Fleet, embedded_model: Path, tmp_path: Path) -> None:
    port = pair.engines[0].target.partition(":")[2]
    async with (
        running_service(
            *("tokenizer", "--model", str(embedded_model)),
            *("--engine", f"dns:///localhost:{port}"),
            log=tmp_path / "tokenizer",
        ) as service,
        Client(service.target) as client,
    ):
        assert (await client.generate("import", max_tokens=4)).text


async def test_server_that_is_no_engine_is_refused_by_name(
    embedded_model: Path, tmp_path: Path
) -> None:
    model = ("--model", str(embedded_model))
    async with running_service("grammar", *model, log=tmp_path / "grammar") as grammar:
        log = tmp_path / "log"
        with pytest.raises(AssertionError, match=f"The server at {grammar.target} is no engine"):
            async with running_service("tokenizer", *model, "--engine", grammar.target, log=log):
                pass


@pytest.mark.parametrize("target", ["nowhere", "host:0", ","])
async def test_unusable_target_ends_the_service_with_a_sentence(
    embedded_model: Path, tmp_path: Path, target: str
) -> None:
    log = tmp_path / "log"
    arguments = ("--model", str(embedded_model), "--engine", target)
    with pytest.raises(AssertionError, match="--engine must"):
        async with running_service("tokenizer", *arguments, log=log):
            pass
