"""Requests with images: the engine's request, and each refusal."""

import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerFast

from services.common.contract import MAX_IMAGE_BYTES, MAX_IMAGES
from services.tokenizer.chat.chat_templates import ChatTemplates
from services.tokenizer.chat.conversation_processor import ConversationProcessor
from services.tokenizer.completion.completion_output import CompletionOutput
from services.tokenizer.completion.plan import CompletionPlan, plan_prompts
from services.tokenizer.completion.prompt_processor import PromptProcessor
from services.tokenizer.images import image_reader
from services.tokenizer.images.image_reader import ImageReader
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.infill import InfillOrder, InfillTemplate
from services.tokenizer.tokenizer_service import TokenizerServicer
from tests.unit.tokenizer.images.checkpoints import (
    CONTEXT,
    KINDS,
    Seeing,
    png,
    seeing,
    write_kind,
)
from tests.unit.tokenizer.images.processors import reference_ids
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.types.v1 import types_pb2 as types

_SIZES = [(40, 20), (20, 40)]
_IMAGES = [png(*size) for size in _SIZES]
_FAMILIES = ["llava", "mistral3", "gemma3", "gemma3, bytes", "gemma4", "idefics3", "qwen2_vl"]
_ROLE = completion.ROLE_USER
_STRINGS = "{%- for message in messages %}{{ '<s>' + message.content + '\\n' }}{% endfor %}"
_TEXT_PARTS = (
    "{%- for message in messages %}{{ '<s>' }}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
)


def _limits(checkpoint: Seeing, *, sees: bool = True) -> ModelLimits:
    capabilities = {
        engine_pb2.CAPABILITY_LOGPROBS,
        engine_pb2.CAPABILITY_PROMPT_LOGPROBS,
        engine_pb2.CAPABILITY_RESUME,
        *([engine_pb2.CAPABILITY_IMAGES] if sees else []),
    }
    size = checkpoint.vocabulary.size
    return ModelLimits(
        "m", "fp_0", CONTEXT, size, frozenset(), frozenset(capabilities), 5, 20, 128, 16, True
    )


async def _completed(
    checkpoint: Seeing,
    request: completion.GenerateRequest,
    *,
    sees: bool = True,
    infill: InfillTemplate | None = None,
) -> CompletionPlan:
    reader = ImageReader(checkpoint.family, checkpoint.vocabulary, "m")
    processor = PromptProcessor(request, checkpoint.vocabulary, infill, reader)
    limits = _limits(checkpoint, sees=sees)
    processor.check(limits)
    plan = processor.plan(limits)
    return plan if isinstance(plan, CompletionPlan) else await plan


def _complete(
    *texts: str, images: Sequence[bytes] = (), **fields: Any
) -> completion.GenerateRequest:
    items = [completion.Prompt(text=text) for text in texts]
    of_prompts = {name: fields.pop(name) for name in ("suffix",) if name in fields}
    prompts = completion.Prompts(items=items, images=images, **of_prompts)
    return completion.GenerateRequest(prompts=prompts, **fields)


@dataclass(frozen=True)
class _Chats:
    """Chats of one checkpoint."""

    checkpoint: Seeing
    templates: ChatTemplates
    reader: ImageReader

    async def plan(
        self,
        *messages: completion.Message,
        sees: bool = True,
        continues: bool = False,
        **fields: Any,
    ) -> CompletionPlan:
        conversation = completion.Conversation(messages=messages, continue_last_message=continues)
        request = completion.GenerateRequest(conversation=conversation, **fields)
        vocabulary = self.checkpoint.vocabulary
        processor = ConversationProcessor(request, vocabulary, self.templates, self.reader)
        limits = _limits(self.checkpoint, sees=sees)
        processor.check(limits)
        return await processor.plan(limits)


@asynccontextmanager
async def _chats(checkpoint: Seeing) -> AsyncIterator[_Chats]:
    templates = ChatTemplates(checkpoint.vocabulary, "m", checkpoint.family)
    templates.start()
    reader = ImageReader(checkpoint.family, checkpoint.vocabulary, "m")
    yield _Chats(checkpoint, templates, reader)
    reader.close()
    await templates.stop()


