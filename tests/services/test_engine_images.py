"""Images over gRPC: encoded apart from the loop, cached, refused in time, and survived."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest
import pytest_asyncio

from services.common.contract import MAX_IMAGES
from tests.services.engine_client import (
    SessionClient,
    generate,
    ids_of,
    make_request,
    refused,
    start,
)
from tests.stack import RunningService, metrics_of, running_service
from tests.unit.engine.vision_checkpoints import IMAGE_TOKEN, make_vision_checkpoint, png
from tokenwire.channel import connect
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2 import (
    Capability,
    GenerateRequest,
    PromptImage,
    SessionCancel,
    SessionCommand,
)
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub

TOKENS = 16
"""Image tokens of each image: 28 x 28 pixels in patches of 7 x 7"""
PROMPT = [3, 4, *[IMAGE_TOKEN] * TOKENS, 5, 6]
FLAGS = ("--dtype", "float32", "--kv-memory", "64MiB")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny-llava"
    make_vision_checkpoint(directory, "llava")
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningService]:
    log = tmp_path_factory.mktemp("log") / "engine.log"
    async with running_service("engine", "--model", str(checkpoint), *FLAGS, log=log) as service:
        yield service


def about(*files: bytes, prompt: list[int] = PROMPT) -> GenerateRequest:
    """Return a request that scores its first token."""
    images = [PromptImage(data=file) for file in files]
    return make_request(prompt, logprobs=5, images=images)


async def first_logprob(channel: grpc.aio.Channel, request: GenerateRequest) -> float:
    responses = await generate(channel, request)
    scored = next(each.delta for each in responses if each.HasField("delta"))
    return scored.tokens.logprobs[0]


async def test_engine_says_that_it_takes_images(channel: grpc.aio.Channel) -> None:
    model = await EngineControlServiceStub(channel).GetModel(engine_pb2.GetModelRequest())
    assert Capability.CAPABILITY_IMAGES in model.capabilities


async def test_output_depends_on_the_image_and_on_nothing_else(channel: grpc.aio.Channel) -> None:
    cat, dog = png(40, 40, 1), png(40, 40, 2)
    first = await first_logprob(channel, about(cat))
    assert await first_logprob(channel, about(dog)) != pytest.approx(first, abs=1e-4)
    assert await first_logprob(channel, about(cat)) == pytest.approx(first, abs=1e-5)


async def test_several_prompts_and_choices_get_their_own_images(channel: grpc.aio.Channel) -> None:
    cat, dog = png(40, 40, 1), png(40, 40, 2)
    request = make_request(
        PROMPT,
        [7, 8, 9],
        PROMPT,
        n=2,
        images=[PromptImage(prompt=2, data=dog), PromptImage(prompt=0, data=cat)],
    )
    together = await generate(channel, request)
    for prompt, file in ((0, cat), (2, dog)):
        alone = await generate(channel, about(file))
        for choice in range(2):
            assert ids_of(together, 2 * prompt + choice) == ids_of(alone)


async def test_resumed_sequence_goes_on_with_its_images(channel: grpc.aio.Channel) -> None:
    """A client that has lost its engine sends the images again to another one."""
    cat = png(40, 40, 1)
    whole = ids_of(await generate(channel, about(cat)))
    request = about(cat)
    resumed = request.resume.add(sequence=0)
    resumed.generated.ids.extend(whole[:3])
    assert ids_of(await generate(channel, request)) == whole[3:]


async def test_equal_images_are_encoded_once(
    engine: RunningService, channel: grpc.aio.Channel
) -> None:
    file = png(40, 40, 3)
    before = await metrics_of(engine.target)
    for _ in range(3):
        await generate(channel, about(file))
    after = await metrics_of(engine.target)
    counts = {
        outcome: after[key] - before.get(key, 0)
        for outcome in ("encoded", "cached")
        if (key := f'tokenwire_engine_images_total{{outcome="{outcome}"}}')
    }
    assert counts == {"encoded": 1, "cached": 2}


async def test_tenants_share_no_encoded_image(
    engine: RunningService, channel: grpc.aio.Channel
) -> None:
    """The time would tell one tenant that another has sent the image."""
    file, key = png(40, 40, 4), 'tokenwire_engine_images_total{outcome="cached"}'
    before = (await metrics_of(engine.target)).get(key, 0)
    for tenant in ("one", "two"):
        await generate(channel, about(file), **{"x-tenant": tenant})
    assert (await metrics_of(engine.target)).get(key, 0) == before
    await generate(channel, about(file), **{"x-tenant": "two"})
    assert (await metrics_of(engine.target))[key] == before + 1


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (about(b"no image"), "images[0].data", "not a PNG"),
        (about(png(40, 40), png(40, 40)[:300]), "images[1].data", "truncated"),
        (about(b""), "images[0].data", "1 to 20,971,520 bytes"),
        (about(*[b"x"] * (MAX_IMAGES + 1)), "images", "at most 16"),
        (about(png(40, 40), prompt=[3, 4]), "prompts[0].ids", "16 too few"),
        (about(png(40, 40), prompt=[*PROMPT, IMAGE_TOKEN]), "prompts[0].ids", "1 too many"),
        (
            make_request(PROMPT, images=[PromptImage(prompt=1, data=png(40, 40))]),
            "images[0].prompt",
            "no prompt 1",
        ),
    ],
    ids=["text", "truncated", "empty", "many", "few tokens", "many tokens", "prompt"],
)
async def test_bad_images_are_refused(
    channel: grpc.aio.Channel, request_: GenerateRequest, field: str, message: str
) -> None:
    error = await refused(channel, request_)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert message in error.message


async def test_text_goes_on_while_a_lost_encoder_starts_again(
    engine: RunningService, channel: grpc.aio.Channel
) -> None:
    children = psutil.Process(engine.process.pid).children()
    encoder = max(children, key=lambda child: child.nice())
    os.kill(encoder.pid, signal.SIGKILL)
    codes: list[grpc.StatusCode] = []
    while codes[-1:] != [grpc.StatusCode.OK]:
        codes.append(await _code(channel, about(png(40, 40, 4))))
        assert ids_of(await generate(channel, make_request([3, 4, 5])))
    assert {*codes} <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK}


async def _code(channel: grpc.aio.Channel, request: GenerateRequest) -> grpc.StatusCode:
    try:
        await generate(channel, request)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_encoded_images_of_all_requests_have_a_limit(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The loop keeps them until the requests end, and would be killed for its memory."""
    arguments = ("--model", str(checkpoint), *FLAGS, "--held-image-memory", "1KiB")
    async with (
        running_service("engine", *arguments, log=tmp_path / "log") as service,
        connect(service.target) as channel,
    ):
        session = SessionClient(channel)
        await session.send(start(1, about(png(40, 40, 1)), credit=1))
        await session.until("delta", 1)
        error = await refused(channel, about(png(40, 40, 2)))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert ids_of(await generate(channel, make_request([3, 4, 5])))
        await session.send(SessionCommand(handle=1, cancel=SessionCancel()))
        await session.until_all_ended(1)
        assert ids_of(await generate(channel, about(png(40, 40, 2))))


async def test_text_alone_is_served_where_the_operator_wants_that(
    checkpoint: Path, tmp_path: Path
) -> None:
    arguments = ("--model", str(checkpoint), *FLAGS, "--vision", "off")
    async with (
        running_service("engine", *arguments, log=tmp_path / "log") as service,
        connect(service.target) as channel,
    ):
        assert ids_of(await generate(channel, make_request([3, 4, 5])))
        error = await refused(channel, about(png(40, 40)))
        assert (error.code, error.field) == (grpc.StatusCode.UNIMPLEMENTED, "images")
        assert "takes no images" in error.message
        model = await EngineControlServiceStub(channel).GetModel(engine_pb2.GetModelRequest())
        assert Capability.CAPABILITY_IMAGES not in model.capabilities
