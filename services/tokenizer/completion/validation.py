"""Validation of a GenerateRequest before any work; errors name the field by its path."""

from collections.abc import Container, Mapping, Sequence
from itertools import islice
from typing import Literal

import grpc

from services.common.beam_search import check_beam_search
from services.common.bounds import check_bounds
from services.common.contract import (
    DEFAULT_MAX_TOKENS,
    MAX_SEQUENCES,
    MAX_STOP_TOKEN_IDS,
    MAX_TEXT_BYTES,
)
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.infill import InfillTemplate
from services.tokenizer.tool_schemas import check_tools, tool_call_grammar
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "check_generates",
    "check_ids",
    "check_model",
    "check_prompts",
    "check_request",
    "check_text_size",
    "require",
]

_Penalty = Literal["frequency_penalty", "presence_penalty", "repetition_penalty"]
_PENALTIES: Mapping[_Penalty, float] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Neutral value of each penalty"""
_ONLY_WITH_PROMPTS: Sequence[str] = ("best_of", "truncate_prompt", "beam_search")
_ONLY_IN_CONVERSATIONS: Sequence[str] = ("drop_oldest_messages", "parallel_tool_calls")


def check_model(model: str, served: str, adapters: Container[str] = ()) -> None:
    """Raise NOT_FOUND unless `model` names the served model or one of its adapters."""
    if model not in ("", "default", served) and model not in adapters:
        raise ServiceError(
            grpc.StatusCode.NOT_FOUND,
            "MODEL_NOT_FOUND",
            f"The model {model!r} does not exist; this server has {served!r}.",
            field="model",
        )


def check_generates(limits: ModelLimits) -> None:
    """Raise FAILED_PRECONDITION if the model only makes vectors of texts."""
    if limits.only_embeds:
        does = "scores texts" if limits.vectors_are_scores else "makes embeddings"
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "ONLY_EMBEDS",
            f"The model {limits.model} only {does}; it generates nothing.",
            field="model",
        )


def check_ids(field: str, ids: Sequence[int], size: int, begin: int = 0) -> None:
    """Raise INVALID_ARGUMENT if an id from place `begin` on is not below `size`."""
    if max(ids[begin:], default=0) >= size:
        checked = enumerate(islice(ids, begin, None), begin)
        place, token = next((place, token) for place, token in checked if token >= size)
        raise invalid(f"{field}[{place}]", f"Token ids must be below {size:,}, got {token}.")


def check_text_size(field: str, *texts: str) -> None:
    """Raise INVALID_ARGUMENT if the texts together exceed 1 MiB."""
    if sum(len(text.encode()) for text in texts) > MAX_TEXT_BYTES:
        raise invalid(field, f"A request must have at most {MAX_TEXT_BYTES:,} bytes of text.")


def check_request(request: completion_pb2.GenerateRequest, limits: ModelLimits) -> None:
    """Raise the ServiceError of the first field that is wrong or not implemented.

    Beside the bounds of its fields, the input is for `check_prompts`, or the chat template, to
    check.
    """
    check_model(request.model, limits.model)
    check_generates(limits)
    _check_logprobs(request, limits)  # first, as the limit of the server may be below the bound
    check_bounds(request)
    _check_input(request)
    _check_counts(request, limits)  # first, as it bounds the work on prompts
    _check_stopping(request, limits)
    _check_sampling(request, limits)
    _check_truncation(request)
    if request.bad_words:
        require(limits, engine_pb2.CAPABILITY_TOKEN_LIMITS, "bad_words")
    if request.HasField("grammar"):
        require(limits, engine_pb2.CAPABILITY_GRAMMAR, "grammar")
    check_tools(request.tools, request.tool_choice)
    if request.HasField("beam_search"):
        _check_beams(request, limits)
    if request.prediction:
        _check_prediction(request)
    if request.HasField("resume"):
        _check_resume(request, limits)


def check_prompts(
    request: completion_pb2.GenerateRequest, limits: ModelLimits, infill: InfillTemplate | None
) -> None:
    """Raise the ServiceError of the first field that is wrong for the request's prompts."""
    for index, prompt in enumerate(request.prompts.items):
        if prompt.HasField("token_ids"):
            field = f"prompts.items[{index}].token_ids.ids"
            # a prompt that exceeds the context is refused or cut to its end
            begin = max(0, len(prompt.token_ids.ids) - limits.context_length)
            check_ids(field, prompt.token_ids.ids, limits.vocabulary_size, begin)
    if request.prompts.HasField("suffix"):
        _check_suffix(request, limits, infill)
    if request.HasField("logprobs") and request.echo:
        require(limits, engine_pb2.CAPABILITY_PROMPT_LOGPROBS, "logprobs")
    if tool_call_grammar(request.tools, request.tool_choice) is not None:
        if request.HasField("grammar"):
            raise invalid("grammar", "Tool calls are already constrained: leave out grammar.")
        require(limits, engine_pb2.CAPABILITY_GRAMMAR, "tools")