def _says(*parts: str | bytes, role: "completion.Role.ValueType" = _ROLE) -> completion.Message:
    return completion.Message(
        role=role,
        parts=[
            completion.ContentPart(text=part)
            if isinstance(part, str)
            else completion.ContentPart(image=part)
            for part in parts
        ],
    )


async def _refusal(request: Awaitable[CompletionPlan]) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await request
    return caught.value


def _sent(plan: CompletionPlan) -> list[tuple[int, bytes]]:
    return [(image.prompt, image.data) for image in plan.engine_request.images]


# completions


@pytest.mark.parametrize("name", KINDS)
async def test_engine_gets_expanded_ids_and_the_files(
    checkpoints: dict[str, Seeing], name: str
) -> None:
    """Every other part of the request stays as without images."""
    kind, checkpoint = KINDS[name], checkpoints[name]
    request = _complete("a <image>b", f"{kind.written}\nc", images=_IMAGES, n=2)
    plan = await _completed(checkpoint, request)
    expected = [
        reference_ids(kind, checkpoint, text, [Image.new("RGB", size)])
        for text, size in zip([f"a {kind.written}b", f"{kind.written}\nc"], _SIZES, strict=True)
    ]
    assert [list(prompt.ids) for prompt in plan.engine_request.prompts] == expected
    assert _sent(plan) == [(0, _IMAGES[0]), (1, _IMAGES[1])]
    assert plan.engine_request.n == 2
    assert plan.prompt_tokens == sum(map(len, expected))


@pytest.mark.parametrize("name", KINDS)
async def test_text_without_images_stays_as_it_is(
    checkpoints: dict[str, Seeing], name: str
) -> None:
    """Programs about images, such as HTML, contain marks. Only an image token can't be text."""
    checkpoint = checkpoints[name]
    if checkpoint.family.placeholder == "<image>":
        with pytest.raises(ServiceError, match="the request has no images") as refused:
            await _completed(checkpoint, _complete("<image> and <img>"))
        assert refused.value.field == "prompts.images"
        return
    plan = await _completed(checkpoint, _complete("<image> and <img>"))
    assert list(plan.prompts[0].ids) == checkpoint.vocabulary.encode("<image> and <img>")
    assert not plan.engine_request.images


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo_shows_placeholders_as_their_texts(
    checkpoints: dict[str, Seeing], name: str, as_ids: bool
) -> None:
    """Each logprob of an echoed prompt belongs to a token with a text."""
    kind, checkpoint = KINDS[name], checkpoints[name]
    request = _complete("a<image>b", images=_IMAGES[:1], echo=True, logprobs=1)
    if as_ids:
        request.prompts.items[0].token_ids.ids.extend(
            checkpoint.vocabulary.encode(f"a{kind.written}b", add_special_tokens=False)
        )
    request.stopping.max_tokens = 0
    [prompt] = (await _completed(checkpoint, request)).prompts
    assert len(prompt.texts) == len(prompt.ids)
    placeholder = checkpoint.family.placeholder
    assert {
        text
        for token, text in zip(prompt.ids, prompt.texts, strict=True)
        if token == checkpoint.family.placeholder_id
    } == {placeholder}
    assert "".join(prompt.texts).startswith("a")
    assert "".join(prompt.texts).endswith("b")


async def test_resumed_request_sends_the_images_again(checkpoints: dict[str, Seeing]) -> None:
    """Another engine has never seen them."""
    plan = await _completed(checkpoints["llava"], _complete("<image>", images=_IMAGES[:1]))
    output = CompletionOutput(plan, 0.0)
    output.add_tokens(engine_pb2.OutputDelta(tokens=types.TokenColumns(ids=[7])))
    request = output.remaining_request()
    assert [image.data for image in request.images] == _IMAGES[:1]
    assert list(request.resume[0].generated.ids) == [7]


