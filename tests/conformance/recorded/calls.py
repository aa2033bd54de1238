"""The calls that are recorded: all routes, their fields, their errors and their streams."""

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from tests.conformance.recorded.call import Call
from tests.conformance.recorded.ollama_calls import ollama_calls

__all__ = ["all_calls"]

Fields: TypeAlias = Mapping[str, Any]

_GREEDY = {"temperature": 0, "seed": 1}
_PROMPT = "def add(a, b):\n    return"
_TURN = {"role": "user", "content": "Say hello."}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_FUNCTION = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
_TOOL = {"type": "function", "function": {**_FUNCTION, "strict": True}}
_CUSTOM = {
    "type": "custom",
    "custom": {
        "name": "shell",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "ls|pwd"}},
    },
}
_PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)
_CALLED = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
_TEXT_FILE = "data:text/plain;base64," + base64.b64encode(b"The sky is green.").decode()


def all_calls() -> list[Call]:
    """Return all calls, in the order in which they must be sent."""
    calls = [
        *_generations("completions", "/v1/completions", _COMPLETION, _COMPLETIONS),
        *_refused("completions", "/v1/completions", _COMPLETION, _REFUSED_COMPLETIONS),
        *_generations("chat", "/v1/chat/completions", _CHAT, _CHATS),
        *_refused("chat", "/v1/chat/completions", _CHAT, _REFUSED_CHATS),
        *_generations("messages", "/v1/messages", _MESSAGE, _MESSAGES),
        *_refused("messages", "/v1/messages", _MESSAGE, _REFUSED_MESSAGES),
        *_generations("responses", "/v1/responses", _RESPONSE, _RESPONSES),
        *_refused("responses", "/v1/responses", _RESPONSE, _REFUSED_RESPONSES),
        *_stored_responses(),
        *_files_and_batches(),
        *_texts(),
        *_others(),
        *ollama_calls(),
    ]
    names = [call.name for call in calls]
    assert len(names) == len(set(names)), "two calls have one name"
    return calls


def _generations(area: str, path: str, base: Fields, cases: Mapping[str, Fields]) -> Iterator[Call]:
    """Yield each case, whole and streamed."""
    for name, fields in cases.items():
        yield Call(f"{area}: {name}", "POST", path, {**base, **fields})
        yield Call(f"{area}: {name}, streamed", "POST", path, {**base, **fields, "stream": True})


def _refused(area: str, path: str, base: Fields, cases: Mapping[str, Fields]) -> Iterator[Call]:
    for name, fields in cases.items():
        body = {key: value for key, value in {**base, **fields}.items() if value is not _ABSENT}
        yield Call(f"{area}, refused: {name}", "POST", path, body)
    for name, raw in _UNREADABLE.items():
        yield Call(f"{area}, unreadable: {name}", "POST", path, raw=raw)


_ABSENT = object()
_UNREADABLE = {
    "no JSON": b"{",
    "a list": b"[]",
    "nothing": b"",
    "no UTF-8": b'{"model": "\xff"}',
    "nested": b'{"x": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
}

