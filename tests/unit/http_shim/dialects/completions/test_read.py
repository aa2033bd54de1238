"""Reading of completions, and the client's names in errors."""

import json

import pytest

from services.http_shim.dialects.bodies import decoded
from services.http_shim.dialects.completions.read import read_completion
from services.http_shim.dialects.reading import Reading
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2


def read(**fields: object) -> Reading:
    return read_completion(decoded(json.dumps({"prompt": "x"} | fields).encode()))


def translated(**fields: object) -> completion_pb2.GenerateRequest:
    return read(**fields).request


def expected(**fields: object) -> completion_pb2.GenerateRequest:
    base = completion_pb2.GenerateRequest(
        prompts=completion_pb2.Prompts(items=[completion_pb2.Prompt(text="x")]),
        sampling=types_pb2.SamplingParams(),
        stopping=types_pb2.StoppingParams(),
        delivery=completion_pb2.DELIVERY_WHOLE,
    )
    base.MergeFrom(completion_pb2.GenerateRequest(**fields))  # type: ignore[arg-type]
    return base


def ids(*values: int) -> completion_pb2.Prompt:
    return completion_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=values))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", [completion_pb2.Prompt(text="a")]),
        ("", [completion_pb2.Prompt(text="")]),
        (["a", ""], [completion_pb2.Prompt(text="a"), completion_pb2.Prompt(text="")]),
        ([1, 2], [ids(1, 2)]),
        ([[1, 2], [3]], [ids(1, 2), ids(3)]),
        ([[]], [ids()]),
    ],
)
def test_prompt_has_four_forms(prompt: object, prompts: list[completion_pb2.Prompt]) -> None:
    assert list(translated(prompt=prompt).prompts.items) == prompts


@pytest.mark.parametrize("prompt", [None, [], ["a", 1], [1, [2]], [[1], "a"]])
def test_invalid_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(ServiceError) as caught:
        translated(prompt=prompt)
    assert caught.value.field == "prompt"


def test_images_stay_apart_from_the_request_until_it_is_sent() -> None:
    """A request lives as long as its answer, which would then hold all images in memory."""
    reading = read(images=["data:image/png;base64,AAEC", "data:image/webp;base64,/w=="])
    request, images = reading.request, reading.images
    assert list(request.prompts.images) == [b"", b""]
    images.copy_into(request)
    assert list(request.prompts.images) == [b"\0\1\2", b"\xff"]
    images.drop()
    assert len(images) == 0


def test_error_of_an_image_names_its_index() -> None:
    with pytest.raises(ServiceError) as caught:
        read(images=["data:image/png;base64,AAEC", "AAEC"])
    assert caught.value.field == "images[1]"


_SCHEMA = {"type": "object", "properties": {"b": {"maximum": 1.10}, "a": {}}}


