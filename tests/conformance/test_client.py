"""Tests of tokenwire.client with a running stack."""

import asyncio
import json
import math

import grpc
import pytest

from tests.stack import Stack, is_busy, left_early, watch_load
from tokenwire.channel import connect
from tokenwire.channel_options import MESSAGE_LIMIT
from tokenwire.client import (
    Client,
    EngineClient,
    GenerateOptions,
    GrammarSpec,
    Message,
    Tool,
    ToolChoice,
)
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1.completion_pb2 import GenerateRequest, Prompt, Prompts
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.results import FinishReason

PROMPT = "def add(a, b):"


async def test_text_and_ids_streamed_and_whole_agree(stack: Stack) -> None:
    """The answer does not depend on the service or the method that a team uses."""
    async with Client(stack.tokenizer) as client, EngineClient(stack.engine) as engine:
        ids = (await client.encode(PROMPT)).ids
        whole = await client.generate(PROMPT, max_tokens=24, temperature=0)
        of_ids = await client.generate(ids, max_tokens=24, temperature=0)
        async with client.stream(PROMPT, max_tokens=24, temperature=0) as stream:
            deltas = [delta async for delta in stream]
        tokens = await engine.generate(ids, max_tokens=24, temperature=0)
        assert of_ids.choices == whole.choices
        assert "".join(delta.text for delta in deltas) == whole.text
        assert tokens.token_ids == whole.choices[0].token_ids
        assert await client.decode(tokens.token_ids) == whole.text
        assert stream.usage is not None
        assert stream.usage.completion_tokens == whole.usage.completion_tokens
        assert deltas[-1].finish_reason is whole.choices[0].finish_reason


async def test_streamed_chat_equals_whole_chat(stack: Stack) -> None:
    messages = [Message("system", "Be brief."), Message("user", "Hello!")]
    async with Client(stack.tokenizer) as client:
        asked: GenerateOptions = {"max_tokens": 24, "temperature": 0, "logprobs": 2, "n": 2}
        whole = await client.generate(messages, **asked)
        async with client.stream(messages, **asked) as stream:
            deltas = [delta async for delta in stream]
    assert [choice.index for choice in whole.choices] == [0, 1]
    for choice in whole.choices:
        own = [delta for delta in deltas if delta.index == choice.index]
        assert "".join(delta.text for delta in own) == choice.message.content
        assert tuple(token for delta in own for token in delta.token_ids) == choice.token_ids
        assert own[-1].finish_reason is choice.finish_reason
        assert choice.scores is not None
        assert b"".join(choice.scores.data).decode() == choice.text
        assert all(len(top) == 2 for top in choice.scores.top_data)
    assert stream.usage is not None
    assert stream.usage.completion_tokens == whole.usage.completion_tokens


async def test_answer_with_a_tool_call_continues_the_conversation(stack: Stack) -> None:
    """The next request contains the answer's message unchanged."""
    schema = {"type": "object", "properties": {"city": {"maxLength": 9, "type": "string"}}}
    tool = Tool(name="get_weather", description="Weather", parameters_json=json.dumps(schema))
    messages = [Message("user", "What is the weather in Rome?")]
    async with Client(stack.tokenizer) as client:
        choice = ToolChoice(name="get_weather")
        asked: GenerateOptions = {"tools": [tool], "seed": 1}
        answer = await client.generate(
            messages, **asked | {"tool_choice": choice, "max_tokens": 60}
        )
        assert answer.message.content is None
        [call] = answer.message.tool_calls
        assert (call.name, type(json.loads(call.arguments))) == ("get_weather", dict)
        messages += [answer.message, Message("tool", "Sunny", tool_call_id=call.id)]
        last = await client.generate(messages, **asked | {"max_tokens": 8})
        assert last.usage.prompt_tokens > answer.usage.prompt_tokens
        with pytest.raises(ServiceError) as refused:
            await client.generate([*messages, Message("tool", "Rain")])
        assert refused.value.field == "conversation.messages[3].tool_call_id"


async def test_concurrent_requests_of_one_client_get_their_own_answers(stack: Stack) -> None:
    prompts = [f"def function_{i}(x):\n    return " for i in range(24)]
    async with Client(stack.tokenizer) as client:
        alone = [await client.generate(p, max_tokens=8, temperature=0) for p in prompts[:4]]
        together = await asyncio.gather(
            *(client.generate(p, max_tokens=8, temperature=0) for p in prompts)
        )
    assert [one.text for one in together[:4]] == [one.text for one in alone]


