"""Types of JSON fields that several bodies have."""

import copy
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from google.protobuf.message import Message
from msgspec import Meta, Struct

from services.common.bounds import bounds_of
from services.common.constraint_texts import JsonObject
from services.common.model_files.keep_alive import parse_keep_alive
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.options.v1.bounds_pb2 import Bounds

__all__ = [
    "BOUNDED",
    "IDS",
    "STATED",
    "AnswerTokens",
    "Continuation",
    "FrequencyPenalty",
    "GenerationPrompt",
    "Int64",
    "IsStreamed",
    "JsonObject",
    "KeepAlive",
    "KeptTokens",
    "LeftOut",
    "MinP",
    "ModelName",
    "ParallelCalls",
    "PresencePenalty",
    "Priority",
    "ReasoningEffort",
    "RepetitionPenalty",
    "StopStrings",
    "Strings",
    "Temperature",
    "TemplateArguments",
    "TemplateName",
    "Timeout",
    "TopK",
    "TopP",
    "Uint32",
    "UserLabel",
    "about",
    "keywords_of",
    "prompt_keywords",
    "read_keep_alive",
]

STATED = "x-stated"
"""Keyword of a field's schema with those that `about` states; OpenAPI puts them in their places"""
_KEYWORDS: Mapping[str, str] = {
    "least": "minimum",
    "most": "maximum",
    "above": "exclusiveMinimum",
    "min_items": "minItems",
    "max_items": "maxItems",
    "min_length": "minLength",
    "max_length": "maxLength",
}
BOUNDED = Meta(max_length=4_096)  # the services have lower limits
IDS = Meta(max_length=2**20)  # as many as a body may have
Uint32: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
KeptTokens: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # -1: as many as fit
Strings: TypeAlias = Annotated[list[str], BOUNDED]


def read_keep_alive(value: str | float | None) -> float | None:
    """Return the seconds of a `keep_alive`; None without one. Raises INVALID_ARGUMENT."""
    try:
        return None if value is None else parse_keep_alive(value)
    except ValueError as error:
        raise invalid("keep_alive", f"keep_alive {error}.") from None


def about(
    meaning: str,
    path: str = "",
    within: type[Message] = completion_pb2.GenerateRequest,
    **keywords: Any,
) -> Meta:
    """Return what documents a field of a body.

    path: of the field of the contract's message `within` that it becomes, whose bounds hold for it.
    keywords: further ones of its JSON Schema.
    """
    bounds = keywords_of(bounds_of(within, path)) if path else {}
    return Meta(description=meaning, extra_json_schema={STATED: bounds | keywords})


def keywords_of(bounds: Bounds) -> dict[str, Any]:
    """Return bounds as keywords of JSON Schema: those of a field and of its items together."""
    keywords: dict[str, Any] = {
        _KEYWORDS[field.name]: int(value) if float(value).is_integer() else value
        for field, value in bounds.ListFields()
        if field.name in _KEYWORDS
    }
    if bounds.HasField("also"):
        keywords["minimum"] = int(min(bounds.least, bounds.also))
    if bounds.pattern:
        keywords["pattern"] = f"^{bounds.pattern}$"
    if bounds.one_of:
        keywords["enum"] = [*bounds.one_of, None]
    if bounds.HasField("items"):
        keywords |= keywords_of(bounds.items)
    return keywords


def prompt_keywords(most: int) -> dict[str, Any]:
    """Return the keywords of prompts, at most so many, whose elements are all of one kind.

    msgspec allows one type of array in a union, so the types alone do not say that.
    """
    token_id = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
    token_ids = {"type": "array", "minItems": 1, "items": token_id}
    prompts = {"type": "array", "minItems": 1, "maxItems": most}
    text = {"type": "string"}
    kinds = [text, prompts | {"items": text}, token_ids, prompts | {"items": token_ids}]
    return {"anyOf": copy.deepcopy(kinds)}


class LeftOut(Struct):
    """An item of a list that is left out, and whose path counts as that of an unknown field."""


# Fields of several bodies.
ModelName: TypeAlias = Annotated[
    str | None, about("Id, alias, or id:variant; absent or `default` = the only model.")
]
Priority: TypeAlias = Annotated[
    Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None,
    about("Priority, lower first; at least 0 with API keys.", default=0),
]
Timeout: TypeAlias = Annotated[
    Annotated[float, Meta(gt=0, le=86_400)] | None,
    about("Seconds after which the request fails with 504; absent = none."),
]
KeepAlive: TypeAlias = Annotated[
    str | float | None,
    about(
        "Time that a model on demand stays in memory after the request: seconds, or a duration "
        "such as 5m; 0 = it is unloaded at once, negative = never. No effect on other models."
    ),
]
Temperature: TypeAlias = Annotated[
    float | None, about("Temperature; 0 = greedy.", "sampling.temperature", default=1)
]
TopP: TypeAlias = Annotated[float | None, about("Nucleus mass.", "sampling.top_p", default=1)]
TopK: TypeAlias = Annotated[
    Annotated[int, Meta(ge=-1, le=2**32 - 1)] | None,
    about("Number of likeliest tokens to sample from; -1 and 0 = all.", "sampling.top_k"),
]
IsStreamed: TypeAlias = Annotated[
    bool | None,
    about("Answer with server-sent events; the last one is `data: [DONE]`.", default=False),
]
UserLabel: TypeAlias = Annotated[str | None, about("A label for the logs.")]
FrequencyPenalty: TypeAlias = Annotated[
    float | None,
    about(
        "Penalty for each occurrence of a token in the output.",
        "sampling.frequency_penalty",
        default=0,
    ),
]
PresencePenalty: TypeAlias = Annotated[
    float | None,
    about(
        "Penalty for any occurrence of a token in the output.",
        "sampling.presence_penalty",
        default=0,
    ),
]
RepetitionPenalty: TypeAlias = Annotated[
    float | None,
    about(
        "Divides positive logits of tokens that occurred, and multiplies negative ones.",
        "sampling.repetition_penalty",
        default=1,
    ),
]
MinP: TypeAlias = Annotated[
    float | None,
    about("Least probability, relative to the likeliest.", "sampling.min_p", default=0),
]
ParallelCalls: TypeAlias = Annotated[
    bool | None, about("Allow several calls in an answer.", default=True)
]
AnswerTokens: TypeAlias = Annotated[
    Uint32 | None,
    about("Most tokens of the answer, with its reasoning.", minimum=1),
]
TemplateName: TypeAlias = Annotated[
    str | None, about("Name of one of the checkpoint's templates.", default="default")
]
TemplateArguments: TypeAlias = Annotated[
    JsonObject | None, about("Further variables of the template; 65,536 characters at most.")
]
GenerationPrompt: TypeAlias = Annotated[
    bool | None,
    about(
        "End the prompt with the start of an answer. Default: true unless a message is continued."
    ),
]
Continuation: TypeAlias = Annotated[
    bool | None,
    about("Continue the last message, which must be the assistant's.", default=False),
]
ReasoningEffort: TypeAlias = Annotated[
    str | None,
    about(
        "Effort of the reasoning: a variable of the template, which also sets enable_thinking.",
        "conversation.reasoning_effort",
    ),
]
StopStrings: TypeAlias = Annotated[
    str | Strings | None,
    about(
        "Strings that end a choice and are cut off: at most 16, or the server's own limit.",
        "stop",
    ),
]
