"""Images from HTTP to the engine and back, with everything that requests can combine."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForImageTextToText

from services.common.images import decode
from services.engine.vision.encoder import ImageEncoder, ImageFeatures
from services.tokenizer.images.image_family import ImageSize
from tests.services.shim import running_shim
from tests.stack import running_service
from tests.unit.engine.vision_checkpoints import VISION_MODELS, inputs, png
from tests.unit.tokenizer.images.checkpoints import seeing
from tests.vision import WHOLE, write_whole

IMAGE_TOKENS = 16
"""Of each image: 28 x 28 pixels in patches of 7 x 7"""
CAT, DOG = png(40, 40, 1), png(60, 30, 2)
PROMPT = "<image>def a("
SIZES = [(1, 1), (8, 8), (40, 40), (70, 30), (30, 90), (28, 28), (200, 9), (333, 222)]


@pytest.mark.parametrize("name", WHOLE)
def test_services_agree_on_the_tokens_of_an_image(name: str, tmp_path: Path) -> None:
    """The tokenizer counts from the size what the engine's encoder makes of the pixels."""
    directory = write_whole(tmp_path, name)
    family = seeing(directory).family
    encoder = ImageEncoder.load(directory, torch.float32, torch.device("cpu"))
    for width, height in SIZES:
        (features,) = encoder.encode([png(width, height)])
        assert isinstance(features, ImageFeatures), (width, height)
        expansion = family.expand(ImageSize(width, height))
        count = expansion.run * expansion.text.count(family.placeholder)
        assert count == features.embeddings.shape[1], (width, height)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """The four services with a small LLaVA."""
    model = write_whole(tmp_path_factory.mktemp("checkpoint") / "tiny-llava", "llava")
    async with running_stack(model, tmp_path_factory.mktemp("logs")) as client:
        yield client


