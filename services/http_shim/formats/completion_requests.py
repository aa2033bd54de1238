"""Conversion of a completion's JSON to its proto, and of the fields that chats share.

The shim refuses errors that only JSON can have. The tokenizer service checks all values; `param_of`
converts its field paths to the client's names.
"""

import re
from collections.abc import Mapping
from typing import Any

from services.common.contract import MAX_SEQUENCES
from services.http_shim.formats.constraints import (
    constraint_of,
    constraint_param,
    schema_location,
    white_space_param,
)
from services.http_shim.formats.request_bodies import CompletionBody, GenerationBody
from services.http_shim.formats.tools import (
    tool_choice_of,
    tool_param,
    tool_schema_param,
    tools_of,
)
from services.http_shim.images.request_images import RequestImages
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "param_of",
    "prompts_of",
    "schema_param",
    "shared_fields",
    "take_images",
    "to_complete_request",
]

_OVERFLOWS = {
    "truncate": completion_pb2.CONTEXT_OVERFLOW_LOWER_OUTPUT,
    "error": completion_pb2.CONTEXT_OVERFLOW_ERROR,
}
_EARLY_STOPPING: Mapping[bool | str, "types_pb2.EarlyStopping.ValueType"] = {
    False: types_pb2.EARLY_STOPPING_ESTIMATE,
    True: types_pb2.EARLY_STOPPING_FIRST,
    "never": types_pb2.EARLY_STOPPING_NEVER,
}
_PARAMS = {
    "prompts": "prompt",
    "include_stop_string": "include_stop_str_in_output",
    "context_overflow": "context_length_exceeded_behavior",
    "truncate_prompt": "truncate_sequence",
    "delivery": "stream",
    "beam_search": "use_beam_search",
    "beam_search.length_penalty": "length_penalty",
    "beam_search.early_stopping": "early_stopping",
    "sampling.bad_token_ids": "bad_words",
    "sampling.dry": "dry_multiplier",
    "sampling.mirostat": "mirostat_target",
    "sampling.mirostat.target_perplexity": "mirostat_target",
    "sampling.mirostat.learning_rate": "mirostat_lr",
}
_BIAS_FIELD = re.compile(r"sampling\.logit_bias\[(?P<token>\d+)\]")
_IMAGE_FIELD = re.compile(r"images\[\d+\]")


def param_of(path: str, body: GenerationBody) -> str:
    """Return the client's name of a field of a request: "prompts[0].text" becomes "prompt"."""
    if path.startswith("tools["):
        return tool_param(path, body.tools, body.tool_choice)
    if bias := _BIAS_FIELD.fullmatch(path):
        return f"logit_bias.{bias['token']}"
    if image := _IMAGE_FIELD.match(path):
        return image.group()
    path = re.sub(r"\[[^\]]*\]", "", path)
    if path in _PARAMS:
        return _PARAMS[path]
    parts = path.split(".")
    if parts[:2] == ["sampling", "dry"]:
        return f"dry_{parts[2]}"
    if parts[0] == "grammar":
        is_space = parts[1:] == ["json_whitespace"]
        return white_space_param(body) if is_space else constraint_param(body)
    if parts[0] in ("sampling", "stopping") and len(parts) > 1:
        parts = parts[1:]
    if (
        parts[0] == "max_tokens"
        and body.max_tokens is None
        and body.max_completion_tokens is not None
    ):
        return "max_completion_tokens"
    return _PARAMS.get(parts[0], parts[0])


def schema_param(path: str, body: GenerationBody) -> str:
    """Return the client's name of a path into a schema or a message.

    "tools[0].parameters_json.items" becomes "tools[0].function.parameters.items".
    """
    if path.startswith("messages["):
        return path
    if path.startswith("tools["):
        return tool_schema_param(path, body.tools, body.tool_choice)
    _, _, place = path.split(".", 2)  # after "grammar" and its kind
    return f"{schema_location(body)}.{place}"


def take_images(body: CompletionBody) -> RequestImages:
    """Return the images of a body, and leave an empty string in place of each.

    Raises INVALID_ARGUMENT with the client's name of a field.
    """
    images, urls = RequestImages(), body.images or []
    for index, url in enumerate(urls):
        images.add(url, f"images[{index}]")
        urls[index] = ""
    return images


