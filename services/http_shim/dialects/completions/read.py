"""Reading of completions."""

from collections.abc import Mapping

from services.common.contract import MAX_SEQUENCES
from services.http_shim.dialects.bodies import body_of
from services.http_shim.dialects.choices import AnswerOptions
from services.http_shim.dialects.completions.types import CompletionBody
from services.http_shim.dialects.completions.write import CompletionWriter
from services.http_shim.dialects.fields import JsonObject
from services.http_shim.dialects.foreign_fields import FOREIGN_TO_COMPLETIONS, check_foreign
from services.http_shim.dialects.generation import NAMES, read_generation
from services.http_shim.dialects.reading import Reading
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["prompts_of", "read_completion"]

_EARLY_STOPPING: Mapping[bool | str, "types_pb2.EarlyStopping.ValueType"] = {
    False: types_pb2.EARLY_STOPPING_ESTIMATE,
    True: types_pb2.EARLY_STOPPING_FIRST,
    "never": types_pb2.EARLY_STOPPING_NEVER,
}
_NAMES: Mapping[str, str] = {
    **NAMES,
    "prompts": "prompt",
    "prompts.items": "prompt",
    "prompts.suffix": "suffix",
    "prompts.images": "images",
    "beam_search": "use_beam_search",
    "beam_search.length_penalty": "length_penalty",
    "beam_search.early_stopping": "early_stopping",
}


def read_completion(fields: JsonObject) -> Reading:
    """Read the body of a completion. Raises INVALID_ARGUMENT with the client's name of a field."""
    body, unknown = body_of(CompletionBody, fields)
    ignored = check_foreign(unknown, fields, FOREIGN_TO_COMPLETIONS)
    n = 1 if body.n is None else body.n
    if body.stream and body.best_of is not None and body.best_of > n:
        raise invalid(
            "best_of",
            f"best_of above n ({n}) can't be streamed; lower best_of or omit stream.",
        )
    reading = read_generation(body, ignored, _NAMES)
    request, prompts = reading.request, reading.request.prompts
    prompts.items.extend(prompts_of(body.prompt, "prompt", MAX_SEQUENCES))
    if body.suffix is not None:
        prompts.suffix = body.suffix
    for index, url in enumerate(body.images or ()):
        reading.note(f"prompts.images[{index}]", f"images[{index}]")
        reading.images.add(url, f"images[{index}]")
        prompts.images.append(b"")
    if body.best_of is not None:
        request.best_of = body.best_of
    if body.logprobs is not None:
        request.logprobs = body.logprobs
    request.echo = bool(body.echo)
    request.truncate_prompt = bool(body.truncate_sequence)
    if (beam_search := _beam_search(body)) is not None:
        request.beam_search.CopyFrom(beam_search)
    options = AnswerOptions.of(body, logprobs=body.logprobs is not None)
    reading.writer = CompletionWriter(options)
    return reading


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
