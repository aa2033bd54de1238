"""Whether a CompleteRequest can be served at all: checked before any work.

Every refusal names the field to blame by its path in the request.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Literal

import grpc

from services.common.contract import (
    DEFAULT_MAX_TOKENS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_DRY_BREAKER_LENGTH,
    MAX_DRY_BREAKERS,
    MAX_SEQUENCES,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKEN_IDS,
    MAX_TEXT_BYTES,
    MAX_TOP_K,
)
from services.tokenizer.limits import Limits
from services.tokenizer.text.infill import InfillTemplate
from services.tokenizer.tools import call_grammar, check_tools
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "check_complete",
    "check_ids",
    "check_model",
    "check_text_size",
    "require",
]

_Penalty = Literal["frequency_penalty", "presence_penalty", "repetition_penalty"]
_Scalar = _Penalty | Literal["temperature", "top_p", "min_p"]
_PENALTIES: Mapping[_Penalty, float] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Each with the value at which it does nothing."""


def check_model(model: str, served: str) -> None:
    """NOT_FOUND unless `model` names the one that is served."""
    if model not in ("", "default", served):
        raise ServiceError(
            grpc.StatusCode.NOT_FOUND,
            "MODEL_NOT_FOUND",
            f"There is no model {model!r} here, only {served!r}.",
            field="model",
        )


def check_ids(field: str, ids: "types_pb2.TokenIds", size: int, begin: int = 0) -> None:
    """INVALID_ARGUMENT for an id from place `begin` on that is not below `size`."""
    if max(ids.ids[begin:], default=0) >= size:
        checked = enumerate(islice(ids.ids, begin, None), begin)
        place, token = next((place, token) for place, token in checked if token >= size)
        raise invalid(f"{field}.ids[{place}]", f"Token id {token} is not below {size:,}.")


def check_text_size(field: str, *texts: str) -> None:
    """INVALID_ARGUMENT for more text than is encoded at once, where no context limits it."""
    if sum(len(text.encode()) for text in texts) > MAX_TEXT_BYTES:
        raise invalid(field, f"At most {MAX_TEXT_BYTES:,} bytes of text are taken at once.")


def check_complete(
    request: completion_pb2.CompleteRequest, limits: Limits, infill: InfillTemplate | None
) -> None:
    """Raises the ServiceError of the first field that is wrong or not implemented."""
    check_model(request.model, limits.model)
    _check_counts(request, limits)  # first: it bounds the work on prompts
    _check_prompts(request, limits)
    _check_suffix(request, limits, infill)
    _check_stopping(request, limits)
    _check_sampling(request, limits)
    if request.HasField("logprobs"):
        if request.logprobs > limits.max_logprobs:
            raise invalid("logprobs", f"logprobs must be between 0 and {limits.max_logprobs}.")
        require(limits, engine_pb2.CAPABILITY_LOGPROBS, "logprobs")
        if request.echo:
            require(limits, engine_pb2.CAPABILITY_PROMPT_LOGPROBS, "logprobs")
    if request.HasField("prompt_logprobs"):
        if request.prompt_logprobs > limits.max_logprobs:
            most = limits.max_logprobs
            raise invalid("prompt_logprobs", f"prompt_logprobs must be between 0 and {most}.")
        require(limits, engine_pb2.CAPABILITY_PROMPT_LOGPROBS, "prompt_logprobs")
    _check_truncation(request, infill)
    _check_bad_words(request.bad_words, limits)
    if request.HasField("grammar"):
        _check_grammar(request.grammar, limits)
    if request.context_overflow not in completion_pb2.ContextOverflow.values():
        raise invalid("context_overflow", "context_overflow is none of the known values.")
    if request.delivery not in completion_pb2.Delivery.values():
        raise invalid("delivery", "delivery is none of the known values.")
    _check_tools(request, limits)
    if request.images:
        raise invalid("images", f"{limits.model} is a text-only model: it takes no images.")