@asynccontextmanager
async def running_stack(model: Path, logs: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Run the four services with a checkpoint, in float32; yield a client of the shim."""
    async with AsyncExitStack() as running:

        async def start(name: str, *flags: str) -> str:
            arguments = ("--model", str(model), *flags)
            service = running_service(name, *arguments, log=logs / name)
            return (await running.enter_async_context(service)).target

        grammar = await start("grammar")
        memory = ("--dtype", "float32", "--kv-memory", "64MiB")
        engine = await start("engine", *memory, "--grammar", grammar)
        tokenizer = await start("tokenizer", "--engine", engine)
        shim = await running.enter_async_context(running_shim("--tokenizer", tokenizer, "--ollama"))
        yield await running.enter_async_context(httpx.AsyncClient(base_url=shim.url, timeout=60))


def url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


async def complete(http: httpx.AsyncClient, *files: bytes, **fields: object) -> Any:
    answer = await post(http, *files, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def post(http: httpx.AsyncClient, *files: bytes, **fields: object) -> httpx.Response:
    defaults = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    body = defaults | {"images": [url(file) for file in files]} | fields
    return await http.post("/v1/completions", json=body)


async def test_usage_counts_the_tokens_of_images(http: httpx.AsyncClient) -> None:
    text = await complete(http, prompt="def a(")
    one = await complete(http, CAT)
    two = await complete(http, CAT, DOG, prompt="<image><image>def a(")
    counts = [each["usage"]["prompt_tokens"] for each in (text, one, two)]
    assert counts == [counts[0] + IMAGE_TOKENS * number for number in range(3)]


async def test_scores_depend_on_the_image(http: httpx.AsyncClient) -> None:
    scores = [
        (await complete(http, file, logprobs=1))["choices"][0]["logprobs"]["token_logprobs"]
        for file in (CAT, DOG, CAT)
    ]
    assert scores[0] == pytest.approx(scores[2], abs=1e-4)
    assert scores[0] != pytest.approx(scores[1], abs=1e-3)


async def test_streamed_equals_unstreamed(http: httpx.AsyncClient) -> None:
    fields = {"prompt": ["<image>def", "a <image>"], "n": 2, "seed": 3, "temperature": 1}
    whole = await complete(http, CAT, DOG, **fields)
    streamed = await post(http, CAT, DOG, **fields, stream=True)
    texts = dict.fromkeys(range(4), "")
    for line in streamed.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}


async def test_echo_and_logprobs_cover_the_tokens_of_images(http: httpx.AsyncClient) -> None:
    answer = await complete(http, CAT, echo=True, logprobs=1, max_tokens=2)
    choice = answer["choices"][0]
    count = answer["usage"]["prompt_tokens"] + 2
    for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(choice["logprobs"][column]) == count
    assert choice["logprobs"]["tokens"].count("<image>") == IMAGE_TOKENS
    scored = await complete(http, CAT, echo=True, logprobs=1, max_tokens=0)
    assert scored["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(
        choice["logprobs"]["token_logprobs"][1:-2], abs=1e-4
    )


async def test_ids_with_one_image_token_equal_the_text(http: httpx.AsyncClient) -> None:
    text = await complete(http, CAT, return_token_ids=True)
    whole = text["choices"][0]["prompt_token_ids"]
    image = max(whole, key=whole.count)
    short = [token for i, token in enumerate(whole) if token != image or whole.index(image) == i]
    for prompt in (whole, short):
        ids = await complete(http, CAT, prompt=prompt)
        assert ids["choices"][0]["text"] == text["choices"][0]["text"]
        assert ids["usage"] == text["usage"] | {
            key: ids["usage"][key] for key in ("cached_input_tokens", "prompt_tokens_details")
        }


async def test_best_of_and_grammars_work_with_images(http: httpx.AsyncClient) -> None:
    fields = {"best_of": 4, "n": 2, "seed": 5, "temperature": 1, "ignore_eos": False}
    answer = await complete(http, CAT, **fields, structured_outputs={"regex": "[ab]{3}"})
    texts = [choice["text"] for choice in answer["choices"]]
    assert [{*text} <= {*"ab"} and len(text) == 3 for text in texts] == [True, True]


async def test_later_turn_finds_the_image_in_the_cache(http: httpx.AsyncClient) -> None:
    """A conversation about an image must not compute it anew with every turn."""
    prompt = "abc " * 20 + "<image>" + "def " * 20
    first = await complete(http, CAT, prompt=prompt)
    again = await complete(http, CAT, prompt=prompt)
    other = await complete(http, DOG, prompt=prompt)
    cached = [each["usage"]["cached_input_tokens"] for each in (again, other)]
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert cached[0] > cached[1]


async def test_openai_sdk_sends_images_to_chats(http: httpx.AsyncClient) -> None:
    client = AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none")
    content: Any = [
        {"type": "text", "text": "What differs?"},
        {"type": "image_url", "image_url": {"url": url(CAT), "detail": "low"}},
        {"type": "image_url", "image_url": {"url": url(DOG)}},
    ]
    messages: Any = [{"role": "user", "content": content}]
    asked = {"model": "tiny-llava", "temperature": 0, "max_tokens": 5}
    answer = await client.chat.completions.create(messages=messages, **asked)  # type: ignore[call-overload]
    assert answer.usage.prompt_tokens > 2 * IMAGE_TOKENS
    assert answer.choices[0].message.content
    content.pop()
    less = await client.chat.completions.create(messages=messages, **asked)  # type: ignore[call-overload]
    assert answer.usage.prompt_tokens == less.usage.prompt_tokens + IMAGE_TOKENS


async def test_ollamas_client_sends_images_to_chats_and_prompts(http: httpx.AsyncClient) -> None:
    client = ollama.AsyncClient(host=str(http.base_url))
    [model] = (await client.list()).models
    name = model.model or ""
    assert "vision" in ((await client.show(name)).capabilities or ())
    options = {"temperature": 0, "num_predict": 4}
    counts = []
    for images in ([], [CAT], [CAT, DOG]):
        messages = [{"role": "user", "content": "What differs?", "images": images}]
        counts.append((await client.chat(name, messages, options=options)).prompt_eval_count or 0)
    assert counts == [counts[0] + IMAGE_TOKENS * number for number in range(3)]
    shown = await client.generate(name, "What differs?", images=[CAT], options=options)
    assert shown.prompt_eval_count == counts[1]
    raw = await client.generate(name, PROMPT, images=[CAT], raw=True, options=options)
    assert (raw.prompt_eval_count or 0) > IMAGE_TOKENS


@pytest.mark.parametrize("name", ["gemma3n", "gemma4, images see ahead", "glm4v", "exaone4.5"])
async def test_chat_about_an_image_scores_as_transformers_does(name: str, tmp_path: Path) -> None:
    """From the pixels to the answer, nothing of the images differs from transformers'."""
    model = write_whole(tmp_path / "tiny-gemma", name)
    part = {"type": "image_url", "image_url": {"url": url(DOG)}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
    async with running_stack(model, tmp_path) as http:
        ids = (await http.post("/tokenize", json={"messages": messages})).json()["tokens"]
        asked = {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 5}
        answer = await http.post("/v1/chat/completions", json={"messages": messages, **asked})
        assert answer.status_code == 200, answer.text
        sound = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
        refused = {"messages": [{"role": "user", "content": [sound]}]}
        refusal = await http.post("/v1/chat/completions", json=refused)
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    [token] = answer.json()["choices"][0]["logprobs"]["content"]
    found = [each["logprob"] for each in token["top_logprobs"]]
    reference: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    given = inputs(VISION_MODELS[name].processor, [[decode(DOG)]])
    tokens = torch.tensor([ids])
    if name != "gemma3n":  # its images see what text sees
        given["mm_token_type_ids"] = (tokens == reference.config.image_token_id).int()
    with torch.no_grad():
        logits = reference(input_ids=tokens, **given).logits[0, -1]
    expected = logits.log_softmax(-1).topk(5).values.tolist()
    assert found == pytest.approx(expected, abs=1e-4)
    assert refusal.status_code == 400
    assert "input_audio" in refusal.json()["error"]["message"]


@pytest.mark.parametrize(
    ("files", "fields", "param", "message"),
    [
        ([CAT], {"prompt": "no mark"}, "images", "0 <image> marks"),
        ([], {}, "images", "no images"),
        ([CAT], {"prompt": "<image><image>"}, "images", "2 <image> marks"),
        ([CAT, CAT[:500]], {"prompt": "<image><image>"}, "images[1]", "truncated"),
        ([b"no image"], {}, "images[0]", "not a PNG"),
        ([CAT] * 17, {"prompt": "<image>" * 17}, "images[16]", "at most 16"),
        ([CAT], {"suffix": "x"}, "images", "suffix"),
    ],
    ids=["no mark", "no image", "two marks", "truncated", "text", "many", "suffix"],
)
async def test_bad_images_are_refused_by_their_param(
    http: httpx.AsyncClient,
    files: list[bytes],
    fields: dict[str, object],
    param: str,
    message: str,
) -> None:
    answer = await post(http, *files, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert message in error["message"], error