async def test_images_of_a_text_only_model_are_refused(checkpoints: dict[str, Seeing]) -> None:
    """The answer would be about the text alone."""
    checkpoint = checkpoints["llava"]
    message = "m takes text alone: leave out images."
    request = _complete("<image>", images=_IMAGES[:1])
    error = await _refusal(_completed(checkpoint, request, sees=False))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompts.images")
    assert error.message == message
    async with _chats(checkpoint) as chats:
        error = await _refusal(chats.plan(_says("a", _IMAGES[0]), sees=False))
    assert (error.field, error.message) == ("conversation.messages[0].parts[1].image", message)
    reader = ImageReader(None, checkpoint.vocabulary, "m")
    with pytest.raises(ServiceError, match=message):
        reader.require("prompts.images", _limits(checkpoint))


async def test_images_with_a_suffix_are_refused(checkpoints: dict[str, Seeing]) -> None:
    """The infill prompt's texts are encoded without marks."""
    infill = InfillTemplate("x", InfillOrder.PREFIX_SUFFIX_MIDDLE, 1, 2, 3, None, ())
    for template in (None, infill):
        request = _complete("<image>", images=_IMAGES[:1], suffix="b")
        error = await _refusal(_completed(checkpoints["llava"], request, infill=template))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompts.images")
        assert "suffix" in error.message


async def test_damaged_image_is_refused_by_its_place(checkpoints: dict[str, Seeing]) -> None:
    """The engine would refuse the request after it was queued, or see half an image."""
    checkpoint = checkpoints["llava"]
    bad = {
        _IMAGES[1][:-30]: "truncated or damaged",
        b"": "not a PNG",
        b"GIF89a": "not a PNG",
        _png_of_pixels(1 << 13, (1 << 12) + 1): "pixels",
    }
    for data, why in bad.items():
        request = _complete("<image><image>", images=[_IMAGES[0], data])
        error = await _refusal(_completed(checkpoint, request))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompts.images[1]")
        assert why in error.message
    async with _chats(checkpoint) as chats:
        error = await _refusal(chats.plan(_says("a"), _says("b", b"x", _IMAGES[0])))
    assert error.field == "conversation.messages[1].parts[1].image"


def _png_of_pixels(width: int, height: int) -> bytes:
    """Return a small file of many pixels."""
    header = png(1, 1)
    place = header.index(b"IHDR") + 4
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data = header[:place] + size + header[place + 8 :]
    return data[: place + 13] + _crc(data[place - 4 : place + 13]) + data[place + 17 :]


def _crc(chunk: bytes) -> bytes:
    return zlib.crc32(chunk).to_bytes(4, "big")


async def test_number_and_size_of_images_are_limited(checkpoints: dict[str, Seeing]) -> None:
    """One request would fill the memory of two services."""
    checkpoint = checkpoints["llava"]
    third = b"\0" * (17 * 1024 * 1024)
    bad: list[tuple[str, list[bytes]]] = [
        ("prompts.images", [b""] * (MAX_IMAGES + 1)),
        ("prompts.images[1]", [b"", b"\0" * (MAX_IMAGE_BYTES + 1)]),
        ("prompts.images", [third] * 3),
    ]
    async with _chats(checkpoint) as chats:
        for field, images in bad:
            request = _complete("<image>" * len(images), images=images)
            error = await _refusal(_completed(checkpoint, request))
            assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
            error = await _refusal(chats.plan(_says("a", *images)))
            expected = (
                "conversation.messages"
                if field == "prompts.images"
                else "conversation.messages[0].parts[2].image"
            )
            assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, expected)