def to_complete_request(body: CompletionBody) -> completion_pb2.GenerateRequest:
    """Convert a body to the request, with an empty place for each image.

    Raises INVALID_ARGUMENT with the client's name of a field.
    """
    n = 1 if body.n is None else body.n
    if body.stream and body.best_of is not None and body.best_of > n:
        raise invalid(
            "best_of",
            f"best_of above n ({n}) can't be streamed; lower best_of or omit stream.",
        )
    return completion_pb2.GenerateRequest(
        **shared_fields(body),
        prompts=completion_pb2.Prompts(
            items=prompts_of(body.prompt, "prompt", MAX_SEQUENCES),
            suffix=body.suffix,
            images=[b""] * len(body.images or ()),
        ),
        best_of=body.best_of,
        echo=bool(body.echo),
        logprobs=body.logprobs,
        truncate_prompt=bool(body.truncate_sequence),
        beam_search=_beam_search(body),
    )


def _beam_search(body: CompletionBody) -> types_pb2.BeamSearch | None:
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1):
            raise invalid("length_penalty", "length_penalty needs use_beam_search: true.")
        if body.early_stopping:
            raise invalid("early_stopping", "early_stopping needs use_beam_search: true.")
        return None
    return types_pb2.BeamSearch(
        length_penalty=body.length_penalty,
        early_stopping=_EARLY_STOPPING[body.early_stopping or False],
    )


def shared_fields(body: GenerationBody) -> dict[str, Any]:
    """Return the fields that completions and chats share. Raises INVALID_ARGUMENT."""
    _refuse_contradictions(body)
    overflow = body.context_length_exceeded_behavior
    return {
        "model": body.model or "",
        "sampling": _sampling(body),
        "stopping": _stopping(body),
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop,
        "include_stop_string": bool(body.include_stop_str_in_output),
        "n": body.n,
        "grammar": constraint_of(body),
        "context_overflow": None if overflow is None else _OVERFLOWS[overflow],
        "delivery": (
            completion_pb2.DELIVERY_DELTAS if body.stream else completion_pb2.DELIVERY_WHOLE
        ),
        "tools": tools_of(body.tools, body.tool_choice),
        "tool_choice": tool_choice_of(body.tools, body.tool_choice),
        "user": body.user or "",
        "dry_sequence_breakers": body.dry_sequence_breakers if body.dry_multiplier else None,
        "no_dry_sequence_breakers": bool(body.dry_multiplier) and body.dry_sequence_breakers == [],
        "skip_special_tokens": body.skip_special_tokens,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "prompt_logprobs": body.prompt_logprobs,
        "bad_words": body.bad_words,
    }


def _refuse_contradictions(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options needs stream: true.")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid(
            "prompt_logprobs", "prompt_logprobs can't be streamed; omit prompt_logprobs or stream."
        )
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        raise invalid(
            "max_completion_tokens",
            "max_tokens and max_completion_tokens must be equal if both are given.",
        )


def prompts_of(
    given: str | list[str | int | list[int]] | None, name: str, most: int
) -> list[completion_pb2.Prompt]:
    """Return the prompts of a field, at most `most`. Raises INVALID_ARGUMENT."""
    if given is None:
        message = f"{name} is required: a string, strings, token ids, or lists of token ids."
        raise invalid(name, message)
    if isinstance(given, str):
        return [completion_pb2.Prompt(text=given)]
    if not given:
        raise invalid(name, f"{name} must have at least one element.")
    if len(given) > most and not isinstance(given[0], int):
        raise invalid(name, f"{name} has {len(given):,} elements; the limit is {most:,}.")
    texts = [element for element in given if isinstance(element, str)]
    ids = [element for element in given if isinstance(element, int)]
    lists = [element for element in given if isinstance(element, list)]
    if len(texts) == len(given):
        return [completion_pb2.Prompt(text=text) for text in texts]
    if len(ids) == len(given):
        lists = [ids]
    elif len(lists) != len(given):
        message = f"{name} must be all strings, all token ids, or all lists of token ids."
        raise invalid(name, message)
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
    if body.allowed_token_ids is not None:
        sampling.allowed_token_ids.CopyFrom(types_pb2.TokenIds(ids=body.allowed_token_ids))
    if body.dry_multiplier:  # 0 turns DRY off, whatever the other fields are
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
