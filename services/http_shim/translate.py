"""From the JSON of a completion to its proto, and what that of a chat has in common. Pure.

What only JSON can get wrong is refused here; values are checked by the tokenizer service, whose
field paths `param_of` turns back into the client's names.
"""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from services.http_shim.requests import (
    CompletionBody,
    FunctionSpec,
    FunctionTool,
    GenerationBody,
    Grammar,
    JsonObject,
    JsonObjectFormat,
    JsonSchemaFormat,
    JsonSchemaGrammar,
    LarkGrammar,
    LlguidanceGrammar,
    RegexGrammar,
    ResponseFormat,
)
from tokenwire.completion.v1 import completion_pb2
from tokenwire.errors import invalid
from tokenwire.types.v1 import types_pb2

__all__ = [
    "json_text",
    "param_of",
    "shared_fields",
    "to_complete_request",
    "tool_param",
    "tools_of",
]

_TOOL_MODES = {
    "none": completion_pb2.TOOL_MODE_NONE,
    "auto": completion_pb2.TOOL_MODE_AUTO,
    "required": completion_pb2.TOOL_MODE_REQUIRED,
}
_OVERFLOWS = {
    "truncate": completion_pb2.CONTEXT_OVERFLOW_LOWER_OUTPUT,
    "error": completion_pb2.CONTEXT_OVERFLOW_ERROR,
}
_PARAMS = {
    "prompts": "prompt",
    "include_stop_string": "include_stop_str_in_output",
    "context_overflow": "context_length_exceeded_behavior",
    "truncate_prompt": "truncate_sequence",
    "delivery": "stream",
    "sampling.dry": "dry_multiplier",
    "sampling.mirostat": "mirostat_target",
    "sampling.mirostat.target_perplexity": "mirostat_target",
    "sampling.mirostat.learning_rate": "mirostat_lr",
}
_TOOL_FIELD = re.compile(r"(?P<tool>tools\[\d+\])\.(?P<field>\w+)")


def param_of(path: str, body: GenerationBody) -> str:
    """The client's name for a field of a request: "prompts[0].text" is "prompt"."""
    if path.startswith("tools["):
        return tool_param(path)
    path = re.sub(r"\[[^\]]*\]", "", path)
    if path in _PARAMS:
        return _PARAMS[path]
    parts = path.split(".")
    if parts[:2] == ["sampling", "dry"]:
        return f"dry_{parts[2]}"
    if parts[0] == "grammar" and body.grammar is None:
        return "response_format"
    if parts[0] in ("sampling", "stopping") and len(parts) > 1:
        parts = parts[1:]
    if (
        parts[0] == "max_tokens"
        and body.max_tokens is None
        and body.max_completion_tokens is not None
    ):
        return "max_completion_tokens"
    return _PARAMS.get(parts[0], parts[0])


def tool_param(path: str) -> str:
    """The client's name for a field of a tool: "tools[0].name" is "tools[0].function.name"."""
    place = _TOOL_FIELD.match(path)
    if place is None:
        return path
    return f"{place['tool']}.function.{place['field'].removesuffix('_json')}"


def to_complete_request(body: CompletionBody) -> completion_pb2.CompleteRequest:
    """The request, with DELIVERY_WHOLE unless it streams.

    Raises INVALID_ARGUMENT, with the client's name of the field, for what the proto can't say.
    """
    if body.stream and body.best_of:
        raise invalid("best_of", "best_of can't be streamed: leave out best_of or stream.")
    return completion_pb2.CompleteRequest(
        **shared_fields(body),
        prompts=_prompts(body.prompt),
        suffix=body.suffix,
        best_of=body.best_of,
        echo=bool(body.echo),
        logprobs=body.logprobs,
        truncate_prompt=bool(body.truncate_sequence),
        images=body.images,
    )


def shared_fields(body: GenerationBody) -> dict[str, Any]:
    """The fields that CompleteRequest and ChatRequest have in common, DELIVERY_WHOLE unless it
    streams. Raises INVALID_ARGUMENT as `to_complete_request`."""
    _refuse_contradictions(body)
    overflow = body.context_length_exceeded_behavior
    return {
        "model": body.model or "",
        "sampling": _sampling(body),
        "stopping": _stopping(body),
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop,
        "include_stop_string": bool(body.include_stop_str_in_output),
        "n": body.n,
        "grammar": _constraint(body),
        "context_overflow": None if overflow is None else _OVERFLOWS[overflow],
        "delivery": (
            completion_pb2.DELIVERY_DELTAS if body.stream else completion_pb2.DELIVERY_WHOLE
        ),
        "tools": tools_of(body.tools),
        "tool_choice": _tool_choice(body),
        "user": body.user or "",
        "dry_sequence_breakers": body.dry_sequence_breakers if body.dry_multiplier else None,
    }


