"""JSON types of request bodies, and their parser.

The parser checks types, unions and integer widths; the tokenizer service checks ranges, for gRPC
clients too. `null` means absent everywhere.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args, get_type_hints

import grpc
import msgspec
from msgspec import Meta, Struct

from services.http_shim.formats.chat_messages import Message
from services.http_shim.formats.constraint_fields import (
    ConstraintFields,
    JsonObject,
    StructuralTagFormat,
)
from services.http_shim.formats.foreign_fields import (
    FOREIGN_TO_CHATS,
    FOREIGN_TO_COMPLETIONS,
    ForeignFields,
    without_foreign,
)
from services.http_shim.formats.tool_fields import NamedToolChoice, Tool
from tokenwire.errors import ServiceError, invalid

__all__ = [
    "Body",
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "GenerationBody",
    "Grammar",
    "JsonObjectFormat",
    "JsonSchemaFormat",
    "JsonSchemaGrammar",
    "JsonSchemaSpec",
    "KeptTokens",
    "LarkGrammar",
    "LeftOut",
    "LlguidanceGrammar",
    "LoadAdapterBody",
    "MultiCompletionBody",
    "Priority",
    "RegexGrammar",
    "Seconds",
    "StreamOptions",
    "TemplateBody",
    "TokenizeBody",
    "Uint32",
    "UnloadAdapterBody",
    "parse",
]

Uint32: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
KeptTokens: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # -1: as many as fit
Priority: TypeAlias = Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86_400)]
_BOUNDED = Meta(max_length=4_096)  # the services have lower limits
_IDS = Meta(max_length=2**20)  # as many as a body may have
Strings: TypeAlias = Annotated[list[str], _BOUNDED]


class LeftOut(Struct):
    """An item of a list that is left out, and whose path counts as that of an unknown field."""


class TextFormat(Struct, tag_field="type", tag="text"):
    """`response_format`: free text."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    """`response_format`: any JSON object, or one that matches a schema."""

    schema: JsonObject | None = None


class JsonSchemaSpec(Struct):
    """`response_format.json_schema`; `name` and `strict` have no effect."""

    schema: JsonObject | None = None
    name: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """`response_format`: JSON that matches a schema."""

    json_schema: JsonSchemaSpec | None = None


class RegexGrammar(Struct, tag_field="type", tag="regex"):
    """`grammar`: a regular expression."""

    value: str


class JsonSchemaGrammar(Struct, tag_field="type", tag="json_schema"):
    """`grammar`: a JSON Schema, as an object or as text."""

    value: str | JsonObject


class LarkGrammar(Struct, tag_field="type", tag="lark"):
    """`grammar`: a Lark grammar."""

    value: str


class LlguidanceGrammar(Struct, tag_field="type", tag="llguidance"):
    """`grammar`: llguidance's JSON, as an object or as text."""

    value: str | JsonObject


class StreamOptions(Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedToolChoice
ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat
Grammar: TypeAlias = RegexGrammar | JsonSchemaGrammar | LarkGrammar | LlguidanceGrammar


class GenerationBody(ConstraintFields):
    """Fields that the bodies of completions and chats share."""

    foreign: ClassVar[ForeignFields]
    """Fields of other servers, refused unless their value has no effect"""

    model: str | None = None
    max_tokens: Uint32 | None = None
    max_completion_tokens: Uint32 | None = None
    min_tokens: Uint32 | None = None
    ignore_eos: bool | None = None
    stop: str | Strings | None = None
    stop_token_ids: Annotated[list[Uint32], _BOUNDED] | None = None
    include_stop_str_in_output: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**32 - 1)] | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[Uint32, float], Meta(max_length=2**18)] | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Uint32 | None = None
    dry_sequence_breakers: Strings | None = None
    mirostat_target: float | None = None
    mirostat_lr: float | None = None
    n: Uint32 | None = None
    context_length_exceeded_behavior: Literal["truncate", "error"] | None = None
    response_format: ResponseFormat | None = None
    grammar: Grammar | str | None = None
    tools: Annotated[list[Tool], _BOUNDED] | None = None
    tool_choice: ToolChoice | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # vLLM's fields
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: KeptTokens | None = None
    prompt_logprobs: Uint32 | None = None
    allowed_token_ids: Annotated[list[Uint32], _IDS] | None = None
    bad_words: Strings | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    foreign = FOREIGN_TO_COMPLETIONS

    # msgspec allows one array type in a union; `to_complete_request` checks that elements agree
    prompt: str | Annotated[list[str | Uint32 | Annotated[list[Uint32], _IDS]], _IDS] | None = None
    suffix: str | None = None
    best_of: Uint32 | None = None
    echo: bool | None = None
    logprobs: Uint32 | None = None
    truncate_sequence: bool | None = None
    images: Strings | None = None
    # vLLM's and transformers' fields
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    foreign = FOREIGN_TO_CHATS

    messages: Annotated[list[Message], _BOUNDED] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    echo: bool | None = None
    functions: Any = None
    function_call: Any = None


class MultiCompletionBody(Struct):
    """The body of POST /v1/completion."""

    model: str | Strings | None = None
    prompt: str | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**32 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: Strings | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stream: bool | None = None


class TemplateBody(Struct):
    """The body of POST /apply-template."""

    model: str | None = None
    messages: Annotated[list[Message], _BOUNDED] | None = None
    tools: Annotated[list[Tool], _BOUNDED] | None = None
    tool_choice: ToolChoice | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None