def _check_input(request: completion_pb2.GenerateRequest) -> None:
    """Check that there is no field that only the other kind of input has."""
    fields, other = _ONLY_IN_CONVERSATIONS, "a conversation"
    if request.HasField("conversation"):
        fields, other = _ONLY_WITH_PROMPTS, "prompts"
    for field, _ in request.ListFields():
        if field.name in fields:
            raise invalid(field.name, f"{field.name} needs {other}: leave it out.")


def _check_counts(request: completion_pb2.GenerateRequest, limits: ModelLimits) -> None:
    n = request.n if request.HasField("n") else 1
    if request.best_of:
        if request.best_of < n:
            message = f"best_of must be at least n, which is {n}, got {request.best_of}."
            raise invalid("best_of", message)
        if request.best_of > n:
            if request.delivery != completion_pb2.DELIVERY_WHOLE:
                raise invalid(
                    "best_of", "best_of above n can't be streamed: it needs DELIVERY_WHOLE."
                )
            if not request.HasField("beam_search"):
                require(limits, engine_pb2.CAPABILITY_LOGPROBS, "best_of")
    most = min(MAX_SEQUENCES, limits.max_sequences)
    draws, prompts = max(n, request.best_of), _prompt_count(request)
    if prompts * draws > most:
        name = "best_of" if request.best_of > n else "n"
        raise invalid(
            name if prompts <= most else "prompts.items",
            f"prompts x {name} must be at most {most}, got {prompts} x {draws}.",
        )


def _prompt_count(request: completion_pb2.GenerateRequest) -> int:
    return len(request.prompts.items) if request.HasField("prompts") else 1


def _check_suffix(
    request: completion_pb2.GenerateRequest, limits: ModelLimits, infill: InfillTemplate | None
) -> None:
    if infill is None:
        if not limits.appends_suffix:
            raise invalid("prompts.suffix", f"{limits.model} can't infill: leave out suffix.")
        return
    if request.echo:
        raise invalid(
            "echo", "echo can't be combined with suffix, whose answer is only the middle."
        )
    if request.HasField("truncate_prompt_tokens"):
        asked, field = request.truncate_prompt_tokens, "truncate_prompt_tokens"
        if 0 <= asked < infill.control_count:
            raise invalid(
                field,
                f"{field} must be at least {infill.control_count} with a suffix, the number of the "
                "prompt's control tokens.",
            )


def _check_logprobs(request: completion_pb2.GenerateRequest, limits: ModelLimits) -> None:
    is_conversation = request.HasField("conversation")
    most = limits.max_chat_logprobs if is_conversation else limits.max_logprobs
    if request.HasField("logprobs"):
        if request.logprobs > most:
            raise invalid("logprobs", f"logprobs must be at most {most}, got {request.logprobs}.")
        require(limits, engine_pb2.CAPABILITY_LOGPROBS, "logprobs")
    if request.HasField("prompt_logprobs"):
        if request.prompt_logprobs > most:
            message = f"prompt_logprobs must be at most {most}, got {request.prompt_logprobs}."
            raise invalid("prompt_logprobs", message)
        require(limits, engine_pb2.CAPABILITY_PROMPT_LOGPROBS, "prompt_logprobs")


