"""Completions through the openai SDK, sync and async, with every field of the stack."""

import asyncio
import json
import re
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion

from tests.conformance.sdk import Fields
from tests.stack import Stack

PROMPT = "def fibonacci(n):\n"


def _texts(chunks: list[Completion]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


def _tokens(answer: Completion) -> list[str]:
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    return logprobs.tokens or []


def _extra(answer: Completion) -> dict[str, Any]:
    """Return the fields of the first choice that OpenAI does not have."""
    return answer.choices[0].model_extra or {}


def test_completion_has_the_fields_of_openai(client: OpenAI, stack: Stack) -> None:
    answer = client.completions.create(
        model=stack.model_id,
        prompt=PROMPT,
        max_tokens=8,
        temperature=0,
        user="me",
        extra_body={"ignore_eos": True},
    )
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == stack.model_id
    assert answer.system_fingerprint
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer._request_id


def test_streamed_completion_equals_whole_completion(client: OpenAI) -> None:
    whole = client.completions.create(
        model="default", prompt=PROMPT, max_tokens=32, temperature=0, logprobs=2
    )
    chunks = list(
        client.completions.create(
            model="default", prompt=PROMPT, max_tokens=32, temperature=0, logprobs=2, stream=True
        )
    )
    assert _texts(chunks) == {0: whole.choices[0].text}
    tokens = [token for chunk in chunks if chunk.choices for token in _tokens(chunk)]
    assert tokens == _tokens(whole)
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]