def _check_prompts(request: completion_pb2.CompleteRequest, limits: Limits) -> None:
    if not request.prompts:
        raise invalid("prompts", "At least one prompt is needed.")
    for index, prompt in enumerate(request.prompts):
        kind = prompt.WhichOneof("prompt")
        if kind is None:
            raise invalid(f"prompts[{index}]", "A prompt must hold text or token ids.")
        if kind == "token_ids":
            field = f"prompts[{index}].token_ids"
            if not prompt.token_ids.ids:
                raise invalid(f"{field}.ids", "A prompt needs at least one id.")
            # what is longer than the context is refused, or cut: no more than its end is used
            begin = max(0, len(prompt.token_ids.ids) - limits.context_length)
            check_ids(field, prompt.token_ids, limits.vocabulary_size, begin)


def _check_counts(request: completion_pb2.CompleteRequest, limits: Limits) -> None:
    n = request.n if request.HasField("n") else 1
    if not 1 <= n <= MAX_SEQUENCES:
        raise invalid("n", f"n must be between 1 and {MAX_SEQUENCES}.")
    if request.best_of:
        if not n <= request.best_of <= MAX_SEQUENCES:
            raise invalid("best_of", f"best_of must be between n and {MAX_SEQUENCES}.")
        if request.best_of > n:
            if request.delivery != completion_pb2.DELIVERY_WHOLE:
                raise invalid(
                    "best_of", "best_of above n needs DELIVERY_WHOLE: it can't be streamed."
                )
            require(limits, engine_pb2.CAPABILITY_LOGPROBS, "best_of")
    most = min(MAX_SEQUENCES, limits.max_sequences)
    draws = max(n, request.best_of)
    if len(request.prompts) * draws > most:
        name = "best_of" if request.best_of > n else "n"
        raise invalid(
            name if len(request.prompts) <= most else "prompts",
            f"{len(request.prompts)} prompts with {name} = {draws} are more than {most} choices.",
        )


def _check_suffix(
    request: completion_pb2.CompleteRequest, limits: Limits, infill: InfillTemplate | None
) -> None:
    if not request.HasField("suffix"):
        return
    if infill is not None and request.echo:
        raise invalid("echo", "echo can't be combined with suffix: only the middle is returned.")
    if infill is None and not limits.appends_suffix:
        raise invalid("suffix", f"{limits.model} knows no infill: it takes no suffix.")


def _check_truncation(
    request: completion_pb2.CompleteRequest, infill: InfillTemplate | None
) -> None:
    """That it leaves room for output is seen with the prompts."""
    if not request.HasField("truncate_prompt_tokens"):
        return
    asked, field = request.truncate_prompt_tokens, "truncate_prompt_tokens"
    if asked < 1 and asked != -1:
        raise invalid(field, f"{field} must be at least 1, or -1 to keep what fits, got {asked}.")
    if infill is not None and request.HasField("suffix") and 0 <= asked < infill.control_count:
        raise invalid(
            field,
            f"{field} must be at least {infill.control_count} with a suffix: the prompt has as "
            "many control tokens.",
        )


def _check_bad_words(words: Sequence[str], limits: Limits) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"At most {MAX_BAD_WORDS} bad words are taken.")
    for index, word in enumerate(words):
        if not 1 <= len(word) <= MAX_BAD_WORD_LENGTH:
            raise invalid(
                f"bad_words[{index}]",
                f"A bad word must have 1 to {MAX_BAD_WORD_LENGTH:,} characters.",
            )
    if words:
        require(limits, engine_pb2.CAPABILITY_TOKEN_LIMITS, "bad_words")