_COMPLETION = {"prompt": _PROMPT, "max_tokens": 6, **_GREEDY}
_COMPLETIONS: Mapping[str, Fields] = {
    "plain": {},
    "a model by name": {"model": "tokenwire-code-6m"},
    "two prompts": {"prompt": [_PROMPT, "class A:"]},
    "ids": {"prompt": [5, 6, 7]},
    "lists of ids": {"prompt": [[5, 6], [7, 8]]},
    "two choices": {"n": 2, "temperature": 1},
    "best of two": {"best_of": 2, "n": 2, "temperature": 1},
    "logprobs of the chosen": {"logprobs": 0},
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True},
    "echo with logprobs": {"echo": True, "logprobs": 1},
    "scores alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "infill": {"suffix": "\n\nprint(add(1, 2))"},
    "a stop string": {"stop": ["\n"], "max_tokens": 30},
    "a stop string that stays": {
        "stop": "\n", "include_stop_str_in_output": True, "max_tokens": 30,
    },
    "a stop token": {"stop_token_ids": [5], "logit_bias": {"5": 100}},
    "least tokens": {"min_tokens": 3, "ignore_eos": True},
    "token ids": {"return_token_ids": True},
    "tokens as ids": {"return_tokens_as_token_ids": True, "logprobs": 1},
    "penalties": {
        "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1,
    },
    "nucleus": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.05},
    "DRY": {"dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 2},
    "Mirostat": {"temperature": 1, "mirostat_target": 10, "mirostat_lr": 0.1},
    "biased": {"logit_bias": {"5": 100}},
    "allowed ids": {"allowed_token_ids": [5, 6, 7]},
    "bad words": {"bad_words": ["self"]},
    "prompt logprobs": {"prompt_logprobs": 1},
    "a regex": {"grammar": {"type": "regex", "value": "[a-c]{3}"}},
    "a JSON Schema": {
        "grammar": {"type": "json_schema", "value": _SCHEMA}, "max_tokens": 40,
    },
    "a Lark grammar": {"grammar": {"type": "lark", "value": 'start: "yes" | "no"'}},
    "a JSON object": {"response_format": {"type": "json_object"}, "max_tokens": 30},
    "a named schema": {
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA},
        },
        "max_tokens": 40,
    },
    "a choice of vLLM": {"guided_choice": ["yes", "no"]},
    "an EBNF of SGLang": {"ebnf": 'root ::= "yes" | "no"'},
    "unknown fields": {"colour": "blue", "stream_options": None},
    "a user": {"user": "somebody", "priority": 1, "timeout": 30},
    "beams": {"use_beam_search": True, "n": 2, "temperature": 0, "seed": None},
    "a truncated prompt": {"prompt": "x " * 9_000, "truncate_sequence": True},
    "the end of a prompt": {"truncate_prompt_tokens": 4},
}  # fmt: skip
_REFUSED_COMPLETIONS: Mapping[str, Fields] = {
    "no prompt": {"prompt": _ABSENT},
    "no prompts": {"prompt": []},
    "mixed prompts": {"prompt": ["a", 1]},
    "an id out of range": {"prompt": [10**6]},
    "an unknown model": {"model": "nobody"},
    "a wrong type": {"max_tokens": "six"},
    "no tokens": {"max_tokens": 0},
    "negative tokens": {"max_tokens": -1},
    "a hot temperature": {"temperature": 3},
    "top_p": {"top_p": 2},
    "top_k": {"top_k": 1_000},
    "n": {"n": 500},
    "best_of below n": {"n": 3, "best_of": 2},
    "best_of streamed": {"best_of": 3, "stream": True},
    "an empty stop string": {"stop": [""]},
    "many stop strings": {"stop": ["a"] * 17},
    "min_tokens over max_tokens": {"min_tokens": 9},
    "many logprobs": {"logprobs": 50},
    "a bias without an id": {"logit_bias": {"x": 1}},
    "a large bias": {"logit_bias": {"5": 1_000}},
    "an infill echo": {"suffix": "x", "echo": True},
    "two constraints": {
        "response_format": {"type": "json_object"}, "grammar": {"type": "regex", "value": "a"},
    },
    "a bad regex": {"grammar": {"type": "regex", "value": "("}},
    "a bad grammar": {"grammar": {"type": "lark", "value": "start: x"}},
    "a schema that is none": {"grammar": {"type": "json_schema", "value": {"type": 5}}},
    "no schema": {"response_format": {"type": "json_schema"}},
    "stream options alone": {"stream_options": {"include_usage": True}},
    "images": {"images": [_PIXEL], "prompt": "<image>"},
    "Mirostat with top_k": {"mirostat_target": 5, "top_k": 4},
    "a field of llama.cpp": {"n_predict": 5},
    "a long prompt": {"prompt": "x " * 9_000},
    "output over the context": {
        "max_tokens": 10**6, "context_length_exceeded_behavior": "error",
    },
}  # fmt: skip