def test_include_usage_puts_usage_into_a_chunk_of_its_own(client: OpenAI) -> None:
    """Programs that bill by usage read exactly one chunk."""
    asked: Fields = {"model": "default", "prompt": PROMPT, "max_tokens": 4}
    asked |= {"extra_body": {"ignore_eos": True}}
    counted: Fields = asked | {"stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(**counted, stream=True))
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    unasked = list(client.completions.create(**asked, stream=True))
    assert unasked[-1].choices[0].finish_reason == "length"
    assert unasked[-1].usage is not None


def test_choices_of_several_prompts_are_indexed_in_order(client: OpenAI) -> None:
    asked: Fields = {"model": "default", "prompt": ["import ", "class "], "n": 2, "max_tokens": 6}
    asked |= {"extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**asked, seed=11, temperature=0.9)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    streamed = list(client.completions.create(**asked, seed=11, temperature=0.9, stream=True))
    assert _texts(streamed) == {choice.index: choice.text for choice in whole.choices}
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24


def test_equal_seeds_repeat_the_choices_and_choices_differ(client: OpenAI) -> None:
    asked: Fields = {"model": "default", "prompt": PROMPT, "max_tokens": 24, "n": 3, "seed": 42}
    first = client.completions.create(**asked, temperature=1.0)
    second = client.completions.create(**asked, temperature=1.0)
    assert [c.text for c in first.choices] == [c.text for c in second.choices]
    assert len({c.text for c in first.choices}) > 1


def test_beams_come_best_first_and_best_of_keeps_the_first(client: OpenAI) -> None:
    asked: Fields = {"model": "default", "prompt": PROMPT, "max_tokens": 12, "logprobs": 0}
    beams: Fields = {"use_beam_search": True, "length_penalty": 0, "ignore_eos": True}
    every = client.completions.create(**asked, n=4, extra_body=beams).choices
    totals = [sum((choice.logprobs and choice.logprobs.token_logprobs) or ()) for choice in every]
    assert totals == sorted(totals, reverse=True)
    greedy = client.completions.create(**asked, temperature=0, extra_body={"ignore_eos": True})
    scores = greedy.choices[0].logprobs
    assert scores is not None
    assert totals[0] >= sum(scores.token_logprobs or ()) - 1e-3
    some = client.completions.create(**asked, n=2, best_of=4, extra_body=beams).choices
    assert [choice.text for choice in some] == [choice.text for choice in every[:2]]
    streamed = list(client.completions.create(**asked, n=4, stream=True, extra_body=beams))
    assert _texts(streamed) == {choice.index: choice.text for choice in every}
    stop = every[0].text[4:7]
    cut = client.completions.create(**asked, n=4, stop=stop, extra_body=beams).choices
    assert [choice.text for choice in cut] == [choice.text.split(stop)[0] for choice in every]


def test_prompt_of_token_ids_is_answered_like_its_text(client: OpenAI, stack: Stack) -> None:
    body = {"prompt": PROMPT}
    ids = httpx.post(f"{stack.url}/tokenize", json=body, timeout=60).json()["tokens"]
    of_text = client.completions.create(
        model="default", prompt=PROMPT, max_tokens=16, temperature=0
    )
    for prompt in (ids, [ids]):
        of_ids = client.completions.create(
            model="default", prompt=prompt, max_tokens=16, temperature=0
        )
        assert of_ids.choices[0].text == of_text.choices[0].text
        assert of_ids.usage is not None
        assert of_ids.usage.prompt_tokens == len(ids)


def test_echoed_logprobs_cover_prompt_and_output(client: OpenAI, stack: Stack) -> None:
    ids = httpx.post(f"{stack.url}/tokenize", json={"prompt": PROMPT}, timeout=60).json()["tokens"]
    answer = client.completions.create(
        model="default", prompt=[ids], max_tokens=1, temperature=0, echo=True, logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    lengths = {
        len(logprobs.tokens or ()),
        len(logprobs.token_logprobs),
        len(logprobs.top_logprobs or ()),
        len(logprobs.text_offset or ()),
    }
    assert lengths == {len(ids) + 1}
    assert logprobs.token_logprobs[0] is None
    assert answer.choices[0].text.startswith(PROMPT)
    assert "".join(logprobs.tokens or ()) == answer.choices[0].text


def test_max_tokens_0_with_echo_returns_the_prompt_alone(client: OpenAI) -> None:
    answer = client.completions.create(
        model="default", prompt=PROMPT, max_tokens=0, echo=True, logprobs=0
    )
    assert answer.choices[0].text == PROMPT
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_output_ends_before_a_stop_string_or_includes_it(client: OpenAI) -> None:
    asked: Fields = {"model": "default", "prompt": PROMPT, "max_tokens": 64, "temperature": 0}
    on = {"ignore_eos": True}
    free = client.completions.create(**asked, extra_body=on).choices[0].text
    stop = free[10:13]
    answer = client.completions.create(**asked, stop=[stop, "never there"], extra_body=on)
    choice = answer.choices[0]
    assert choice.text == free[: free.index(stop)]
    assert choice.finish_reason == "stop"
    streamed = list(client.completions.create(**asked, stop=stop, stream=True, extra_body=on))
    assert _texts(streamed) == {0: choice.text}
    kept = client.completions.create(
        **asked, stop=stop, extra_body=on | {"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == choice.text + stop


def test_suffix_returns_the_middle_alone(client: OpenAI) -> None:
    answer = client.completions.create(
        model="default",
        prompt="def mean(values):\n    ",
        suffix="\n    return total / len(values)\n",
        max_tokens=24,
        temperature=0,
    )
    assert "<|" not in answer.choices[0].text
    assert not answer.choices[0].text.endswith("return total / len(values)\n")


def test_top_k_1_min_p_1_and_top_p_0_are_greedy_at_any_temperature(client: OpenAI) -> None:
    asked: Fields = {"model": "default", "prompt": PROMPT, "max_tokens": 12}
    greedy = client.completions.create(**asked, temperature=0).choices[0].text
    for narrow in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 0}):
        extra = client.completions.create(**asked, temperature=1.5, extra_body=narrow)
        assert extra.choices[0].text == greedy


REPEATING = "one two three four\none two three four\none two three four\none two"


@pytest.mark.parametrize(
    "asked",
    [
        {"frequency_penalty": 2},
        {"presence_penalty": 2},
        {"extra_body": {"repetition_penalty": 2}},
        {"extra_body": {"dry_multiplier": 5, "dry_sequence_breakers": ["#"]}},
    ],
    ids=str,
)
def test_penalties_reduce_repetition(client: OpenAI, asked: Fields) -> None:
    extra: Fields = {"ignore_eos": True, "return_token_ids": True, **asked.pop("extra_body", {})}

    def distinct(**fields: Any) -> int:
        answer = client.completions.create(
            model="default", prompt=REPEATING, max_tokens=48, temperature=0, **fields
        )
        return len(set(_extra(answer)["token_ids"]))

    free = distinct(extra_body={"ignore_eos": True, "return_token_ids": True})
    assert distinct(extra_body=extra, **asked) > free


def test_logit_bias_forces_and_forbids(client: OpenAI) -> None:
    def ids(logit_bias: dict[str, int]) -> list[int]:
        extra = {"ignore_eos": True, "return_token_ids": True}
        answer = client.completions.create(
            model="default",
            prompt=PROMPT,
            max_tokens=6,
            temperature=0,
            logit_bias=logit_bias,
            extra_body=extra,
        )
        token_ids: list[int] = _extra(answer)["token_ids"]
        return token_ids

    assert ids({"300": 100}) == [300] * 6
    free = ids({})
    assert not set(free) & set(ids({str(token): -100 for token in free}))


def test_mirostat_is_greedy_at_perplexity_1_and_repeats_a_seed(client: OpenAI) -> None:

    def text(**fields: Any) -> str:
        answer: Completion = client.completions.create(
            model="default", prompt=PROMPT, max_tokens=24, seed=3, **fields
        )
        return answer.choices[0].text

    assert text(extra_body={"mirostat_target": 1}) == text(temperature=0)
    free = text(extra_body={"mirostat_target": 50, "mirostat_lr": 0.2})
    assert free == text(extra_body={"mirostat_target": 50, "mirostat_lr": 0.2})
    assert free != text(temperature=0)


def test_min_tokens_and_stop_token_ids_decide_the_length(client: OpenAI) -> None:
    answer = client.completions.create(
        model="default",
        prompt=PROMPT,
        max_tokens=48,
        seed=8,
        extra_body={"ignore_eos": True, "min_tokens": 48, "return_token_ids": True},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 48
    ids = _extra(answer)["token_ids"]
    assert len(ids) == 48
    stop_id = ids[5]
    stopped = client.completions.create(
        model="default",
        prompt=_extra(answer)["prompt_token_ids"],
        max_tokens=48,
        seed=8,
        extra_body={"stop_token_ids": [stop_id], "return_token_ids": True},
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert _extra(stopped)["stop_reason"] == stop_id
    assert _extra(stopped)["token_ids"] == ids[: ids.index(stop_id) + 1]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 2]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "constraint",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"grammar": {"type": "json_schema", "value": SCHEMA}},
    ],
)
def test_output_follows_a_json_schema(client: OpenAI, constraint: dict[str, object]) -> None:
    answer = client.completions.create(
        model="default", prompt="Ada: ", max_tokens=200, seed=1, extra_body=constraint
    )
    assert answer.choices[0].finish_reason == "stop"
    value = json.loads(answer.choices[0].text)
    assert set(value) == {"name", "age"}
    assert value["age"] in (1, 2)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ({"type": "regex", "value": "(yes|no)"}, "yes|no"),
        ({"type": "lark", "value": 'start: "a" | "bc"'}, "a|bc"),
    ],
)
def test_output_follows_a_grammar(client: OpenAI, grammar: dict[str, str], pattern: str) -> None:
    answer = client.completions.create(
        model="default", prompt="x", max_tokens=16, extra_body={"grammar": grammar}
    )
    assert re.fullmatch(pattern, answer.choices[0].text)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"logprobs": 6}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"stop": [""]}, "stop"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": "x " * 20_000}, "prompt"),
        ({"extra_body": {"grammar": {"type": "regex", "value": "("}}}, "grammar"),
    ],
)
def test_refusal_names_the_parameter_and_leaves_the_client_usable(
    client: OpenAI, body: dict[str, object], param: str
) -> None:
    asked: Fields = {"model": "default", "prompt": "x", "max_tokens": 1} | body
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**asked)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"
    assert refused.value.request_id
    assert client.completions.create(model="default", prompt="x", max_tokens=1).choices