@pytest.mark.parametrize(
    ("fields", "request_"),
    [
        ({}, {}),
        ({"model": "m"}, {"model": "m"}),
        ({"suffix": ""}, {"prompts": {"suffix": ""}}),
        ({"max_tokens": 0}, {"stopping": types_pb2.StoppingParams(max_tokens=0)}),
        ({"max_completion_tokens": 3}, {"stopping": types_pb2.StoppingParams(max_tokens=3)}),
        (
            {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [5]},
            {"stopping": {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [5]}},
        ),
        ({"stop": "a"}, {"stop": ["a"]}),
        ({"stop": ["a", ""]}, {"stop": ["a", ""]}),
        ({"include_stop_str_in_output": True}, {"include_stop_string": True}),
        (
            {"temperature": 0, "top_p": 0, "top_k": 0, "min_p": 0.5, "seed": -1},
            {"sampling": {"temperature": 0, "top_p": 0, "top_k": 0, "min_p": 0.5, "seed": -1}},
        ),
        ({"top_k": -1}, {}),
        (
            {"frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 1.5},
            {
                "sampling": {
                    "frequency_penalty": 1,
                    "presence_penalty": -1,
                    "repetition_penalty": 1.5,
                }
            },
        ),
        ({"logit_bias": {"7": -100}}, {"sampling": {"logit_bias": {7: -100.0}}}),
        ({"dry_multiplier": 0, "dry_base": 2, "dry_sequence_breakers": ["\n"]}, {}),
        (
            {"dry_multiplier": 1, "dry_allowed_length": 0, "dry_sequence_breakers": ["\n"]},
            {
                "sampling": {"dry": {"multiplier": 1, "allowed_length": 0}},
                "dry_sequence_breakers": ["\n"],
            },
        ),
        (
            {"dry_multiplier": 1, "dry_sequence_breakers": []},
            {"sampling": {"dry": {"multiplier": 1}}, "no_dry_sequence_breakers": True},
        ),
        ({"dry_multiplier": 0, "dry_sequence_breakers": []}, {}),
        ({"mirostat_target": 2}, {"sampling": {"mirostat": {"target_perplexity": 2}}}),
        ({"mirostat_lr": 0.5}, {"sampling": {"mirostat": {"learning_rate": 0.5}}}),
        ({"n": 2, "best_of": 3, "echo": True, "logprobs": 0}, None),
        ({"truncate_sequence": True}, {"truncate_prompt": True}),
        (
            {"context_length_exceeded_behavior": "error"},
            {"context_overflow": completion_pb2.CONTEXT_OVERFLOW_ERROR},
        ),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"grammar": {"json_object": {}}}),
        ({"grammar": {"type": "regex", "value": "a+"}}, {"grammar": {"regex": "a+"}}),
        ({"grammar": {"type": "lark", "value": "x"}}, {"grammar": {"lark": "x"}}),
        ({"grammar": {"type": "llguidance", "value": "{}"}}, {"grammar": {"llguidance": "{}"}}),
        ({"grammar": {"type": "json_schema", "value": "{}"}}, {"grammar": {"json_schema": "{}"}}),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                "tool_choice": "required",
            },
            {
                "tools": [{"name": "f", "parameters_json": "{}"}],
                "tool_choice": {"mode": completion_pb2.TOOL_MODE_REQUIRED},
            },
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            {"tool_choice": {"name": "f"}},
        ),
        ({"images": [], "user": "u"}, {"user": "u"}),
    ],
)
def test_fields_are_converted(
    fields: dict[str, object], request_: dict[str, object] | None
) -> None:
    if request_ is None:
        request_ = fields
    assert translated(**fields) == expected(**request_)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}},
        {"response_format": {"type": "json_object", "schema": _SCHEMA}},
        {"grammar": {"type": "json_schema", "value": _SCHEMA}},
    ],
)
def test_schemas_keep_the_order_of_properties(fields: dict[str, object]) -> None:
    """The model writes the properties in this order."""
    schema = json.loads(translated(**fields).grammar.json_schema)
    assert schema == _SCHEMA
    assert list(schema["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {}}, "stream_options"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"stream": True, "best_of": 2}, "best_of"),
        ({"stream": True, "best_of": 3, "n": 2}, "best_of"),
        (
            {
                "grammar": {"type": "regex", "value": "a"},
                "response_format": {"type": "json_object"},
            },
            "grammar",
        ),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ],
)
def test_contradictory_fields_are_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(ServiceError) as caught:
        translated(**fields)
    assert caught.value.field == param


@pytest.mark.parametrize("n", [None, 1, 3])
def test_best_of_equal_to_n_can_be_streamed(n: int | None) -> None:
    """Generated clients send best_of: 1 with every request."""
    request = translated(stream=True, n=n, best_of=n or 1)
    assert request.delivery == completion_pb2.DELIVERY_DELTAS
    assert request.best_of == (n or 1)