async def test_choices_of_several_prompts_are_returned_in_order(stack: Stack) -> None:
    async with Client(stack.tokenizer) as client:
        answer = await client.generate(["import ", "class "], n=2, max_tokens=4, seed=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.seed == 3
        again = await client.generate(["import ", "class "], n=2, max_tokens=4, seed=3)
        assert again.choices == answer.choices


async def test_prompt_logprobs_equal_the_logprobs_of_generation(stack: Stack) -> None:
    async with Client(stack.tokenizer) as client, EngineClient(stack.engine) as engine:
        ids = (await client.encode(PROMPT)).ids
        generated = await engine.generate(ids, max_tokens=8, temperature=0, logprobs=2)
        scores = generated.outputs[0].scores
        assert scores is not None
        whole = [*ids, *generated.token_ids]
        scored = await engine.generate(whole, max_tokens=0, prompt_logprobs=2)
        of_prompt = scored.prompt_scores[0]
        assert of_prompt is not None
        assert len(of_prompt.logprobs) == len(whole) - 1
        assert of_prompt.logprobs[-len(scores.logprobs) :] == pytest.approx(
            scores.logprobs, abs=1e-4
        )
        assert scored.outputs[0].token_ids == ()

        echoed = await client.generate(PROMPT, max_tokens=2, echo=True, logprobs=1, temperature=0)
        entries = echoed.choices[0].scores
        assert entries is not None
        assert math.isnan(entries.logprobs[0])
        assert "".join(entries.texts) == echoed.text
        assert echoed.text.startswith(PROMPT)


async def test_output_follows_a_grammar(stack: Stack) -> None:
    async with Client(stack.tokenizer) as client:
        answer = await client.generate(
            "The year is ", grammar=GrammarSpec(regex="[0-9]{4}"), max_tokens=16
        )
    assert len(answer.text) == 4
    assert answer.text.isdecimal()
    assert answer.choices[0].finish_reason is FinishReason.STOP


async def test_refusals_name_the_field_and_leave_the_client_usable(stack: Stack) -> None:
    async with Client(stack.tokenizer) as client, EngineClient(stack.engine) as engine:
        with pytest.raises(ServiceError) as refused:
            await client.generate("x", temperature=9)
        assert refused.value.code.name == "INVALID_ARGUMENT"
        assert refused.value.field == "sampling.temperature"
        with pytest.raises(ServiceError) as unknown:
            await client.generate("x", model="no-such-model")
        assert unknown.value.code.name == "NOT_FOUND"
        with pytest.raises(ServiceError) as out_of_range:
            await engine.generate([2**31])
        assert out_of_range.value.code.name == "INVALID_ARGUMENT"
        assert (await client.generate("x", max_tokens=1)).usage.completion_tokens == 1


async def test_refusal_of_a_huge_name_is_short_and_fails_one_request(stack: Stack) -> None:
    """All requests of a client share one gRPC stream. An oversized message would break it."""
    request = GenerateRequest(model="name" * 5_000, prompts=Prompts(items=[Prompt(text="x")]))
    async with Client(stack.tokenizer) as client, connect(stack.tokenizer) as channel:
        async with client.stream("x", max_tokens=40, ignore_eos=True) as other:
            await anext(other)
            for name in ("\x01" * 2**23, "é" * 2**22):  # Quoting makes the first four times longer.
                with pytest.raises(ServiceError) as unknown:
                    await client.generate("x", model=name)
                assert unknown.value.code.name == "NOT_FOUND"
                assert len(unknown.value.message) < 1_300
            assert [delta async for delta in other][-1].finish_reason is FinishReason.LENGTH
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await anext(aiter(CompletionServiceStub(channel).Generate(request)))
        assert ServiceError.from_rpc_error(failed.value).reason == unknown.value.reason


async def test_request_over_the_message_limit_fails_alone(stack: Stack) -> None:
    async with (
        Client(stack.tokenizer) as client,
        client.stream("x", max_tokens=40, ignore_eos=True) as other,
    ):
        await anext(other)
        with pytest.raises(ServiceError) as refused:
            await client.generate("x" * MESSAGE_LIMIT)
        assert refused.value.reason == "REQUEST_TOO_LARGE"
        assert refused.value.code.name == "INVALID_ARGUMENT"
        with pytest.raises(ServiceError) as too_long:  # This one reaches the service.
            await client.generate("x" * (MESSAGE_LIMIT - 1024))
        assert too_long.value.code.name == "OUT_OF_RANGE"
        assert [delta async for delta in other][-1].finish_reason is FinishReason.LENGTH


async def test_closed_stream_or_cancelled_call_frees_its_kv_blocks(stack: Stack) -> None:
    asked: GenerateOptions = {"n": 16, "max_tokens": 1500, "ignore_eos": True}
    async with Client(stack.tokenizer) as client:
        async with (
            left_early(stack.engine, 16 * 1500),
            client.stream("x", **asked) as stream,
        ):
            await anext(stream)
        async with left_early(stack.engine, 16 * 1500):
            waiting = asyncio.create_task(client.generate("x", **asked))
            await watch_load(stack.engine, until=is_busy)
            waiting.cancel()
        assert waiting.cancelled()


async def test_clients_describe_the_served_model(stack: Stack) -> None:
    async with Client(stack.tokenizer) as client, EngineClient(stack.engine) as engine:
        (model,) = await client.models()
        told = await engine.model()
        assert model.id == told.id == stack.model_id
        assert model.infill
        assert model.grammar
        assert model.chat
        assert told.dtype == "float32"
        assert model.context_length == told.context_length
        assert {"sampling", "stopping", "prompt_logprobs", "grammar"} <= told.capabilities