class TokenizeBody(TemplateBody):
    """The body of POST /tokenize."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class LoadAdapterBody(Struct):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: str | None = None
    lora_path: str | None = None


class UnloadAdapterBody(Struct):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: str | None = None


class DetokenizeBody(Struct):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Uint32], _IDS] | None = None


Body = TypeVar("Body", bound=Struct)
_OBJECT = msgspec.json.Decoder(JsonObject)
_BIAS = msgspec.json.Decoder(dict[Uint32, float])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_EXACT_FLOATS = 2**53
"""Bound of the integers that a double holds exactly"""
_INDEX = re.compile(r"\[\d+\]")
_MAX_UNKNOWN = 1_000  # unknown fields that are collected
_PLACE = re.compile(r"(?P<what>.*) - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
_DEEP = frozenset({"images", "messages", "structured_outputs", "system", "tools"})
"""Fields within which `param` is a path"""


def parse(decoder: msgspec.json.Decoder[Body], body: bytes) -> tuple[Body, list[str]]:
    """Parse a body; return it and the paths of its unknown fields.

    Of paths that differ only in indices, the first is returned. Raises INVALID_ARGUMENT with the
    field at fault: a top-level field, or a path within images, messages, tools or
    structured_outputs.
    """
    try:
        body.decode()  # msgspec does not check the UTF-8 of skipped and raw values
        fields = _OBJECT.decode(body)
        value = _decode(decoder, body)
        if isinstance(value, GenerationBody):
            fields = without_foreign(fields, value.foreign)
        unknown: dict[str, str] = {}
        for path in islice(_unknown(value, fields), _MAX_UNKNOWN):
            unknown.setdefault(_INDEX.sub("[]", path), path)
        return value, list(unknown.values())
    except msgspec.ValidationError as error:
        raise _wrong_bias(body) or _wrong_type(str(error)) from None
    except UnicodeDecodeError:
        raise _malformed("it is not UTF-8") from None
    except RecursionError:
        raise _malformed("it is nested too deeply") from None
    except msgspec.DecodeError as error:
        hint = " (or it has half of a surrogate pair)" if b"\\ud" in body.lower() else ""
        raise _malformed(str(error) + hint) from None


def _decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Decode a body. 4.0 and 1e1 are integers, as in JSON Schema, where an integer is expected."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        return decoder.decode(msgspec.json.encode(_FOLDING.decode(body)))


def _fold(literal: str) -> int | float:
    number = float(literal)
    return int(number) if number.is_integer() and abs(number) < _EXACT_FLOATS else number


_FOLDING = msgspec.json.Decoder(float_hook=_fold)


def _unknown(value: Struct, fields: JsonObject) -> Iterator[str]:
    """Yield the paths of unknown fields that are not null, except within arbitrary JSON."""
    known, parents = _fields_of(type(value))
    if not fields.keys() <= known:
        yield from (
            name for name, raw in fields.items() if name not in known and bytes(raw) != b"null"
        )
    for name in parents:
        inner = getattr(value, name)
        if isinstance(inner, Struct):
            for path in _unknown(inner, _OBJECT.decode(fields[name])):
                yield f"{name}.{path}"
        elif isinstance(inner, list):
            for index, (item, raw) in enumerate(
                zip(inner, _ITEMS.decode(fields[name]), strict=True)
            ):
                if isinstance(item, LeftOut):
                    yield f"{name}[{index}]"
                elif isinstance(item, Struct):  # else it is a text, where both are allowed
                    for path in _unknown(item, _OBJECT.decode(raw)):
                        yield f"{name}[{index}].{path}"


@cache
def _fields_of(of: type[Struct]) -> tuple[frozenset[str | None], Sequence[str]]:
    """Return the field names of a type with its tag, and the fields that may hold structs."""
    known = frozenset((*of.__struct_fields__, of.__struct_config__.tag_field))
    hints = get_type_hints(of)
    return known, [name for name in of.__struct_fields__ if _holds_structs(hints[name])]


def _holds_structs(kind: object) -> bool:
    is_struct = isinstance(kind, type) and issubclass(kind, Struct)
    return is_struct or any(map(_holds_structs, get_args(kind)))


def _wrong_bias(body: bytes) -> ServiceError | None:
    """Return the error of the first invalid entry of logit_bias; msgspec omits the key."""
    try:
        entries = _OBJECT.decode(_OBJECT.decode(body)["logit_bias"])
    except (KeyError, msgspec.DecodeError):
        return None
    for key, bias in entries.items():
        try:
            _BIAS.decode(msgspec.json.encode({key: bias}))
        except msgspec.ValidationError as error:
            what, _, place = str(error).partition(" - at ")
            is_key = place.startswith("`key`")
            why = "the key must be a token id" if is_key else what
            return invalid(f"logit_bias.{key}", f"logit_bias.{key}: {why}.")
    return None


def _malformed(why: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_JSON", f"The body can't be parsed: {why}."
    )


def _wrong_type(message: str) -> ServiceError:
    place = _PLACE.fullmatch(message)
    if place is None or not place["path"]:
        return ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_BODY", f"The body: {message}."
        )
    path, what = place["path"], place["what"]
    field = re.split(r"[.\[]", path, maxsplit=1)[0]
    missing = _MISSING.fullmatch(what)
    param = field
    if field in _DEEP:
        param = path if missing is None else f"{path}.{missing['name']}"
    return invalid(param, f"{path}: {what}.")
