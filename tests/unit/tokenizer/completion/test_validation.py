"""Validation: every wrong field is refused by its path."""

from collections.abc import Mapping

import grpc
import pytest

from services.tokenizer.completion.validation import check_prompts, check_request
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.infill import InfillOrder, InfillTemplate
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1 import types_pb2 as types

_BASIC = (
    engine_pb2.CAPABILITY_SAMPLING,
    engine_pb2.CAPABILITY_STOPPING,
    engine_pb2.CAPABILITY_LOGPROBS,
    engine_pb2.CAPABILITY_PROMPT_LOGPROBS,
)
_INFILL = InfillTemplate("x", InfillOrder.PREFIX_SUFFIX_MIDDLE, 1, 2, 3, None, ())
_TEXT = completion.Prompt(text="a")
_TOOL = completion.Tool(name="f")


def _limits(*, all_capabilities: bool) -> ModelLimits:
    capabilities = engine_pb2.Capability.values() if all_capabilities else _BASIC
    return ModelLimits(
        "m", "fp_0", 64, 100, frozenset({2}), frozenset(capabilities), 5, 20, 128, 16, True
    )


def _error(
    request: completion.GenerateRequest,
    *,
    all_capabilities: bool = True,
    infill: InfillTemplate | None = None,
) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        _check(request, _limits(all_capabilities=all_capabilities), infill)
    return caught.value


def _check(
    request: completion.GenerateRequest, limits: ModelLimits, infill: InfillTemplate | None = None
) -> None:
    check_request(request, limits)
    check_prompts(request, limits, infill)


def _request(**fields: object) -> completion.GenerateRequest:
    items = fields.pop("prompts", [_TEXT])
    of_prompts = {name: fields.pop(name) for name in ("suffix", "images") if name in fields}
    prompts = completion.Prompts(items=items, **of_prompts)  # type: ignore[arg-type]
    return completion.GenerateRequest(prompts=prompts, **fields)  # type: ignore[arg-type]


def _ids(*ids: int) -> completion.Prompt:
    return completion.Prompt(token_ids=types.TokenIds(ids=ids))