def test_unknown_model_is_404(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="no-such-model", prompt="x")
    assert refused.value.code == "model_not_found"


def test_models_are_listed_and_retrieved(client: OpenAI, stack: Stack) -> None:
    assert [model.id for model in client.models.list()] == [stack.model_id]
    assert client.models.retrieve(stack.model_id).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


async def test_sixteen_concurrent_streams_get_the_answers_of_single_requests(stack: Stack) -> None:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        prompts = [f"def function_{i}(x):\n" for i in range(16)]

        async def whole(prompt: str) -> str:
            answer = await client.completions.create(
                model="default", prompt=prompt, max_tokens=24, temperature=0
            )
            return answer.choices[0].text

        async def streamed(prompt: str) -> str:
            chunks = await client.completions.create(
                model="default", prompt=prompt, max_tokens=24, temperature=0, stream=True
            )
            return "".join([c.choices[0].text async for c in chunks if c.choices])

        alone = [await whole(prompt) for prompt in prompts]
        assert await asyncio.gather(*map(streamed, prompts)) == alone


async def test_server_answers_after_a_stream_is_closed_early(stack: Stack) -> None:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model="default",
            prompt=PROMPT,
            max_tokens=1000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        await anext(aiter(stream))
        await stream.close()
        answer = await client.completions.create(model="default", prompt=PROMPT, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1