def _check_truncation(request: completion_pb2.GenerateRequest) -> None:
    if request.HasField("truncate_prompt_tokens") and request.drop_oldest_messages:
        raise invalid(
            "drop_oldest_messages",
            "truncate_prompt_tokens cuts the prompt, too: leave out one of the two.",
        )


def _check_stopping(request: completion_pb2.GenerateRequest, limits: ModelLimits) -> None:
    stopping = request.stopping
    if stopping.HasField("max_tokens") and stopping.max_tokens == 0:
        if request.HasField("conversation"):
            raise invalid("stopping.max_tokens", "An answer needs a limit of at least 1 token.")
        if not request.echo:
            raise invalid(
                "stopping.max_tokens", "max_tokens 0 without echo returns nothing: set echo."
            )
    if stopping.min_tokens > _max_tokens(request, limits):
        raise invalid("stopping.min_tokens", "min_tokens must be at most max_tokens.")
    if len(stopping.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(
            "stopping.stop_token_ids", f"A request must have at most {MAX_STOP_TOKEN_IDS} stop ids."
        )
    check_ids("stopping.stop_token_ids", stopping.stop_token_ids, limits.vocabulary_size)
    if stopping.min_tokens or stopping.ignore_eos or stopping.stop_token_ids:
        require(limits, engine_pb2.CAPABILITY_STOPPING, "stopping")
    if len(request.stop) > limits.max_stop_strings:
        raise invalid(
            "stop", f"A request must have at most {limits.max_stop_strings} stop strings."
        )


def _max_tokens(request: completion_pb2.GenerateRequest, limits: ModelLimits) -> int:
    """Return the most tokens of a choice; a conversation without a limit has its context."""
    if request.stopping.HasField("max_tokens"):
        return request.stopping.max_tokens
    return limits.context_length if request.HasField("conversation") else DEFAULT_MAX_TOKENS


def _check_sampling(request: completion_pb2.GenerateRequest, limits: ModelLimits) -> None:
    sampling, size = request.sampling, limits.vocabulary_size
    for token in sampling.logit_bias:
        if token >= size:
            message = f"Token ids must be below {size:,}, got {token}."
            raise invalid(f"sampling.logit_bias[{token}]", message)
    _check_token_limits(sampling, limits)
    _check_dry(request, limits)
    _check_mirostat(sampling)

    for name, neutral in _PENALTIES.items():
        if sampling.HasField(name) and getattr(sampling, name) != neutral:
            require(limits, engine_pb2.CAPABILITY_PENALTIES, f"sampling.{name}")
    if sampling.logit_bias:
        require(limits, engine_pb2.CAPABILITY_LOGIT_BIAS, "sampling.logit_bias")
    if sampling.dry.multiplier:
        require(limits, engine_pb2.CAPABILITY_DRY, "sampling.dry")
    if sampling.HasField("mirostat"):
        require(limits, engine_pb2.CAPABILITY_MIROSTAT, "sampling.mirostat")


def _check_token_limits(sampling: types_pb2.SamplingParams, limits: ModelLimits) -> None:
    size = limits.vocabulary_size
    if sampling.HasField("allowed_token_ids"):
        field = "sampling.allowed_token_ids"
        if len(sampling.allowed_token_ids.ids) > size:
            raise invalid(
                field,
                f"allowed_token_ids must have at most {size:,} ids, the size of the vocabulary.",
            )
        check_ids(f"{field}.ids", sampling.allowed_token_ids.ids, size)
        require(limits, engine_pb2.CAPABILITY_TOKEN_LIMITS, field)
    for index, word in enumerate(sampling.bad_token_ids):
        check_ids(f"sampling.bad_token_ids[{index}].ids", word.ids, size)
    if sampling.bad_token_ids:
        require(limits, engine_pb2.CAPABILITY_TOKEN_LIMITS, "sampling.bad_token_ids")


def _check_dry(request: completion_pb2.GenerateRequest, limits: ModelLimits) -> None:
    dry = request.sampling.dry
    if not request.sampling.HasField("dry"):
        if request.dry_sequence_breakers:
            raise invalid("dry_sequence_breakers", "dry_sequence_breakers need sampling.dry.")
        if request.no_dry_sequence_breakers:
            raise invalid(
                "no_dry_sequence_breakers", "no_dry_sequence_breakers needs sampling.dry."
            )
    if request.no_dry_sequence_breakers and (request.dry_sequence_breakers or dry.breaker_ids):
        raise invalid(
            "no_dry_sequence_breakers",
            "no_dry_sequence_breakers excludes dry_sequence_breakers and sampling.dry.breaker_ids.",
        )
    check_ids("sampling.dry.breaker_ids", dry.breaker_ids, limits.vocabulary_size)


def _check_mirostat(sampling: types_pb2.SamplingParams) -> None:
    if not sampling.HasField("mirostat"):
        return
    clashes = {
        "top_k": sampling.top_k != 0,
        "top_p": sampling.HasField("top_p") and sampling.top_p != 1,
        "min_p": sampling.min_p != 0,
        "temperature": sampling.HasField("temperature") and sampling.temperature == 0,
    }
    for name, clash in clashes.items():
        if clash:
            raise invalid(f"sampling.{name}", f"mirostat replaces {name}: set only one of them.")


def _check_beams(request: completion_pb2.GenerateRequest, limits: ModelLimits) -> None:
    require(limits, engine_pb2.CAPABILITY_BEAM_SEARCH, "beam_search")
    calls = tool_call_grammar(request.tools, request.tool_choice)
    others = {"grammar": request.HasField("grammar"), "tools": calls is not None}
    check_beam_search(request.beam_search, request.sampling, others)


def _check_prediction(request: completion_pb2.GenerateRequest) -> None:
    check_text_size("prediction", request.prediction)
    n = request.n if request.HasField("n") else 1
    if max(n, request.best_of) * _prompt_count(request) > 1:
        message = "A prediction needs one prompt, n = 1 and best_of of at most 1."
        raise invalid("prediction", message)
    if request.HasField("beam_search"):
        raise invalid("prediction", "A beam search takes no prediction: leave one of them out.")


def _check_resume(request: completion_pb2.GenerateRequest, limits: ModelLimits) -> None:
    require(limits, engine_pb2.CAPABILITY_RESUME, "resume")
    if not request.sampling.HasField("seed"):
        raise invalid("sampling.seed", "A resumed request needs the seed of its Accepted.")
    n = request.n if request.HasField("n") else 1
    if request.best_of > n:
        raise invalid("resume", "A request with best_of above n can't be resumed: start it anew.")
    prompts = _prompt_count(request)
    if len(request.resume.scored_prompt_tokens) > prompts:
        raise invalid("resume.scored_prompt_tokens", "There are more numbers than prompts.")
    seen: set[int] = set()
    for place, choice in enumerate(request.resume.choices):
        field = f"resume.choices[{place}]"
        if choice.index >= prompts * n or choice.index in seen:
            message = f"Choice {choice.index} does not exist or is resumed twice."
            raise invalid(f"{field}.index", message)
        seen.add(choice.index)
        for name, tokens in (
            ("generated.ids", len(choice.generated.ids)),
            ("completion_tokens", choice.completion_tokens),
        ):
            if tokens > limits.context_length:
                message = f"A choice has at most {limits.context_length:,} tokens, got {tokens:,}."
                raise invalid(f"{field}.{name}", message)
        check_ids(f"{field}.generated.ids", choice.generated.ids, limits.vocabulary_size)


def require(limits: ModelLimits, capability: "engine_pb2.Capability.ValueType", field: str) -> None:
    """Raise UNIMPLEMENTED unless the engine has the capability that `field` needs."""
    if capability not in limits.capabilities:
        raise ServiceError(
            grpc.StatusCode.UNIMPLEMENTED,
            "NOT_IMPLEMENTED",
            f"The engine does not implement {field}.",
            field=field,
        )
