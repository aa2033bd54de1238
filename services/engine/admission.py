"""Checks requests before anything is done for them, and applies the defaults."""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from services.engine.messages import ModelDescription, Resume, SamplingSettings, StoppingSettings
from tokenwire.engine.v1.engine_pb2 import GenerateRequest
from tokenwire.errors import ServiceError, invalid
from tokenwire.types.v1.types_pb2 import SamplingParams, StoppingParams, TokenIds

__all__ = ["MAX_SEQUENCES", "Admission", "CheckedRequest", "default_sampling"]

MAX_SEQUENCES = 128
"""prompts x n of one request"""
_MAX_STOP_TOKENS = 128


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
        if not 1 <= n <= MAX_SEQUENCES:
            raise invalid("n", f"n must be between 1 and {MAX_SEQUENCES}, not {n}.")
        stopping = self._stopping(request.stopping)
        return CheckedRequest(
            prompts=self._prompts(request.prompts, n, stopping.max_tokens),
            n=n,
            sampling=_sampling(request.sampling),
            stopping=stopping,
            logprobs=self._width("logprobs", request),
            prompt_logprobs=self._width("prompt_logprobs", request),
            resume=self._resume(request, n),
            constrained=self._constrained(request),
        )

    def _prompts(
        self, prompts: Sequence[TokenIds], n: int, max_tokens: int
    ) -> Sequence[Sequence[int]]:
        if not prompts:
            raise invalid("prompts", "At least one prompt is needed.")
        if len(prompts) * n > MAX_SEQUENCES:
            message = f"prompts x n must be at most {MAX_SEQUENCES}, not {len(prompts) * n}."
            raise invalid("n" if n > 1 else "prompts", message)
        most = self.model.context_length - min(max_tokens, 1)
        for i, prompt in enumerate(prompts):
            if not prompt.ids:
                raise invalid(f"prompts[{i}].ids", "A prompt needs at least one id.")
            if len(prompt.ids) > most:
                raise ServiceError(
                    grpc.StatusCode.OUT_OF_RANGE,
                    "CONTEXT_LENGTH_EXCEEDED",
                    f"Prompt {i} has {len(prompt.ids)} tokens; the context is "
                    f"{self.model.context_length} tokens, prompt and output together.",
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
        max_tokens = params.max_tokens if params.HasField("max_tokens") else 16
        if params.min_tokens > max_tokens:
            raise invalid(
                "stopping.min_tokens",
                f"min_tokens ({params.min_tokens}) is over max_tokens ({max_tokens}).",
            )
        if len(params.stop_token_ids) > _MAX_STOP_TOKENS:
            raise invalid("stopping.stop_token_ids", f"At most {_MAX_STOP_TOKENS} ids.")
        self._check_ids(params.stop_token_ids, "stopping.stop_token_ids")
        stop_token_ids = frozenset(params.stop_token_ids)
        return StoppingSettings(max_tokens, params.min_tokens, params.ignore_eos, stop_token_ids)

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
            if resumed.HasField("mirostat_mu"):
                raise _unsupported(f"{field}.mirostat_mu")
            ids = resumed.generated.ids
            self._check_ids(ids, f"{field}.generated.ids")
            prompt = request.prompts[resumed.sequence // n].ids
            if len(prompt) + len(ids) > self.model.context_length:
                message = "Prompt and generated ids are longer than the context."
                raise invalid(f"{field}.generated.ids", message)
        return [Resume(r.sequence, tuple(r.generated.ids)) for r in request.resume]

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
    recommended = dict(model.recommended)
    if "top_k" in recommended:
        return SamplingParams(**{**recommended, "top_k": int(recommended["top_k"])})  # type: ignore[arg-type]
    return SamplingParams(**recommended)  # type: ignore[arg-type]


def _sampling(params: SamplingParams) -> SamplingSettings:
    neutral: tuple[tuple[str, float], ...] = (
        ("frequency_penalty", 0),
        ("presence_penalty", 0),
        ("repetition_penalty", 1),
    )
    for field, off in neutral:
        if params.HasField(field) and getattr(params, field) != off:  # type: ignore[arg-type]
            raise _unsupported(f"sampling.{field}")
    if params.dry.multiplier != 0:
        raise _unsupported("sampling.dry")
    if params.HasField("mirostat"):
        raise _unsupported("sampling.mirostat")
    if params.logit_bias:
        raise _unsupported("sampling.logit_bias")
    return SamplingSettings(
        temperature=_number(params, "temperature", 1.0, lambda v: 0 <= v <= 2, "between 0 and 2"),
        top_p=_number(params, "top_p", 1.0, lambda v: 0 <= v <= 1, "between 0 and 1"),
        top_k=int(_number(params, "top_k", 0, lambda v: v <= 128, "at most 128")),
        min_p=_number(params, "min_p", 0.0, lambda v: 0 <= v <= 1, "between 0 and 1"),
        seed=params.seed if params.HasField("seed") else secrets.randbits(63),
    )


def _number(
    params: SamplingParams,
    field: str,
    default: float,
    accepted: Callable[[float], bool],
    rule: str,
) -> float:
    if not params.HasField(field):  # type: ignore[arg-type]
        return default
    value: float = getattr(params, field)
    if math.isnan(value) or not accepted(value):
        raise invalid(f"sampling.{field}", f"{field} must be {rule}, not {value:g}.")
    return value


def _unsupported(field: str) -> ServiceError:
    message = f"This engine does not implement {field}."
    return ServiceError(grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED", message, field=field)