async def test_images_beyond_the_queue_are_refused(
    checkpoints: dict[str, Seeing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of images would fill the memory while they wait for a thread."""
    monkeypatch.setattr(image_reader, "_MAX_WAITING", 0)
    request = _complete("<image>", images=_IMAGES[:1])
    error = await _refusal(_completed(checkpoints["llava"], request))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert error.retry_seconds is not None


# lengths


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("as_ids", [False, True])
async def test_cut_keeps_images_whole(
    checkpoints: dict[str, Seeing], name: str, as_ids: bool
) -> None:
    """The rest of an image would be placeholders without one."""
    checkpoint = checkpoints[name]
    text = "a" * 40 + "<image>b"

    def request(keep: int | None) -> completion.GenerateRequest:
        cut = {} if keep is None else {"truncate_prompt_tokens": keep}
        made = _complete(text, images=_IMAGES[:1], **cut)
        if as_ids:
            made.prompts.items[0].token_ids.ids.extend(whole)
        return made

    whole: Sequence[int] = ()
    if as_ids:
        whole = (await _completed(checkpoint, _complete(text, images=_IMAGES[:1]))).prompts[0].ids
    ids = list((await _completed(checkpoint, request(None))).prompts[0].ids)
    placeholders = ids.count(checkpoint.family.placeholder_id)
    fits = len(ids) - 30
    kept = (await _completed(checkpoint, request(fits))).prompts[0].ids
    assert kept.count(checkpoint.family.placeholder_id) == placeholders
    assert list(kept[-fits + 1 :]) == ids[-fits + 1 :]
    error = await _refusal(_completed(checkpoint, request(placeholders)))
    assert (error.code, error.field) == (grpc.StatusCode.OUT_OF_RANGE, "prompts.images")


async def test_cut_of_a_long_text_keeps_images_whole(checkpoints: dict[str, Seeing]) -> None:
    """Only the end of a long text is encoded."""
    checkpoint = checkpoints["gemma3"]
    long = "ab\n" * 400_000
    plan = await _completed(
        checkpoint, _complete(long + "<image>b", images=_IMAGES[:1], truncate_prompt=True)
    )
    assert plan.prompts[0].ids.count(checkpoint.family.placeholder_id) == 4
    for text in (f"<image>{long}", f"{long}<image>{long}"):
        request = _complete(text, images=_IMAGES[:1], truncate_prompt=True)
        error = await _refusal(_completed(checkpoint, request))
        assert (error.code, error.field) == (grpc.StatusCode.OUT_OF_RANGE, "prompts.images")


async def test_images_beyond_the_context_are_refused(checkpoints: dict[str, Seeing]) -> None:
    """The tokens of images count, not only those of text."""
    checkpoint = checkpoints["qwen3_vl"]
    images = [png(1200, 1200)] * 5
    request = _complete("<image>" * 5, images=images)
    error = await _refusal(_completed(checkpoint, request))
    assert (error.code, error.reason) == (
        grpc.StatusCode.OUT_OF_RANGE,
        "CONTEXT_LENGTH_EXCEEDED",
    )
    request = _complete("<image>" * 5, images=images, truncate_prompt=True)
    error = await _refusal(_completed(checkpoint, request))
    assert (error.code, error.field) == (grpc.StatusCode.OUT_OF_RANGE, "prompts.images")
    async with _chats(checkpoint) as chats:
        error = await _refusal(chats.plan(_says(*images)))
        assert (error.code, error.field) == (grpc.StatusCode.OUT_OF_RANGE, "conversation.messages")
        error = await _refusal(chats.plan(_says(*_IMAGES), truncate_prompt_tokens=5))
        assert (error.code, error.field) == (grpc.StatusCode.OUT_OF_RANGE, "conversation.messages")


async def test_oldest_messages_are_left_out_with_their_images(
    checkpoints: dict[str, Seeing],
) -> None:
    """Each image that is left belongs to its own message."""
    checkpoint = checkpoints["qwen3_vl"]
    answer = _says("a", role=completion.ROLE_ASSISTANT)
    old = [_says(*[png(1200, 1200)] * 5), answer]
    left = [_says("b", _IMAGES[0]), answer, _says(_IMAGES[1], "c")]
    async with _chats(checkpoint) as chats:
        error = await _refusal(chats.plan(*old, *left))
        assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
        cut = await chats.plan(*old, *left, drop_oldest_messages=True)
        alone = await chats.plan(*left)
    assert cut.prompts[0].ids == alone.prompts[0].ids
    assert cut.engine_request.images == alone.engine_request.images
    assert cut.images == alone.images


# chats


@pytest.mark.parametrize("name", _FAMILIES)
async def test_chat_with_images_equals_that_of_transformers(
    checkpoints: dict[str, Seeing], name: str
) -> None:
    """The template decides where an image stands, and the processor what it becomes."""
    kind, checkpoint = KINDS[name], checkpoints[name]
    messages = [_says(_IMAGES[0], "what?"), _says("a", _IMAGES[1], "b\n"), _says("c")]
    written: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image"},
                {"type": "text", "text": "b\n"},
            ],
        },
        {"role": "user", "content": "c"},
    ]
    config = json.loads((checkpoint.directory / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(checkpoint.directory / "tokenizer.json"),
        chat_template=config["chat_template"],
    )
    text = str(tokenizer.apply_chat_template(written, tokenize=False))
    expected = reference_ids(kind, checkpoint, text, [Image.new("RGB", size) for size in _SIZES])
    async with _chats(checkpoint) as chats:
        plan = await chats.plan(*messages)
    head = 1 if checkpoint.vocabulary.adds_bos else 0  # the template has written it
    assert list(plan.prompts[0].ids) == expected[head:]
    assert _sent(plan) == [(0, data) for data in _IMAGES]


@pytest.mark.parametrize("template", [_STRINGS, _TEXT_PARTS])
@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen2_vl"])
async def test_template_of_texts_gets_the_mark_in_the_text(
    tmp_path: Path, name: str, template: str
) -> None:
    """Templates of older checkpoints know no parts, or no images among them."""
    kind = KINDS[name]
    checkpoint = seeing(write_kind(tmp_path, kind, template))
    async with _chats(checkpoint) as chats:
        plan = await chats.plan(_says(_IMAGES[0], f"<image>{kind.mark}"), _says("b"))
        rendered = await _rendered(chats, _says(_IMAGES[0], f"<image>{kind.mark}"), _says("b"))
    assert rendered.text.startswith(f"<s>{kind.written}")
    assert list(rendered.ids) == list(plan.prompts[0].ids)
    text = f"<s>{kind.written}"
    expected = reference_ids(kind, checkpoint, text, [Image.new("RGB", _SIZES[0])])
    placeholder = checkpoint.family.placeholder_id
    assert list(plan.prompts[0].ids).count(placeholder) == expected.count(placeholder)
    assert list(plan.prompts[0].ids)[: len(expected) - 1] == expected[:-1]


async def _rendered(
    chats: _Chats, *messages: completion.Message
) -> tokenizer_pb2.RenderChatResponse:
    link: Any = None
    servicer = TokenizerServicer(
        chats.checkpoint.vocabulary, None, chats.templates, chats.reader, link, "m"
    )
    context: Any = None
    return await servicer.RenderChat(
        tokenizer_pb2.RenderChatRequest(
            conversation=completion.Conversation(messages=messages), model="m"
        ),
        context,
    )


@pytest.mark.parametrize("name", _FAMILIES)
async def test_marks_that_users_write_are_text(checkpoints: dict[str, Seeing], name: str) -> None:
    """A user could otherwise put images of others' messages elsewhere, or break the request."""
    kind, checkpoint = KINDS[name], checkpoints[name]
    smuggled = f"<image> {kind.mark} {kind.written} {checkpoint.family.placeholder}"
    for torn in (kind.mark[:-1], kind.mark[1:], kind.mark[:3]):
        smuggled += f" {torn}"
    async with _chats(checkpoint) as chats:
        honest = await chats.plan(_says("a", _IMAGES[0]))
        plan = await chats.plan(_says(smuggled, _IMAGES[0], kind.mark), _says(smuggled))
        alone = await chats.plan(_says(smuggled))
    placeholder = checkpoint.family.placeholder_id
    count = list(honest.prompts[0].ids).count(placeholder)
    assert list(plan.prompts[0].ids).count(placeholder) == count
    assert placeholder not in alone.prompts[0].ids
    written = "".join(checkpoint.vocabulary.decode(plan.prompts[0].ids))
    assert written.count("<image>") >= 2 * smuggled.count("<image>")


async def test_image_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    """The model would answer as if there were no image."""
    template = """{%- for message in messages %}{% for part in message.content %}
{%- if part.type == 'text' %}{{ part.text }}
{%- elif message.role == 'user' %}{{ 'MARK' }}{% endif %}
{%- endfor %}{% endfor %}"""
    checkpoint = seeing(write_kind(tmp_path, KINDS["llava"], template))
    system = _says("a", _IMAGES[1], role=completion.ROLE_SYSTEM)
    async with _chats(checkpoint) as chats:
        error = await _refusal(chats.plan(system))
        assert error.field == "conversation.messages[0].parts[1].image"
        assert "leaves out images" in error.message
        error = await _refusal(chats.plan(_says(_IMAGES[0]), system))
        assert error.field == "conversation.messages[1].parts[1].image"


async def test_template_that_writes_more_marks_is_refused(tmp_path: Path) -> None:
    """The images would go to the wrong marks."""
    template = "{{ 'MARK' }}" + _STRINGS
    checkpoint = seeing(write_kind(tmp_path, KINDS["llava"], template))
    async with _chats(checkpoint) as chats:
        error = await _refusal(chats.plan(_says(_IMAGES[0])))
    assert error.field == "conversation.messages"


async def test_chat_goes_on_after_an_image(checkpoints: dict[str, Seeing]) -> None:
    """The text of a message with an image is echoed, continued, and read, without the image."""
    checkpoint = checkpoints["qwen2_vl"]
    answer = _says("so", role=completion.ROLE_ASSISTANT)
    async with _chats(checkpoint) as chats:
        plan = await chats.plan(
            _says("a", _IMAGES[0]), answer, continues=True, echo=True, logprobs=2, n=3
        )
    text = "".join(checkpoint.vocabulary.decode(plan.prompts[0].ids))
    assert text.endswith("assistant: so")
    assert plan.engine_request.n == 3


async def test_image_behind_many_small_parts_is_seen(checkpoints: dict[str, Seeing]) -> None:
    """Small requests are handled apart from large ones, and from those with images."""
    async with _chats(checkpoints["llava"]) as chats:
        plan = await chats.plan(_says(*["a"] * 1_000, _IMAGES[0]))
        assert _sent(plan) == [(0, _IMAGES[0])]


async def test_large_text_beside_an_image_is_accepted(checkpoints: dict[str, Seeing]) -> None:
    """Images do not count into the size of a conversation."""
    checkpoint = checkpoints["llava"]
    file = _IMAGES[0] + b"\0" * (9 * 1024 * 1024)
    async with _chats(checkpoint) as chats:
        plan = await chats.plan(_says("ab\n" * 100, file), user="u")
    assert len(plan.engine_request.images[0].data) == len(file)


async def test_render_of_a_chat_with_images_needs_no_engine(
    checkpoints: dict[str, Seeing],
) -> None:
    """A client counts the tokens of a conversation before it sends that."""
    async with _chats(checkpoints["idefics3"]) as chats:
        plan = await chats.plan(_says("a", _IMAGES[0]))
        rendered = await _rendered(chats, _says("a", _IMAGES[0]))
        assert list(rendered.ids) == list(plan.prompts[0].ids)
        assert rendered.text == "<s>user: a<image>\n"
        blind = replace(chats, reader=ImageReader(None, chats.checkpoint.vocabulary, "m"))
        with pytest.raises(ServiceError, match="takes text alone"):
            await _rendered(blind, _says("a", _IMAGES[0]))


def test_plan_without_images_has_none(checkpoints: dict[str, Seeing]) -> None:
    """Text-only requests cost what they cost before."""
    checkpoint = checkpoints["llava"]
    plan = plan_prompts(_complete("a"), checkpoint.vocabulary, None, _limits(checkpoint))
    assert not plan.engine_request.images