_CHAT = {"messages": [_TURN], "max_tokens": 6, **_GREEDY}
_CHATS: Mapping[str, Fields] = {
    "plain": {},
    "a system message": {"messages": [{"role": "system", "content": "Be brief."}, _TURN]},
    "a developer message": {"messages": [{"role": "developer", "content": "Be brief."}, _TURN]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    "two choices": {"n": 2, "temperature": 1},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "usage": {"stream_options": None},
    "tools": {"tools": [_TOOL], "tool_choice": "auto"},
    "a required call": {"tools": [_TOOL], "tool_choice": "required", "max_tokens": 60},
    "a named call": {
        "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 60,
    },
    "a custom tool": {"tools": [_CUSTOM], "tool_choice": "required", "max_tokens": 60},
    "one call alone": {
        "tools": [_TOOL, _CUSTOM], "tool_choice": "required", "parallel_tool_calls": False,
        "max_tokens": 60,
    },
    "a history of calls": {"messages": [_TURN, *_CALLED], "tools": [_TOOL]},
    "a JSON object": {"response_format": {"type": "json_object"}, "max_tokens": 30},
    "a schema": {
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA},
        },
        "max_tokens": 40,
    },
    "a stop string": {"stop": ["e"], "max_tokens": 30},
    "token ids": {"return_token_ids": True},
    "a continued answer": {
        "messages": [_TURN, {"role": "assistant", "content": "Hel"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "a named template": {"chat_template": "default"},
    "an effort of reasoning": {"reasoning_effort": "low"},
    "a file": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "file", "file": {"file_data": _TEXT_FILE, "filename": "sky.txt"}},
                    {"type": "text", "text": "What colour is the sky?"},
                ],
            }
        ]
    },
    "fields without effect": {"store": False, "service_tier": "auto", "colour": "blue"},
    "truncated": {"truncation": "auto"},
    "max_completion_tokens": {"max_completion_tokens": 4, "max_tokens": None},
}  # fmt: skip
_REFUSED_CHATS: Mapping[str, Fields] = {
    "no messages": {"messages": []},
    "absent messages": {"messages": _ABSENT},
    "a message of nobody": {"messages": [{"role": "nobody", "content": "x"}]},
    "content of a wrong type": {"messages": [{"role": "user", "content": 5}]},
    "an unknown part": {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
    "an image": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": _PIXEL}}]}
        ]
    },
    "an unreadable file": {
        "messages": [
            {"role": "user", "content": [{"type": "file", "file": {"file_data": "x"}}]}
        ]
    },
    "an answer to no call": {
        "messages": [_TURN, {"role": "tool", "tool_call_id": "call_9", "content": "x"}]
    },
    "a tool without a name": {"tools": [{"type": "function", "function": {}}]},
    "a tool of a wrong kind": {"tools": [{"type": "oven"}]},
    "a choice of no tool": {
        "tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}},
    },
    "a call without tools": {"tool_choice": "required"},
    "top_logprobs alone": {"top_logprobs": 2},
    "many top_logprobs": {"logprobs": True, "top_logprobs": 50},
    "speech": {"audio": {"voice": "alloy"}},
    "functions": {"functions": [_FUNCTION]},
    "a template that is no name": {"chat_template": "{{ messages[0]['content'] }}!"},
    "a schema that is none": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}
    },
    "an unknown model": {"model": "nobody"},
    "a temperature": {"temperature": -1},
    "beams": {"best_of": 2},
}  # fmt: skip