def _refuse_contradictions(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only for requests with stream: true.")
    if body.grammar is not None and body.response_format is not None:
        raise invalid("grammar", "grammar and response_format exclude each other.")
    if body.dry_sequence_breakers == []:
        raise invalid(
            "dry_sequence_breakers",
            "dry_sequence_breakers must not be empty: leave it out for the usual ones.",
        )
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        raise invalid(
            "max_completion_tokens",
            "max_tokens and max_completion_tokens are two names of one number; they differ here.",
        )


def _prompts(
    prompt: str | list[str | int | list[int]] | None,
) -> list[completion_pb2.Prompt]:
    if prompt is None:
        raise invalid(
            "prompt", "prompt is required: a string, strings, token ids, or lists of ids."
        )
    if isinstance(prompt, str):
        return [completion_pb2.Prompt(text=prompt)]
    if not prompt:
        raise invalid("prompt", "prompt is an empty list; it needs at least one element.")
    texts = [element for element in prompt if isinstance(element, str)]
    ids = [element for element in prompt if isinstance(element, int)]
    lists = [element for element in prompt if isinstance(element, list)]
    if len(texts) == len(prompt):
        return [completion_pb2.Prompt(text=text) for text in texts]
    if len(ids) == len(prompt):
        lists = [ids]
    elif len(lists) != len(prompt):
        raise invalid("prompt", "prompt mixes strings, token ids and lists; use one kind.")
    return [completion_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=ids)) for ids in lists]


def _sampling(body: GenerationBody) -> types_pb2.SamplingParams:
    sampling = types_pb2.SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k == -1 else body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
    )
    if body.dry_multiplier:  # 0 is off, whatever the others say
        sampling.dry.CopyFrom(
            types_pb2.DryParams(
                multiplier=body.dry_multiplier,
                base=body.dry_base,
                allowed_length=body.dry_allowed_length,
            )
        )
    if body.mirostat_target is not None or body.mirostat_lr is not None:
        sampling.mirostat.CopyFrom(
            types_pb2.MirostatParams(
                target_perplexity=body.mirostat_target, learning_rate=body.mirostat_lr
            )
        )
    return sampling


def _stopping(body: GenerationBody) -> types_pb2.StoppingParams:
    return types_pb2.StoppingParams(
        max_tokens=body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=body.stop_token_ids,
    )


def _constraint(body: GenerationBody) -> types_pb2.GrammarSpec | None:
    if body.grammar is not None:
        return _of_grammar(body.grammar)
    if body.response_format is not None:
        return _of_response_format(body.response_format)
    return None


def _of_grammar(grammar: Grammar) -> types_pb2.GrammarSpec:
    match grammar:
        case RegexGrammar():
            return types_pb2.GrammarSpec(regex=grammar.value)
        case JsonSchemaGrammar():
            return types_pb2.GrammarSpec(json_schema=json_text(grammar.value))
        case LarkGrammar():
            return types_pb2.GrammarSpec(lark=grammar.value)
        case LlguidanceGrammar():
            return types_pb2.GrammarSpec(llguidance=json_text(grammar.value))


def _of_response_format(form: ResponseFormat) -> types_pb2.GrammarSpec | None:
    if isinstance(form, JsonSchemaFormat):
        if form.json_schema is None or form.json_schema.schema is None:
            raise invalid("response_format", "response_format.json_schema.schema is required.")
        return types_pb2.GrammarSpec(json_schema=json_text(form.json_schema.schema))
    if isinstance(form, JsonObjectFormat):
        if form.schema is not None:
            return types_pb2.GrammarSpec(json_schema=json_text(form.schema))
        return types_pb2.GrammarSpec(json_object=types_pb2.JsonObject())
    return None


def tools_of(tools: Iterable[FunctionTool] | None) -> list[completion_pb2.Tool]:
    """The functions that may be called."""
    return [_tool(tool.function) for tool in tools or ()]


def _tool(function: FunctionSpec) -> completion_pb2.Tool:
    return completion_pb2.Tool(
        name=function.name,
        description=function.description or "",
        parameters_json="" if function.parameters is None else json_text(function.parameters),
        strict=bool(function.strict),
    )


def _tool_choice(body: GenerationBody) -> completion_pb2.ToolChoice | None:
    if body.tool_choice is None:
        return None
    if isinstance(body.tool_choice, str):
        return completion_pb2.ToolChoice(mode=_TOOL_MODES[body.tool_choice])
    return completion_pb2.ToolChoice(name=body.tool_choice.function.name)


def json_text(value: str | JsonObject) -> str:
    """JSON as text, as the client wrote it."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