def _check_stopping(request: completion_pb2.CompleteRequest, limits: Limits) -> None:
    stopping = request.stopping
    if stopping.HasField("max_tokens") and stopping.max_tokens == 0 and not request.echo:
        raise invalid("stopping.max_tokens", "max_tokens 0 needs echo: nothing would be returned.")
    if stopping.min_tokens > _max_tokens(stopping):
        raise invalid("stopping.min_tokens", "min_tokens must not be more than max_tokens.")
    if stopping.HasField("context_length") and not stopping.context_length:
        raise invalid("stopping.context_length", "context_length must be at least 1.")
    if len(stopping.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid("stopping.stop_token_ids", f"At most {MAX_STOP_TOKEN_IDS} ids.")
    for index, token in enumerate(stopping.stop_token_ids):
        if token >= limits.vocabulary_size:
            raise invalid(
                f"stopping.stop_token_ids[{index}]",
                f"Token id {token} is not below {limits.vocabulary_size:,}.",
            )
    if stopping.min_tokens or stopping.ignore_eos or stopping.stop_token_ids:
        require(limits, engine_pb2.CAPABILITY_STOPPING, "stopping")
    if len(request.stop) > limits.max_stop_strings:
        raise invalid("stop", f"At most {limits.max_stop_strings} stop strings are taken.")
    for index, string in enumerate(request.stop):
        if not string:
            raise invalid(f"stop[{index}]", "A stop string must not be empty.")
        if len(string) > MAX_STOP_LENGTH:
            raise invalid(
                f"stop[{index}]", f"A stop string has at most {MAX_STOP_LENGTH:,} characters."
            )


def _max_tokens(stopping: types_pb2.StoppingParams) -> int:
    return stopping.max_tokens if stopping.HasField("max_tokens") else DEFAULT_MAX_TOKENS


def _check_sampling(request: completion_pb2.CompleteRequest, limits: Limits) -> None:
    sampling = request.sampling
    _check_range(sampling, "temperature", 0, 2)
    _check_range(sampling, "top_p", 0, 1)
    _check_range(sampling, "min_p", 0, 1)
    _check_range(sampling, "frequency_penalty", -2, 2)
    _check_range(sampling, "presence_penalty", -2, 2)
    _check_range(sampling, "repetition_penalty", 0, 2)
    if sampling.HasField("repetition_penalty") and sampling.repetition_penalty == 0:
        raise invalid("sampling.repetition_penalty", "repetition_penalty must be more than 0.")
    if sampling.top_k > MAX_TOP_K:
        raise invalid("sampling.top_k", f"top_k must be between 0 and {MAX_TOP_K}.")
    for token, bias in sampling.logit_bias.items():
        field = f"sampling.logit_bias[{token}]"
        if token >= limits.vocabulary_size:
            raise invalid(field, f"Token id {token} is not below {limits.vocabulary_size:,}.")
        if not -100 <= bias <= 100:
            raise invalid(
                field, f"The bias of token {token} must be between -100 and 100, got {bias:g}."
            )
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


def _check_range(
    sampling: types_pb2.SamplingParams, name: _Scalar, low: float, high: float
) -> None:
    value = getattr(sampling, name)
    if sampling.HasField(name) and not low <= value <= high:  # NaN is in no range
        raise invalid(f"sampling.{name}", f"{name} must be between {low} and {high}.")


def _check_token_limits(sampling: types_pb2.SamplingParams, limits: Limits) -> None:
    size = limits.vocabulary_size
    if sampling.HasField("allowed_token_ids"):
        field = "sampling.allowed_token_ids"
        if not sampling.allowed_token_ids.ids:
            raise invalid(field, "At least one id is needed: nothing could be generated.")
        if len(sampling.allowed_token_ids.ids) > size:
            raise invalid(field, f"At most {size:,} ids: the vocabulary has no more.")
        check_ids(field, sampling.allowed_token_ids, size)
        require(limits, engine_pb2.CAPABILITY_TOKEN_LIMITS, field)
    for index, word in enumerate(sampling.bad_token_ids):
        field = f"sampling.bad_token_ids[{index}]"
        if not word.ids:
            raise invalid(f"{field}.ids", "A bad word needs at least one id.")
        check_ids(field, word, size)
    if sampling.bad_token_ids:
        require(limits, engine_pb2.CAPABILITY_TOKEN_LIMITS, "sampling.bad_token_ids")


def _check_dry(request: completion_pb2.CompleteRequest, limits: Limits) -> None:
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
    if len(request.dry_sequence_breakers) > MAX_DRY_BREAKERS:
        raise invalid("dry_sequence_breakers", f"At most {MAX_DRY_BREAKERS} breakers are taken.")
    for index, breaker in enumerate(request.dry_sequence_breakers):
        if not 1 <= len(breaker) <= MAX_DRY_BREAKER_LENGTH:
            raise invalid(
                f"dry_sequence_breakers[{index}]",
                f"A breaker must have 1 to {MAX_DRY_BREAKER_LENGTH} characters.",
            )
    if not 0 <= dry.multiplier < float("inf"):
        raise invalid("sampling.dry.multiplier", "multiplier must not be negative.")
    if dry.HasField("base") and not 1 <= dry.base < float("inf"):
        raise invalid("sampling.dry.base", "base must be at least 1.")
    for index, token in enumerate(dry.breaker_ids):
        if token >= limits.vocabulary_size:
            raise invalid(
                f"sampling.dry.breaker_ids[{index}]",
                f"Token id {token} is not below {limits.vocabulary_size:,}.",
            )


def _check_mirostat(sampling: types_pb2.SamplingParams) -> None:
    if not sampling.HasField("mirostat"):
        return
    mirostat = sampling.mirostat
    for name in ("target_perplexity", "learning_rate"):
        value = getattr(mirostat, name)
        if mirostat.HasField(name) and not 0 < value < float("inf"):
            raise invalid(f"sampling.mirostat.{name}", f"{name} must be more than 0.")
    clashes = {
        "top_k": sampling.top_k != 0,
        "top_p": sampling.HasField("top_p") and sampling.top_p != 1,
        "min_p": sampling.min_p != 0,
        "temperature": sampling.HasField("temperature") and sampling.temperature == 0,
    }
    for name, clash in clashes.items():
        if clash:
            raise invalid(f"sampling.{name}", f"mirostat takes the place of {name}: give one.")


def _check_tools(request: completion_pb2.CompleteRequest, limits: Limits) -> None:
    check_tools(request.tools, request.tool_choice)
    if call_grammar(request.tools, request.tool_choice) is None:
        return
    if request.HasField("grammar"):
        raise invalid("grammar", "The call of a tool is constrained already: leave out grammar.")
    require(limits, engine_pb2.CAPABILITY_GRAMMAR, "tools")


def _check_grammar(grammar: types_pb2.GrammarSpec, limits: Limits) -> None:
    kind = grammar.WhichOneof("spec")
    if kind is None:
        raise invalid("grammar", "A grammar must be given.")
    if kind == "choice":
        if not grammar.choice.choices:
            raise invalid("grammar.choice.choices", "At least one choice is needed.")
        for index, choice in enumerate(grammar.choice.choices):
            if not choice:
                raise invalid(f"grammar.choice.choices[{index}]", "A choice must not be empty.")
    elif kind not in ("json_object", "structural_tag") and not getattr(grammar, kind):
        raise invalid(f"grammar.{kind}", f"{kind} must not be empty.")
    require(limits, engine_pb2.CAPABILITY_GRAMMAR, "grammar")


def require(limits: Limits, capability: "engine_pb2.Capability.ValueType", field: str) -> None:
    """UNIMPLEMENTED unless the engine can do it."""
    if capability not in limits.capabilities:
        raise _not_implemented(field)


def _not_implemented(field: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNIMPLEMENTED,
        "NOT_IMPLEMENTED",
        f"{field} is not implemented.",
        field=field,
    )