_MESSAGE = {"model": "default", "messages": [_TURN], "max_tokens": 6, "temperature": 0}
_ANTHROPIC_TOOL = {
    "name": "get_weather", "input_schema": _FUNCTION["parameters"], "strict": True,
}  # fmt: skip
_MESSAGES: Mapping[str, Fields] = {
    "plain": {},
    "a system prompt": {"system": "Be brief."},
    "system blocks": {
        "system": [
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
        ]
    },
    "blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    "a stop sequence": {"stop_sequences": ["e"], "max_tokens": 30},
    "a tool": {"tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 60},
    "a named tool": {
        "tools": [_ANTHROPIC_TOOL],
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "max_tokens": 60,
    },
    "no tool": {"tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "none"}},
    "a history of calls": {
        "tools": [_ANTHROPIC_TOOL],
        "messages": [
            _TURN,
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "tool_use", "id": "toolu_1", "name": "get_weather",
                        "input": {"city": "Rome"},
                    }
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}
                ],
            },
        ],
    },
    "a schema": {
        "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
        "max_tokens": 40,
    },
    "a document": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "document",
                        "source": {
                            "type": "text", "media_type": "text/plain", "data": "Green.",
                        },
                    },
                    {"type": "text", "text": "Which colour?"},
                ],
            }
        ]
    },
    "thinking": {
        "thinking": {"type": "enabled", "budget_tokens": 1_024}, "max_tokens": 2_000,
        "stop_sequences": ["e"],
    },
    "a continued answer": {"messages": [_TURN, {"role": "assistant", "content": "Hel"}]},
    "unknown fields": {"colour": "blue", "metadata": {"user_id": "somebody"}, "top_k": 4},
}  # fmt: skip
_REFUSED_MESSAGES: Mapping[str, Fields] = {
    "no messages": {"messages": []},
    "no max_tokens": {"max_tokens": _ABSENT},
    "no room": {"max_tokens": 0},
    "an unknown model": {"model": "nobody"},
    "a role": {"messages": [{"role": "oven", "content": "x"}]},
    "a block": {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
    "an image": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {
                            "type": "base64", "media_type": "image/png",
                            "data": _PIXEL.partition(",")[2],
                        },
                    }
                ],
            }
        ]
    },
    "a result of no call": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "x", "content": "y"}],
            }
        ]
    },
    "a choice of no tool": {"tool_choice": {"type": "tool", "name": "other"}},
    "a temperature": {"temperature": 5},
    "an empty stop sequence": {"stop_sequences": [""]},
    "a schema that is none": {
        "output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}
    },
}  # fmt: skip

_RESPONSE = {"input": "Say hello.", "max_output_tokens": 6, "temperature": 0}
_RESPONSE_TOOL = {"type": "function", **_FUNCTION, "strict": True}
_RESPONSES: Mapping[str, Fields] = {
    "plain": {},
    "instructions": {"instructions": "Be brief."},
    "items": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]},
    "a required call": {
        "tools": [_RESPONSE_TOOL], "tool_choice": "required", "max_output_tokens": 60,
    },
    "a named call": {
        "tools": [_RESPONSE_TOOL],
        "tool_choice": {"type": "function", "name": "get_weather"},
        "max_output_tokens": 60,
    },
    "a custom tool": {
        "tools": [
            {
                "type": "custom", "name": "shell",
                "format": {"type": "grammar", "syntax": "regex", "definition": "ls|pwd"},
            }
        ],
        "tool_choice": "required",
        "max_output_tokens": 60,
    },
    "a tool of OpenAI's": {"tools": [{"type": "web_search"}]},
    "a history of calls": {
        "tools": [_RESPONSE_TOOL],
        "input": [
            {"role": "user", "content": "Weather?"},
            {
                "type": "function_call", "call_id": "call_1", "name": "get_weather",
                "arguments": '{"city": "Rome"}',
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        ],
    },
    "a JSON object": {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 30},
    "a schema": {
        "text": {"format": {"type": "json_schema", "name": "person", "schema": _SCHEMA}},
        "max_output_tokens": 40,
    },
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
    "a file": {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_file", "file_data": _TEXT_FILE, "filename": "sky.txt"},
                    {"type": "input_text", "text": "Which colour?"},
                ],
            }
        ]
    },
    "fields that come back": {
        "metadata": {"a": "b"}, "user": "somebody", "truncation": "auto", "top_p": 0.5,
        "reasoning": {"effort": "low", "summary": "auto"}, "store": False,
    },
}  # fmt: skip
_REFUSED_RESPONSES: Mapping[str, Fields] = {
    "no input": {"input": []},
    "absent input": {"input": _ABSENT},
    "an unknown model": {"model": "nobody"},
    "an item": {"input": [{"type": "item_reference", "id": "x"}]},
    "a role": {"input": [{"role": "oven", "content": "x"}]},
    "a part": {"input": [{"role": "user", "content": [{"type": "smell"}]}]},
    "an image": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": _PIXEL}]}]
    },
    "an output of no call": {
        "input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]
    },
    "an unknown response": {"previous_response_id": "resp_none"},
    "a conversation": {"conversation": "conv_1"},
    "a prompt": {"prompt": {"id": "pmpt_1"}},
    "a temperature": {"temperature": 5},
    "a tool without a name": {"tools": [{"type": "function"}]},
    "a choice of no tool": {"tool_choice": {"type": "function", "name": "other"}},
    "a schema that is none": {
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}
    },
    "many logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 50},
    "background without a store": {"background": True, "store": False},
}