_INVALID: list[tuple[str, Mapping[str, object]]] = [
    ("prompts.items", {"prompts": []}),
    ("prompts.items[0].prompt", {"prompts": [completion.Prompt()]}),
    ("prompts.items[1].token_ids.ids", {"prompts": [_TEXT, _ids()]}),
    ("prompts.items[1].token_ids.ids[2]", {"prompts": [_TEXT, _ids(1, 99, 100)]}),
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("n", {"prompts": [_TEXT] * 2, "n": 65}),
    ("prompts.items", {"prompts": [_TEXT] * 129}),
    ("best_of", {"n": 2, "best_of": 1, "delivery": completion.DELIVERY_WHOLE}),
    ("best_of", {"best_of": 2}),
    ("best_of", {"n": 2, "best_of": 3, "delivery": completion.DELIVERY_DELTAS}),
    ("best_of", {"prompts": [_TEXT] * 2, "best_of": 65, "delivery": completion.DELIVERY_WHOLE}),
    ("logprobs", {"logprobs": 6}),
    ("stopping.max_tokens", {"stopping": types.StoppingParams(max_tokens=0)}),
    ("stopping.min_tokens", {"stopping": types.StoppingParams(min_tokens=17)}),
    ("stopping.stop_token_ids", {"stopping": types.StoppingParams(stop_token_ids=[1] * 129)}),
    ("stopping.stop_token_ids[1]", {"stopping": types.StoppingParams(stop_token_ids=[1, 100])}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop[1]", {"stop": ["a", ""]}),
    ("stop[0]", {"stop": ["a" * 1_001]}),
    ("tool_choice", {"tool_choice": completion.ToolChoice(mode=completion.TOOL_MODE_REQUIRED)}),
    ("tool_choice", {"tools": [_TOOL], "tool_choice": completion.ToolChoice(name="g")}),
    ("tool_choice.mode", {"tools": [_TOOL], "tool_choice": completion.ToolChoice(mode=9)}),  # type: ignore[arg-type]
    ("tools[1].name", {"tools": [_TOOL, _TOOL]}),
    (
        "grammar",
        {
            "tools": [_TOOL],
            "tool_choice": completion.ToolChoice(name="f"),
            "grammar": types.GrammarSpec(regex="a"),
        },
    ),
    ("context_overflow", {"context_overflow": 9}),
    ("delivery", {"delivery": 9}),
    ("dry_sequence_breakers", {"dry_sequence_breakers": ["\n"]}),
    *(
        (
            field,
            {
                "sampling": types.SamplingParams(dry=types.DryParams(multiplier=1)),
                "dry_sequence_breakers": breakers,
            },
        )
        for field, breakers in (
            ("dry_sequence_breakers", ["a"] * 33),
            ("dry_sequence_breakers[1]", ["a", ""]),
            ("dry_sequence_breakers[0]", ["a" * 65]),
        )
    ),
    ("no_dry_sequence_breakers", {"no_dry_sequence_breakers": True}),
    *(
        (
            "no_dry_sequence_breakers",
            {
                "sampling": types.SamplingParams(
                    dry=types.DryParams(multiplier=1, breaker_ids=ids)
                ),
                "dry_sequence_breakers": breakers,
                "no_dry_sequence_breakers": True,
            },
        )
        for ids, breakers in (([1], []), ([], ["a"]))
    ),
    ("grammar.spec", {"grammar": types.GrammarSpec()}),
    ("grammar.regex", {"grammar": types.GrammarSpec(regex="")}),
    ("grammar.choice.choices", {"grammar": types.GrammarSpec(choice=types.ChoiceList())}),
    *(
        (f"sampling.{name}", {"sampling": types.SamplingParams(**{name: value})})  # type: ignore[arg-type]
        for name, value in (
            ("temperature", -0.1),
            ("temperature", 2.1),
            ("temperature", float("nan")),
            ("top_p", 1.1),
            ("top_k", 129),
            ("min_p", -0.1),
            ("frequency_penalty", 2.5),
            ("presence_penalty", -2.5),
            ("repetition_penalty", 0.0),
            ("repetition_penalty", 2.5),
        )
    ),
    ("sampling.logit_bias[100]", {"sampling": types.SamplingParams(logit_bias={100: 1})}),
    ("sampling.logit_bias[5]", {"sampling": types.SamplingParams(logit_bias={5: 101})}),
    (
        "sampling.dry.base",
        {"sampling": types.SamplingParams(dry=types.DryParams(multiplier=1, base=0.5))},
    ),
    (
        "sampling.mirostat.target_perplexity",
        {"sampling": types.SamplingParams(mirostat=types.MirostatParams(target_perplexity=0))},
    ),
    (
        "sampling.top_k",
        {"sampling": types.SamplingParams(top_k=5, mirostat=types.MirostatParams())},
    ),
    (
        "sampling.temperature",
        {"sampling": types.SamplingParams(temperature=0, mirostat=types.MirostatParams())},
    ),
]


@pytest.mark.parametrize(("field", "fields"), _INVALID)
def test_error_names_the_wrong_field(field: str, fields: dict[str, object]) -> None:
    error = _error(_request(**fields))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("tools", {"tools": [completion.Tool(name="f", strict=True)]}),
        ("grammar", {"grammar": types.GrammarSpec(regex="a")}),
        ("sampling.frequency_penalty", {"sampling": types.SamplingParams(frequency_penalty=1)}),
        ("sampling.logit_bias", {"sampling": types.SamplingParams(logit_bias={1: 1})}),
        ("sampling.dry", {"sampling": types.SamplingParams(dry=types.DryParams(multiplier=1))}),
        ("sampling.mirostat", {"sampling": types.SamplingParams(mirostat=types.MirostatParams())}),
    ],
)
def test_field_that_the_engine_does_not_implement_is_refused(
    field: str, fields: dict[str, object]
) -> None:
    """An ignored field would give another answer than the client expects."""
    error = _error(_request(**fields), all_capabilities=False)
    assert (error.code, error.field) == (grpc.StatusCode.UNIMPLEMENTED, field)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "m", "best_of": 1, "delivery": completion.DELIVERY_WHOLE},
        {"n": 2, "best_of": 128, "delivery": completion.DELIVERY_WHOLE},
        {"best_of": 1, "delivery": completion.DELIVERY_DELTAS},
        {"n": 3, "best_of": 3},
        {"tools": [_TOOL], "tool_choice": completion.ToolChoice(mode=completion.TOOL_MODE_AUTO)},
        {"tool_choice": completion.ToolChoice(mode=completion.TOOL_MODE_AUTO)},
        {"tool_choice": completion.ToolChoice(mode=completion.TOOL_MODE_NONE)},
        {
            "tools": [completion.Tool(name="f", strict=True)],
            "tool_choice": completion.ToolChoice(mode=completion.TOOL_MODE_NONE),
        },
        {"model": "default", "echo": True, "stopping": types.StoppingParams(max_tokens=0)},
        {"sampling": types.SamplingParams(frequency_penalty=0, repetition_penalty=1)},
        {"sampling": types.SamplingParams(temperature=2, top_p=0, top_k=128, min_p=1)},
        {"n": 128},
        {"stop": ["a"] * 16, "logprobs": 5},
    ],
)
def test_values_at_the_limits_are_allowed(fields: dict[str, object]) -> None:
    _check(_request(**fields), _limits(all_capabilities=False))


def test_echo_can_not_be_combined_with_infill() -> None:
    request = _request(suffix="b", echo=True)
    assert _error(request, infill=_INFILL).field == "echo"
    _check(request, _limits(all_capabilities=False))  # without infill, the suffix is appended


def test_unknown_model_is_not_found() -> None:
    error = _error(_request(model="other"))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
