"""Checks requests before anything is done for them, and applies the defaults."""

import math
import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from services.common.contract import (
    DEFAULT_MAX_TOKENS,
    DRY_ALLOWED_LENGTH,
    DRY_BASE,
    MAX_BAD_IDS,
    MAX_BAD_SPELLINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_K,
)
from services.engine.messages import (
    DrySettings,
    LogitBias,
    MirostatSettings,
    ModelDescription,
    Resume,
    SamplingSettings,
    StoppingSettings,
)
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.engine.v1.engine_pb2 import GenerateRequest, ResumedSequence
from tokenwire.pb.types.v1.types_pb2 import (
    DryParams,
    MirostatParams,
    SamplingParams,
    StoppingParams,
    TokenIds,
)

__all__ = [
    "Admission",
    "CheckedRequest",
    "default_sampling",
    "resolved_sampling",
]

_MAX_STOP_TOKENS = MAX_STOP_TOKEN_IDS + 16  # those of a client, and what infill adds


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that the engine can run, with its defaults applied."""

    prompts: Sequence[Sequence[int]]
    n: int
    sampling: SamplingSettings
    stopping: StoppingSettings
    logprobs: int | None
    prompt_logprobs: int | None
    resume: Sequence[Resume]
    constrained: bool


@dataclass(frozen=True, slots=True)
class Admission:
    """What requests to this engine must keep to."""

    model_id: str
    model: ModelDescription
    max_logprobs: int
    max_sequences: int
    """prompts x n of one request"""
    grammar: bool
    """Whether there is a grammar service"""

    def check(self, request: GenerateRequest) -> CheckedRequest:
        """Raises ServiceError with the field to blame."""
        if request.model not in ("", self.model_id):
            raise ServiceError(
                grpc.StatusCode.NOT_FOUND,
                "MODEL_NOT_FOUND",
                f"The model {request.model!r} is not served here; {self.model_id!r} is.",
                field="model",
            )
        n = request.n if request.HasField("n") else 1
        if not 1 <= n <= self.max_sequences:
            raise invalid("n", f"n must be between 1 and {self.max_sequences}, not {n}.")
        stopping = self._stopping(request.stopping)
        return CheckedRequest(
            prompts=self._prompts(request.prompts, n, stopping),
            n=n,
            sampling=self._sampling(request.sampling),
            stopping=stopping,
            logprobs=self._width("logprobs", request),
            prompt_logprobs=self._width("prompt_logprobs", request),
            resume=self._resume(request, n),
            constrained=self._constrained(request),
        )

    def _prompts(
        self, prompts: Sequence[TokenIds], n: int, stopping: StoppingSettings
    ) -> Sequence[Sequence[int]]:
        if not prompts:
            raise invalid("prompts", "At least one prompt is needed.")
        if len(prompts) * n > self.max_sequences:
            message = f"prompts x n must be at most {self.max_sequences}, not {len(prompts) * n}."
            raise invalid("n" if n > 1 else "prompts", message)
        most = stopping.context_length - min(stopping.max_tokens, 1)
        for i, prompt in enumerate(prompts):
            if not prompt.ids:
                raise invalid(f"prompts[{i}].ids", "A prompt needs at least one id.")
            if len(prompt.ids) > most:
                raise ServiceError(
                    grpc.StatusCode.OUT_OF_RANGE,
                    "CONTEXT_LENGTH_EXCEEDED",
                    f"Prompt {i} has {len(prompt.ids)} tokens; the context is "
                    f"{stopping.context_length} tokens, prompt and output together.",
                    field=f"prompts[{i}].ids",
                )
            self._check_ids(prompt.ids, f"prompts[{i}].ids")
        return [tuple(prompt.ids) for prompt in prompts]

    def _check_ids(self, ids: Sequence[int], field: str) -> None:
        if ids and max(ids) >= self.model.vocabulary_size:
            index = next(i for i, token in enumerate(ids) if token >= self.model.vocabulary_size)
            message = f"{ids[index]} is no id: the vocabulary has {self.model.vocabulary_size}."
            raise invalid(f"{field}[{index}]", message)

    def _stopping(self, params: StoppingParams) -> StoppingSettings:
        max_tokens = params.max_tokens if params.HasField("max_tokens") else DEFAULT_MAX_TOKENS
        if params.min_tokens > max_tokens:
            raise invalid(
                "stopping.min_tokens",
                f"min_tokens ({params.min_tokens}) is over max_tokens ({max_tokens}).",
            )
        if len(params.stop_token_ids) > _MAX_STOP_TOKENS:
            raise invalid("stopping.stop_token_ids", f"At most {_MAX_STOP_TOKENS} ids.")
        self._check_ids(params.stop_token_ids, "stopping.stop_token_ids")
        stop_token_ids = frozenset(params.stop_token_ids)
        context_length = self.model.context_length
        if params.HasField("context_length"):
            if not params.context_length:
                raise invalid("stopping.context_length", "context_length must be at least 1.")
            context_length = min(context_length, params.context_length)
        return StoppingSettings(
            max_tokens, params.min_tokens, params.ignore_eos, context_length, stop_token_ids
        )

    def _sampling(self, params: SamplingParams) -> SamplingSettings:
        temperature = _number(params, "temperature", 1.0, lambda v: 0 <= v <= 2, "between 0 and 2")
        top_p = _number(params, "top_p", 1.0, lambda v: 0 <= v <= 1, "between 0 and 1")
        top_k = int(_number(params, "top_k", 0, lambda v: v <= MAX_TOP_K, f"at most {MAX_TOP_K}"))
        min_p = _number(params, "min_p", 0.0, lambda v: 0 <= v <= 1, "between 0 and 1")
        if params.HasField("mirostat"):
            clashes = {
                "temperature": temperature == 0,
                "top_p": top_p < 1,
                "top_k": top_k > 0,
                "min_p": min_p > 0,
            }
            for field, clash in clashes.items():
                if clash:
                    message = f"mirostat takes the place of {field}: give one of them."
                    raise invalid(f"sampling.{field}", message)
        return SamplingSettings(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=params.seed if params.HasField("seed") else secrets.randbits(63),
            frequency_penalty=_penalty(params, "frequency_penalty"),
            presence_penalty=_penalty(params, "presence_penalty"),
            repetition_penalty=_number(
                params, "repetition_penalty", 1.0, lambda v: 0 < v <= 2, "above 0 and at most 2"
            ),
            logit_bias=self._logit_bias(params),
            dry=self._dry(params.dry),
            mirostat=_mirostat(params.mirostat) if params.HasField("mirostat") else None,
            allowed=self._allowed(params),
            bad_words=self._bad_words(params),
        )

    def _allowed(self, params: SamplingParams) -> bytes | None:
        size = self.model.vocabulary_size
        ids: Sequence[int] = params.allowed_token_ids.ids
        field = "sampling.allowed_token_ids"
        if not params.HasField("allowed_token_ids"):
            if len(params.bad_token_ids) < size:
                return None
            ids = range(size)  # bad words may leave none of them, which is seen in a mask
        if not ids:
            raise invalid(field, "At least one id is needed: nothing could be generated.")
        if len(ids) > size:
            raise invalid(field, f"At most {size} ids: the vocabulary has no more.")
        self._check_ids(ids, f"{field}.ids")
        bits = bytearray(-(-size // 8))
        for token in ids:
            bits[token >> 3] |= 1 << (token & 7)
        return bytes(bits)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        words, field = params.bad_token_ids, "sampling.bad_token_ids"
        if len(words) > MAX_BAD_SPELLINGS or sum(len(word.ids) for word in words) > MAX_BAD_IDS:
            message = f"At most {MAX_BAD_SPELLINGS:,} bad words of {MAX_BAD_IDS:,} ids in all."
            raise invalid(field, message)
        for i, word in enumerate(words):
            if not word.ids:
                raise invalid(f"{field}[{i}].ids", "A bad word needs at least one id.")
            self._check_ids(word.ids, f"{field}[{i}].ids")
        allowed = params.allowed_token_ids.ids or range(self.model.vocabulary_size)
        if {word.ids[0] for word in words if len(word.ids) == 1}.issuperset(allowed):
            raise invalid(field, "The bad words leave no token to generate: give fewer of them.")
        return tuple(tuple(word.ids) for word in words)

    def _logit_bias(self, params: SamplingParams) -> LogitBias | None:
        if not params.logit_bias:
            return None
        for token, bias in params.logit_bias.items():
            field = f"sampling.logit_bias[{token}]"
            if token >= self.model.vocabulary_size:
                message = f"{token} is no id: the vocabulary has {self.model.vocabulary_size}."
                raise invalid(field, message)
            if not -100 <= bias <= 100:  # NaN is in no range
                raise invalid(field, f"A logit bias must be between -100 and 100, not {bias:g}.")
        return LogitBias(
            array("q", params.logit_bias.keys()), array("f", params.logit_bias.values())
        )

    def _dry(self, params: DryParams) -> DrySettings | None:
        prefix = "sampling.dry"
        multiplier = params.multiplier
        if not 0 <= multiplier < math.inf:
            message = f"multiplier must be a finite number, at least 0, not {multiplier:g}."
            raise invalid(f"{prefix}.multiplier", message)
        base = _number(
            params, "base", DRY_BASE, lambda v: 1 <= v < math.inf, "finite, at least 1", prefix
        )
        if len(params.breaker_ids) > self.model.vocabulary_size:
            message = f"At most {self.model.vocabulary_size} ids: the vocabulary has no more."
            raise invalid(f"{prefix}.breaker_ids", message)
        self._check_ids(params.breaker_ids, f"{prefix}.breaker_ids")
        if multiplier == 0:
            return None
        has_length = params.HasField("allowed_length")
        allowed_length = params.allowed_length if has_length else DRY_ALLOWED_LENGTH
        return DrySettings(multiplier, base, allowed_length, frozenset(params.breaker_ids))

    def _width(self, field: str, request: GenerateRequest) -> int | None:
        if not request.HasField(field):  # type: ignore[arg-type]
            return None
        width: int = getattr(request, field)
        if width > self.max_logprobs:
            raise invalid(field, f"{field} must be at most {self.max_logprobs}, not {width}.")
        return min(width, self.model.vocabulary_size)

    def _resume(self, request: GenerateRequest, n: int) -> Sequence[Resume]:
        count = len(request.prompts) * n
        seen: set[int] = set()
        for i, resumed in enumerate(request.resume):
            field = f"resume[{i}]"
            if resumed.sequence >= count or resumed.sequence in seen:
                message = f"Sequence {resumed.sequence} does not exist or is named twice."
                raise invalid(f"{field}.sequence", message)
            seen.add(resumed.sequence)
            ids = resumed.generated.ids
            _check_mu(resumed, request.sampling.HasField("mirostat"), f"{field}.mirostat_mu")
            self._check_ids(ids, f"{field}.generated.ids")
            prompt = request.prompts[resumed.sequence // n].ids
            if len(prompt) + len(ids) > self.model.context_length:
                message = "Prompt and generated ids are longer than the context."
                raise invalid(f"{field}.generated.ids", message)
        return [
            Resume(
                resumed.sequence,
                tuple(resumed.generated.ids),
                resumed.mirostat_mu if resumed.HasField("mirostat_mu") else None,
            )
            for resumed in request.resume
        ]

    def _constrained(self, request: GenerateRequest) -> bool:
        if not request.HasField("grammar"):
            return False
        if not self.grammar:
            raise _unsupported("grammar")
        if request.grammar.WhichOneof("spec") is None:
            raise invalid("grammar", "A grammar needs one of its fields.")
        if request.stopping.ignore_eos:
            message = "ignore_eos contradicts a grammar, which says where the output ends."
            raise invalid("stopping.ignore_eos", message)
        return True


def default_sampling(model: ModelDescription) -> SamplingParams:
    """What the checkpoint recommends, as a message."""
    recommended = model.recommended
    return SamplingParams(
        temperature=recommended.temperature,
        top_p=recommended.top_p,
        top_k=recommended.top_k,
        min_p=recommended.min_p,
        repetition_penalty=recommended.repetition_penalty,
    )


def resolved_sampling(settings: SamplingSettings) -> SamplingParams:
    """What requests are told: every default, and of what is off nothing."""
    params = SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        seed=settings.seed,
        frequency_penalty=settings.frequency_penalty,
        presence_penalty=settings.presence_penalty,
        repetition_penalty=settings.repetition_penalty,
    )
    if settings.allowed is not None:
        bits = np.unpackbits(np.frombuffer(settings.allowed, np.uint8), bitorder="little")
        params.allowed_token_ids.ids.extend(bits.nonzero()[0].tolist())
    params.bad_token_ids.extend(TokenIds(ids=word) for word in settings.bad_words)
    bias, dry, mirostat = settings.logit_bias, settings.dry, settings.mirostat
    if bias is not None:
        params.logit_bias.update(zip(bias.ids, bias.values, strict=True))
    if dry is not None:
        params.dry.CopyFrom(
            DryParams(
                multiplier=dry.multiplier,
                base=dry.base,
                allowed_length=dry.allowed_length,
                breaker_ids=sorted(dry.breaker_ids),
            )
        )
    if mirostat is not None:
        params.mirostat.CopyFrom(
            MirostatParams(
                target_perplexity=mirostat.target_perplexity,
                learning_rate=mirostat.learning_rate,
            )
        )
    return params


def _penalty(params: SamplingParams, field: str) -> float:
    return _number(params, field, 0.0, lambda v: -2 <= v <= 2, "between -2 and 2")


def _mirostat(params: MirostatParams) -> MirostatSettings:
    prefix = "sampling.mirostat"

    def positive(field: str, default: float) -> float:
        return _number(params, field, default, lambda v: 0 < v < math.inf, "finite, over 0", prefix)

    return MirostatSettings(positive("target_perplexity", 1.5), positive("learning_rate", 0.1))


def _check_mu(resumed: ResumedSequence, in_use: bool, field: str) -> None:
    """Mirostat's state is what ids do not tell: without it the rest would be drawn otherwise."""
    if resumed.HasField("mirostat_mu"):
        if not in_use:
            raise invalid(field, "mirostat_mu is only for requests that use mirostat.")
        if not math.isfinite(resumed.mirostat_mu):
            raise invalid(field, "mirostat_mu must be finite.")
    elif in_use and resumed.generated.ids:
        raise invalid(field, "With mirostat, what was generated needs its mirostat_mu.")


def _number(
    params: SamplingParams | DryParams | MirostatParams,
    field: str,
    default: float,
    accepted: Callable[[float], bool],
    rule: str,
    prefix: str = "sampling",
) -> float:
    if not params.HasField(field):  # type: ignore[arg-type]
        return default
    value: float = getattr(params, field)
    if math.isnan(value) or not accepted(value):
        raise invalid(f"{prefix}.{field}", f"{field} must be {rule}, not {value:g}.")
    return value


def _unsupported(field: str) -> ServiceError:
    message = f"This engine does not implement {field}."
    return ServiceError(grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED", message, field=field)