def _stored_responses() -> Iterator[Call]:
    path = "/v1/responses"
    ended = ("completed", "incomplete", "failed", "cancelled")
    yield Call("stored: create", "POST", path, _RESPONSE, keep={"response": "id"})
    yield Call("stored: get", "GET", f"{path}/{{response}}")
    yield Call("stored: input items", "GET", f"{path}/{{response}}/input_items")
    yield Call(
        "stored: a page of input items", "GET", f"{path}/{{response}}/input_items?limit=1&order=asc"
    )
    yield Call(
        "stored: continue", "POST", path, {**_RESPONSE, "previous_response_id": "{response}"}
    )
    yield Call("stored: cancel what was awaited", "POST", f"{path}/{{response}}/cancel")
    yield Call("stored: delete", "DELETE", f"{path}/{{response}}")
    yield Call("stored: get what is deleted", "GET", f"{path}/{{response}}")
    yield Call("stored: delete it again", "DELETE", f"{path}/{{response}}")
    yield Call(
        "background: create", "POST", path, {**_RESPONSE, "background": True},
        keep={"background": "id"},
    )  # fmt: skip
    yield Call("background: end", "GET", f"{path}/{{background}}", until=ended)
    yield Call("background: events that are not kept", "GET", f"{path}/{{background}}?stream=true")
    yield Call("background: cancel what has ended", "POST", f"{path}/{{background}}/cancel")
    yield Call(
        "background: a stream", "POST", path, {**_RESPONSE, "background": True, "stream": True},
        keep={"followed": "response.id"},
    )  # fmt: skip
    yield Call("background: events", "GET", f"{path}/{{followed}}?stream=true")
    yield Call(
        "background: later events", "GET", f"{path}/{{followed}}?stream=true&starting_after=3"
    )


def _files_and_batches() -> Iterator[Call]:
    requests = [
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": _COMPLETION},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": 5}},
    ]
    lines = "\n".join(json.dumps(request) for request in requests).encode()
    form: Mapping[str, tuple[str, bytes] | str] = {
        "purpose": "batch",
        "file": ("requests.jsonl", lines),
    }
    ended = ("completed", "failed", "cancelled", "expired")
    batch = {"endpoint": "/v1/completions", "completion_window": "24h"}
    yield Call("files: create", "POST", "/v1/files", form=form, keep={"file": "id"})
    yield Call("files: all", "GET", "/v1/files")
    yield Call("files: one", "GET", "/v1/files/{file}")
    yield Call("files: content", "GET", "/v1/files/{file}/content")
    yield Call("files: of another purpose", "GET", "/v1/files?purpose=vision")
    yield Call("files: none", "GET", "/v1/files/file-none")
    yield Call("files: without a form", "POST", "/v1/files", {"purpose": "batch"})
    yield Call("files: without a file", "POST", "/v1/files", form={"purpose": "batch"})
    yield Call(
        "files: an unknown purpose", "POST", "/v1/files",
        form={"purpose": "lunch", "file": ("x.txt", b"x")},
    )  # fmt: skip
    yield Call(
        "batches: create", "POST", "/v1/batches", {**batch, "input_file_id": "{file}"},
        keep={"batch": "id"},
    )  # fmt: skip
    yield Call(
        "batches: end", "GET", "/v1/batches/{batch}", until=ended,
        keep={"output": "output_file_id", "errors": "error_file_id"},
    )  # fmt: skip
    yield Call("batches: all", "GET", "/v1/batches")
    yield Call("batches: output", "GET", "/v1/files/{output}/content")
    yield Call("batches: errors", "GET", "/v1/files/{errors}/content")
    yield Call("batches: cancel what has ended", "POST", "/v1/batches/{batch}/cancel")
    yield Call("batches: none", "GET", "/v1/batches/batch_none")
    yield Call("batches: of no file", "POST", "/v1/batches", {**batch, "input_file_id": "x"})
    yield Call(
        "batches: of an unknown endpoint", "POST", "/v1/batches",
        {**batch, "endpoint": "/v1/lunch", "input_file_id": "{file}"},
    )  # fmt: skip
    yield Call(
        "batches: of a wrong window", "POST", "/v1/batches",
        {**batch, "completion_window": "1h", "input_file_id": "{file}"},
    )  # fmt: skip
    yield Call("files: delete", "DELETE", "/v1/files/{file}")
    yield Call("files: delete it again", "DELETE", "/v1/files/{file}")


