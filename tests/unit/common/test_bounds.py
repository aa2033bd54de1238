"""Every bound that the protos state is enforced, and the error names field, limit and value."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from services.common.bounds import bounds_of, check_bounds, most
from services.tokenizer.completion.validation import check_request
from services.tokenizer.embedding.request_checks import check_classify, check_embed, check_score
from services.tokenizer.model_limits import ModelLimits
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.models.v1 import model_manager_pb2
from tokenwire.pb.options.v1 import bounds_pb2
from tokenwire.pb.options.v1.bounds_pb2 import Bounds
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.types.v1.types_pb2 import DryParams, SamplingParams, TokenIds

_LIMITS = ModelLimits(
    "m", "fp_0", 64, 100, frozenset({2}), frozenset(engine_pb2.Capability.values()),
    20, 20, 128, 16, True, vector_width=8, token_width=8,
)  # fmt: skip
_CHECKS: dict[type[Message], Callable[[Any], None]] = {
    completion.GenerateRequest: lambda request: check_request(request, _LIMITS),
    completion.EmbedRequest: lambda request: check_embed(request, _LIMITS),
    completion.ScoreRequest: lambda request: check_score(request, _LIMITS),
    completion.ClassifyRequest: lambda request: check_classify(request, _LIMITS),
    completion.SessionCredit: check_bounds,
    tokenizer_pb2.EncodeRequest: check_bounds,
    tokenizer_pb2.DecodeRequest: check_bounds,
    tokenizer_pb2.RenderChatRequest: check_bounds,
    engine_pb2.GenerateRequest: check_bounds,
    engine_pb2.EmbedRequest: check_bounds,
    engine_pb2.SessionCredit: check_bounds,
    engine_pb2.WatchLoadRequest: check_bounds,
    engine_pb2.WatchCacheRequest: check_bounds,
    engine_pb2.DrainRequest: check_bounds,
    engine_pb2.LoadAdapterRequest: check_bounds,
    grammar_pb2.CompileRequest: check_bounds,
    grammar_pb2.MasksConfiguration: check_bounds,
    grammar_pb2.MatcherPath: check_bounds,
    model_manager_pb2.UseModelRequest: check_bounds,
    model_manager_pb2.LoadModelRequest: check_bounds,
    model_manager_pb2.UnloadModelRequest: check_bounds,
    model_manager_pb2.PullModelRequest: check_bounds,
    model_manager_pb2.RemoveModelRequest: check_bounds,
}
"""The check of each request, with those of the text level as their service calls them"""
_FILES = (completion, tokenizer_pb2, engine_pb2, grammar_pb2, model_manager_pb2)

Path: TypeAlias = tuple[FieldDescriptor, ...]


@dataclass(frozen=True)
class Case:
    """A request with one value at or outside a bound."""

    request: type[Message]
    path: Path
    value: object
    place: str
    """Path of the value at fault, as the error names it"""

    def __str__(self) -> str:
        if isinstance(self.value, Sequence):  # of up to megabytes
            shown, size = str(self.value[:20]), str(len(self.value))
        else:
            shown, size = str(self.value), ""
        return f"{self.request.DESCRIPTOR.full_name}-{self.place}-{shown[:20]}{size}"

    def message(self) -> Message:
        request = self.request()
        holder: Any = _valid(request)
        for field in self.path[:-1]:
            held = getattr(holder, field.name)
            if field.is_repeated:
                held = held[0] if held else held.add()
            held.SetInParent()
            holder = _valid(held)
        _put(holder, self.path[-1], self.value)
        return request


def _bounds(field: FieldDescriptor) -> Bounds:
    return field.GetOptions().Extensions[bounds_pb2.bounds]


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _valid(message: Any) -> Any:
    """Set what a message must have, unless it has it."""
    for oneof in message.DESCRIPTOR.oneofs:
        if oneof.GetOptions().Extensions[bounds_pb2.required] and not message.WhichOneof(
            oneof.name
        ):
            _put(message, oneof.fields[0], _some(oneof.fields[0]))
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated:
            if _bounds(field).min_items and not getattr(message, field.name):
                _put(message, field, [_some(field)])
        elif not field.has_presence and _needed(field) and not getattr(message, field.name):
            _put(message, field, _some(field))
    return message


def _needed(field: FieldDescriptor) -> bool:
    bounds = _bounds(field)
    return bool(bounds.min_length or bounds.min_bytes or bounds.pattern or bounds.least > 0)


def _some(field: FieldDescriptor) -> object:
    """Return a value within the bounds of a field, or of its items."""
    bounds = _bounds(field).items if field.is_repeated else _bounds(field)
    if field.message_type == TokenIds.DESCRIPTOR:
        return TokenIds(ids=[1])
    if field.message_type is not None:
        return _valid(GetMessageClass(field.message_type)())
    if field.type == FieldDescriptor.TYPE_STRING:
        return "f"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"f"
    return (
        bounds.least if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE else int(bounds.least or 1)
    )


def _put(holder: Any, field: FieldDescriptor, value: Any) -> None:
    held = getattr(holder, field.name)
    if _is_map(field):
        held[7] = value
    elif field.is_repeated:
        del held[:]
        held.extend(value)
    elif field.message_type is not None:
        held.CopyFrom(value)
        held.SetInParent()
    else:
        setattr(holder, field.name, value)


def _paths(descriptor: Any, path: Path = ()) -> Iterator[Path]:
    """Return the paths of all fields that a message may hold."""
    for field in descriptor.fields:
        yield (*path, field)
        if field.message_type is not None and not _is_map(field):
            yield from _paths(field.message_type, (*path, field))


def _cases(*, outside: bool) -> Iterator[Case]:
    for request in _CHECKS:
        for path in _paths(request.DESCRIPTOR):
            parts = [f"{field.name}[0]" if field.is_repeated else field.name for field in path[:-1]]
            place = ".".join([*parts, path[-1].name])
            for value, rest in _values(path[-1], outside=outside):
                yield Case(request, path, value, place + rest)


def _values(field: FieldDescriptor, *, outside: bool) -> Iterator[tuple[object, str]]:
    """Return values of a field, with the paths of the wrong ones within it."""
    bounds = _bounds(field)
    if field.message_type is not None and _is_map(field):
        entry = field.message_type.fields_by_name["value"]
        yield from ((number, "[7]") for number in _numbers(entry, bounds.items, outside))
    elif field.is_repeated:
        for count in _sizes(bounds.min_items, bounds.max_items, outside):
            yield [_some(field)] * count, ""
        for value in _single(field, bounds.items, outside):
            yield [_some(field), value], "[1].ids" if isinstance(value, TokenIds) else "[1]"
    else:
        for value in _single(field, bounds, outside):
            yield value, ".ids" if isinstance(value, TokenIds) else ""


def _single(field: FieldDescriptor, bounds: Bounds, outside: bool) -> Iterator[object]:
    if field.message_type is not None:
        for count in _sizes(bounds.min_items, bounds.max_items, outside):
            yield TokenIds(ids=[1] * count)
    elif field.enum_type is not None:
        yield from [99, -1] if outside else [max(field.enum_type.values_by_number)]
        yield from [0] if outside and bounds.least > 0 else []
    elif field.type == FieldDescriptor.TYPE_STRING:
        yield from ("f" * size for size in _sizes(bounds.min_length, bounds.max_length, outside))
        if bounds.pattern:
            yield from ["", "a b", "f\n", "f" * 129] if outside else ["f", "f" * 128]
        if bounds.one_of:
            yield from ["other"] if outside else ["", *bounds.one_of]
    elif field.type == FieldDescriptor.TYPE_BYTES:
        yield from (bytes(size) for size in _sizes(bounds.min_bytes, bounds.max_bytes, outside))
    else:
        yield from _numbers(field, bounds, outside)


def _sizes(fewest: int, most: int, outside: bool) -> Iterator[int]:
    if fewest:
        yield fewest - 1 if outside else fewest
    if most:
        yield most + 1 if outside else most


def _numbers(field: FieldDescriptor, bounds: Bounds, outside: bool) -> Iterator[float]:
    is_float = field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
    step, number = (0.001, float) if is_float else (1, int)
    if bounds.HasField("least"):
        yield number(bounds.least - step) if outside else number(bounds.least)
    if bounds.HasField("above"):
        yield number(bounds.above) if outside else number(bounds.above + step)
    if bounds.HasField("most"):
        yield number(bounds.most + step) if outside else number(bounds.most)
    if bounds.HasField("also"):
        yield number(bounds.also - 1) if outside else number(bounds.also)
    if outside and is_float and bounds.ByteSize():
        yield from (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("case", list(_cases(outside=True)), ids=str)
def test_value_outside_its_bounds_is_refused_by_its_path(case: Case) -> None:
    with pytest.raises(ServiceError) as caught:
        _CHECKS[case.request](case.message())
    error = caught.value
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert error.field == case.place
    name, _, rule = error.message.partition(" must ")
    assert case.place.endswith(name)
    assert ", got " in rule


@pytest.mark.parametrize("case", list(_cases(outside=False)), ids=str)
def test_value_at_its_bound_is_accepted(case: Case) -> None:
    check_bounds(case.message())


def test_every_bound_of_the_protos_has_a_case() -> None:
    stated = {
        field.full_name
        for file in _FILES
        for message in file.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if _bounds(field).ByteSize()
    }
    assert {case.path[-1].full_name for case in _cases(outside=True)} >= stated
    assert len(stated) > 30


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (
            completion.GenerateRequest(n=129),
            "n",
            "n must be between 1 and 128, got 129.",
        ),
        (completion.GenerateRequest(), "input", "input must be one of prompts, conversation."),
        (
            completion.GenerateRequest(prompts=completion.Prompts()),
            "prompts.items",
            "prompts.items must have 1 to 128 items, got 0.",
        ),
        (
            completion.GenerateRequest(prompts=completion.Prompts(items=[completion.Prompt()])),
            "prompts.items[0].prompt",
            "prompt must be one of text, token_ids.",
        ),
        (
            completion.GenerateRequest(stop=["a", ""]),
            "stop[1]",
            "stop[1] must have 1 to 1,000 characters, got 0.",
        ),
        (
            completion.GenerateRequest(truncate_prompt_tokens=-2),
            "truncate_prompt_tokens",
            "truncate_prompt_tokens must be at least 1, or -1, got -2.",
        ),
        (
            engine_pb2.GenerateRequest(
                prompts=[TokenIds(ids=[1])], sampling=SamplingParams(repetition_penalty=math.nan)
            ),
            "sampling.repetition_penalty",
            "repetition_penalty must be above 0 and at most 2, got nan.",
        ),
        (
            engine_pb2.GenerateRequest(
                prompts=[TokenIds(ids=[1])], sampling=SamplingParams(dry=DryParams(base=math.inf))
            ),
            "sampling.dry.base",
            "base must be at least 1 and finite, got inf.",
        ),
        (
            completion.Tool(name="a b"),
            "name",
            "name must match [A-Za-z0-9_-]{1,128}, got 'a b'.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_error_says_what_is_allowed_and_what_was_given(
    request_: Message, field: str, message: str
) -> None:
    with pytest.raises(ServiceError) as caught:
        check_bounds(request_)
    assert caught.value.field == field
    assert caught.value.message.startswith(message)


def test_bounds_of_a_field_are_found_by_its_path() -> None:
    assert bounds_of(completion.GenerateRequest, "sampling.temperature").most == 2
    assert bounds_of(completion.GenerateRequest, "user") == Bounds()
    assert most(completion.GenerateRequest, "stopping.stop_token_ids") == 144