def test_stream_requests_deltas() -> None:
    assert translated(stream=True).delivery == completion_pb2.DELIVERY_DELTAS


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("model", "model"),
        ("prompts.items", "prompt"),
        ("prompts.items[0].token_ids.ids[3]", "prompt"),
        ("prompts.items[1].text", "prompt"),
        ("prompts.suffix", "suffix"),
        ("sampling.top_p", "top_p"),
        ("sampling.logit_bias[12]", "logit_bias.12"),
        ("sampling.bad_token_ids[1].ids[0]", "bad_words"),
        ("sampling.dry", "dry_multiplier"),
        ("sampling.dry.multiplier", "dry_multiplier"),
        ("sampling.dry.base", "dry_base"),
        ("sampling.dry.allowed_length", "dry_allowed_length"),
        ("sampling.dry.breaker_ids[0]", "dry_sequence_breakers"),
        ("sampling.mirostat.target_perplexity", "mirostat_target"),
        ("sampling.mirostat.learning_rate", "mirostat_lr"),
        ("dry_sequence_breakers[0]", "dry_sequence_breakers"),
        ("stopping.max_tokens", "max_tokens"),
        ("stopping.stop_token_ids[0]", "stop_token_ids"),
        ("stop[1]", "stop"),
        ("include_stop_string", "include_stop_str_in_output"),
        ("context_overflow", "context_length_exceeded_behavior"),
        ("truncate_prompt", "truncate_sequence"),
        ("beam_search", "use_beam_search"),
        ("beam_search.length_penalty", "length_penalty"),
        ("beam_search.early_stopping", "early_stopping"),
        ("delivery", "stream"),
        ("tools[0].parameters_json", "tools[0].function.parameters"),
        ("prompts.images", "images"),
        ("prompts.images[2]", "images[2]"),
        ("prompts.images[2].data", "images[2]"),
        ("grammar.json_schema", "grammar"),
        ("grammar.json_whitespace", "guided_whitespace_pattern"),
    ],
)
def test_error_fields_have_the_clients_names(path: str, param: str) -> None:
    tools = [{"function": {"name": "f"}}]
    grammar = {"type": "json_schema", "value": "{}"}
    images = ["data:image/png;base64,AAEC"] * 3
    reading = read(grammar=grammar, tools=tools, images=images, logit_bias={"12": 1})
    assert reading.field(path) == param


def test_error_field_is_the_alias_that_the_client_sent() -> None:
    reading = read(response_format={"type": "json_object"}, max_completion_tokens=0)
    assert reading.field("grammar") == "response_format"
    assert reading.field("stopping.max_tokens") == "max_completion_tokens"


@pytest.mark.parametrize(
    ("fields", "path", "place"),
    [
        ({"guided_json": _SCHEMA}, "grammar.json_schema.properties.a", "guided_json.properties.a"),
        ({"json_schema": _SCHEMA}, "grammar.json_schema.title", "json_schema.title"),
        (
            {"grammar": {"type": "json_schema", "value": _SCHEMA}},
            "grammar.json_schema.title",
            "grammar.value.title",
        ),
        (
            {"response_format": {"type": "json_object", "schema": _SCHEMA}},
            "grammar.json_schema.title",
            "response_format.schema.title",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}},
            "grammar.json_schema.title",
            "response_format.json_schema.schema.title",
        ),
        (
            {"structured_outputs": {"json": _SCHEMA}},
            "grammar.json_schema.title",
            "structured_outputs.json.title",
        ),
        (
            {"structural_tag": {"structures": [], "triggers": []}},
            "grammar.structural_tag.structures[0].schema.title",
            "structural_tag.structures[0].schema.title",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": _SCHEMA}}]},
            "tools[0].parameters_json.properties.a",
            "tools[0].function.parameters.properties.a",
        ),
    ],
)
def test_ignored_part_of_a_schema_has_the_path_that_the_client_wrote(
    fields: dict[str, object], path: str, place: str
) -> None:
    assert read(**fields).place(path) == place


def test_stream_and_scheduling_of_a_request_are_read() -> None:
    reading = read(stream=True, priority=-3, timeout=2)
    assert (reading.is_streamed, reading.priority, reading.timeout) == (True, -3, 2.0)
    reading = read()
    assert (reading.is_streamed, reading.priority, reading.timeout) == (False, None, None)