def _texts() -> Iterator[Call]:
    messages = {"messages": [_TURN]}
    bodies: Mapping[str, Mapping[str, Any]] = {
        "/tokenize": {
            "a text": {"prompt": "def f"},
            "token texts": {"prompt": "def f", "return_token_strs": True},
            "without special tokens": {"prompt": "def f", "add_special_tokens": False},
            "messages": messages,
            "tools": {**messages, "tools": [_TOOL]},
            "nothing": {},
            "both": {"prompt": "x", **messages},
            "a wrong type": {"prompt": 5},
        },
        "/detokenize": {
            "tokens": {"tokens": [5, 6, 7]},
            "no tokens": {"tokens": []},
            "nothing": {},
            "an id out of range": {"tokens": [10**6]},
        },
        "/apply-template": {
            "messages": messages,
            "without a prompt for the answer": {**messages, "add_generation_prompt": False},
            "tools": {**messages, "tools": [_TOOL]},
            "nothing": {},
        },
        "/v1/messages/count_tokens": {
            "messages": {"model": "default", **messages},
            "a tool": {"model": "default", **messages, "tools": [_ANTHROPIC_TOOL]},
            "nothing": {"model": "default"},
        },
        "/v1/responses/input_tokens": {
            "a text": {"input": "Hello"},
            "instructions": {"input": "Hello", "instructions": "Be brief."},
            "nothing": {},
        },
        "/v1/embeddings": {"a text": {"input": "Hello"}, "nothing": {}},
        "/v1/rerank": {"documents": {"query": "a", "documents": ["b", "c"]}},
        "/v1/classify": {"a text": {"input": "Hello"}},
        "/v1/score": {"a pair": {"text_1": "a", "text_2": "b"}},
        "/v1/pooling": {"a text": {"input": "Hello"}},
    }
    for path, cases in bodies.items():
        for name, body in cases.items():
            yield Call(f"{path}: {name}", "POST", path, body)


def _others() -> Iterator[Call]:
    for path in (
        "/v1/models", "/v1/models/default", "/v1/models/tokenwire-code-6m", "/v1/models/nobody",
        "/health", "/ready", "/version", "/status.json", "/tokenizer_info", "/nowhere",
        "/v1/completions", "/v1/responses/resp_none", "/v1/responses/resp_none/input_items",
    ):  # fmt: skip
        yield Call(f"get {path}", "GET", path)
    yield Call("delete a model", "DELETE", "/v1/models/default")
    multi = {"model": "default", "prompt": _PROMPT, "max_tokens": 4, "temperature": 0}
    cases: Mapping[str, Fields] = {
        "one model": {},
        "two models": {"model": ["default", "tokenwire-code-6m"]},
        "no model": {"model": []},
        "an unknown model": {"model": ["default", "nobody"]},
        "streamed": {"stream": True},
        "a temperature": {"temperature": 2},
        "a stop list": {"stop": ["\n"], "top_p": 0.5},
    }
    for name, fields in cases.items():
        yield Call(f"completion of models: {name}", "POST", "/v1/completion", {**multi, **fields})
    yield Call("an adapter that may not be loaded", "POST", "/v1/load_lora_adapter", {})
    yield Call(
        "a request with an id", "POST", "/v1/completions", _COMPLETION,
        headers={"x-request-id": "mine-1"},
    )  # fmt: skip
    yield Call("an alias of completions", "POST", "/completions", _COMPLETION)
    yield Call("an alias of chats", "POST", "/chat/completions", _CHAT)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    often = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    yield Call("completions: usage at the end", "POST", "/v1/completions", {**_COMPLETION, **usage})
    yield Call("completions: usage always", "POST", "/v1/completions", {**_COMPLETION, **often})
    yield Call("chat: usage at the end", "POST", "/v1/chat/completions", {**_CHAT, **usage})
    yield Call("chat: usage always", "POST", "/v1/chat/completions", {**_CHAT, **often})
