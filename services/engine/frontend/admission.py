"""Validation of generate requests, with the defaults of their fields."""

import math
import secrets
from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import grpc

from services.common.beam_search import check_beam_search
from services.common.bounds import check_bounds
from services.common.contract import (
    DEFAULT_MAX_TOKENS,
    DRY_ALLOWED_LENGTH,
    DRY_BASE,
    MAX_BAD_IDS,
    MAX_TOP_K,
)
from services.common.vector_sizes import check_token_states, check_vectors
from services.engine.checked_request import (
    BeamSettings,
    CheckedRequest,
    DrySettings,
    EarlyStopping,
    LogitBias,
    MirostatSettings,
    Resume,
    SamplingSettings,
    StoppingSettings,
    bitmask,
)
from services.engine.model_description import GenerationDefaults, ModelDescription
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.engine.v1.engine_pb2 import (
    EmbeddedPrompt,
    EmbedRequest,
    GenerateRequest,
    ResumedSequence,
)
from tokenwire.pb.types.v1 import types_pb2
from tokenwire.pb.types.v1.types_pb2 import (
    DryParams,
    MirostatParams,
    SamplingParams,
    StoppingParams,
    TokenIds,
)

__all__ = ["Admission"]

_EARLY_STOPPING = {
    types_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.ESTIMATE,
    types_pb2.EARLY_STOPPING_ESTIMATE: EarlyStopping.ESTIMATE,
    types_pb2.EARLY_STOPPING_FIRST: EarlyStopping.FIRST,
    types_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


@dataclass(frozen=True, slots=True)
class Admission:
    """Limits of this engine and its model, which every request must respect."""

    model_id: str
    model: ModelDescription
    max_logprobs: int
    max_sequences: int
    """Upper bound of prompts x n"""
    has_grammars: bool
    """True if a grammar service is configured"""
    takes_images: bool = False
    """True if an image encoder runs"""
    drafts_predictions: bool = True
    """True if the tokens that clients expect are drafts; False = they are ignored"""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    """Sampling where a request says nothing; None in a field = that of the API"""

    def check(self, request: GenerateRequest, adapters: Container[str] = ()) -> CheckedRequest:
        """Return the request with its defaults. Raises ServiceError that names the bad field.

        adapters: names that `model` may have beside the model's own.
        """
        self._check_model(request.model, adapters)
        if not self.model.generates:
            message = f"{self.model_id} only makes vectors of texts: use Embed."
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION, "ONLY_EMBEDS", message, field="model"
            )
        check_bounds(request)
        n = request.n if request.HasField("n") else 1
        stopping = self._stopping(request.stopping)
        self._check_images(request)
        beams = _beams(request)
        return CheckedRequest(
            prompts=self._prompts(request.prompts, n, stopping),
            n=n,
            sampling=self._sampling(request.sampling, draws=beams is None),
            stopping=stopping,
            beams=beams,
            logprobs=self._width("logprobs", request),
            prompt_logprobs=self._width("prompt_logprobs", request),
            resume=self._resume(request, n),
            constrained=self._constrained(request),
            prediction=self._prediction(request, n),
        )

    def check_embed(self, request: EmbedRequest, adapters: Container[str] = ()) -> CheckedRequest:
        """Return the request for vectors. Raises ServiceError that names the bad field."""
        self._check_model(request.model, adapters)
        if self.model.pooled is None:
            message = (
                f"{self.model_id} makes no embeddings: its checkpoint names no pooling. Start the "
                "engine with --pooling to embed with it."
            )
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION, "NO_EMBEDDINGS", message, field="model"
            )
        check_bounds(request)
        if request.token_weights and not self.model.weighs_tokens:
            raise invalid("token_weights", f"{self.model_id} gives tokens no weights.")
        if not self.model.vector_width and not request.tokens:
            message = f"{self.model_id} makes vectors of tokens alone: ask for tokens."
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION, "NO_EMBEDDINGS", message, field="tokens"
            )
        length = self.model.context_length
        stopping = StoppingSettings(0, 0, True, length, frozenset())
        seconds: dict[int, int] = {}
        for i, prompt in enumerate(request.prompts):
            if prompt.HasField("second_text"):
                field = f"prompts[{i}].second_text"
                if not self.model.takes_pairs:
                    message = f"{self.model_id} does not tell the texts of a pair apart."
                    raise invalid(field, message)
                if prompt.second_text >= len(prompt.ids):
                    raise invalid(field, "second_text must be the index of an id.")
                seconds[i] = prompt.second_text
            if prompt.instruction_length > len(prompt.ids):
                field = f"prompts[{i}].instruction_length"
                raise invalid(field, "An instruction must not have more ids than its prompt.")
            self._check_unattended(prompt, f"prompts[{i}].unattended_length")
        instructions = {i: each.instruction_length for i, each in enumerate(request.prompts)}
        unattended = {i: each.unattended_length for i, each in enumerate(request.prompts)}
        prompts = self._prompts(request.prompts, 1, stopping)
        if request.tokens or request.token_weights:
            width = 1 if request.token_weights else self.model.token_width
            check_token_states(sum(map(len, prompts)), width, "prompts")
        else:
            check_vectors(len(prompts), self.model.vector_width, "prompts")
        return CheckedRequest.of_texts(
            prompts,
            self.model.pooled,
            length,
            seconds,
            instructions,
            unattended,
            is_raw=request.raw,
            keeps_tokens=request.tokens,
            weighs_tokens=request.token_weights,
        )

    def _check_unattended(self, prompt: EmbeddedPrompt, field: str) -> None:
        if not prompt.unattended_length:
            return
        if not self.model.hides_ends:
            message = f"{self.model_id} can't hide the end of a prompt from its tokens."
            raise invalid(field, message)
        if prompt.unattended_length >= len(prompt.ids):
            raise invalid(field, "At least one id of a prompt must be attended to.")

    def _check_model(self, model: str, adapters: Container[str]) -> None:
        if model not in ("", self.model_id) and model not in adapters:
            raise ServiceError(
                grpc.StatusCode.NOT_FOUND,
                "MODEL_NOT_FOUND",
                f"This engine serves {self.model_id!r}, not {model!r}.",
                field="model",
            )

    def _prompts(
        self, prompts: Sequence[TokenIds | EmbeddedPrompt], n: int, stopping: StoppingSettings
    ) -> Sequence[Sequence[int]]:
        if len(prompts) * n > self.max_sequences:
            message = f"prompts x n must be at most {self.max_sequences}, got {len(prompts) * n}."
            raise invalid("n" if n > 1 else "prompts", message)
        most = stopping.context_length - min(stopping.max_tokens, 1)
        for i, prompt in enumerate(prompts):
            if len(prompt.ids) > most:
                raise ServiceError(
                    grpc.StatusCode.OUT_OF_RANGE,
                    "CONTEXT_LENGTH_EXCEEDED",
                    f"Prompt {i} has {len(prompt.ids)} tokens; prompt and output together may have "
                    f"at most {stopping.context_length}.",
                    field=f"prompts[{i}].ids",
                )
            self._check_ids(prompt.ids, f"prompts[{i}].ids")
        return [tuple(prompt.ids) for prompt in prompts]

    def _check_images(self, request: GenerateRequest) -> None:
        if not request.images:
            return
        if not self.takes_images:
            message = f"{self.model_id} takes no images: leave out images."
            code = grpc.StatusCode.UNIMPLEMENTED
            raise ServiceError(code, "NOT_IMPLEMENTED", message, field="images")
        for i, image in enumerate(request.images):
            if image.prompt >= len(request.prompts):
                message = (
                    f"There is no prompt {image.prompt}: the request has {len(request.prompts)}."
                )
                raise invalid(f"images[{i}].prompt", message)

    def _check_ids(self, ids: Sequence[int], field: str) -> None:
        if ids and max(ids) >= self.model.vocabulary_size:
            index = next(i for i, token in enumerate(ids) if token >= self.model.vocabulary_size)
            raise invalid(f"{field}[{index}]", self._not_an_id(ids[index]))

    def _not_an_id(self, token: int) -> str:
        return f"Token ids must be below {self.model.vocabulary_size}, got {token}."

    def _stopping(self, params: StoppingParams) -> StoppingSettings:
        max_tokens = params.max_tokens if params.HasField("max_tokens") else DEFAULT_MAX_TOKENS
        if params.min_tokens > max_tokens:
            raise invalid(
                "stopping.min_tokens",
                f"min_tokens must be at most max_tokens ({max_tokens}), got {params.min_tokens}.",
            )
        self._check_ids(params.stop_token_ids, "stopping.stop_token_ids")
        stop_token_ids = frozenset(params.stop_token_ids)
        context_length = self.model.context_length
        if params.HasField("context_length"):
            context_length = min(context_length, params.context_length)
        return StoppingSettings(
            max_tokens, params.min_tokens, params.ignore_eos, context_length, stop_token_ids
        )

    def _sampling(self, params: SamplingParams, *, draws: bool) -> SamplingSettings:
        # what mirostat or a beam search replaces must not come from a recommendation
        is_plain = params.HasField("mirostat") or not draws
        defaults = GenerationDefaults() if is_plain else self.defaults
        temperature = _given(params, "temperature", _default(defaults.temperature, 1.0, most=2))
        top_p = _given(params, "top_p", _default(defaults.top_p, 1.0, most=1))
        top_k = int(_given(params, "top_k", _default(defaults.top_k, 0, most=MAX_TOP_K)))
        min_p = _given(params, "min_p", _default(defaults.min_p, 0.0, most=1))
        if params.HasField("mirostat"):
            clashes = {
                "temperature": temperature == 0,
                "top_p": top_p < 1,
                "top_k": top_k > 0,
                "min_p": min_p > 0,
            }
            for field, clash in clashes.items():
                if clash:
                    message = f"mirostat replaces {field}: set only one of them."
                    raise invalid(f"sampling.{field}", message)
        suppressed = self.model.suppressed
        return SamplingSettings(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=params.seed if params.HasField("seed") else secrets.randbits(63),
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            repetition_penalty=_given(
                params, "repetition_penalty", _default(defaults.repetition_penalty, 1.0, most=2)
            ),
            logit_bias=self._logit_bias(params),
            dry=self._dry(params.dry),
            mirostat=_mirostat(params.mirostat) if params.HasField("mirostat") else None,
            allowed=self._allowed(params),
            bad_words=self._bad_words(params),
            suppressed=_without_wanted(suppressed.always, params),
            suppressed_first=_without_wanted(suppressed.first, params),
            penalty_window=params.penalty_window if params.HasField("penalty_window") else None,
        )

    def _allowed(self, params: SamplingParams) -> bytes | None:
        size = self.model.vocabulary_size
        ids: Sequence[int] = params.allowed_token_ids.ids
        field = "sampling.allowed_token_ids"
        if not params.HasField("allowed_token_ids"):
            if len(params.bad_token_ids) < size:
                return None
            ids = range(size)  # so many bad words may forbid every id, which only a mask shows
        if len(ids) > size:
            raise invalid(field, f"allowed_token_ids has more ids than the vocabulary ({size}).")
        self._check_ids(ids, f"{field}.ids")
        return bitmask(ids, size)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        words, field = params.bad_token_ids, "sampling.bad_token_ids"
        if (count := sum(len(word.ids) for word in words)) > MAX_BAD_IDS:
            message = f"bad_token_ids must have at most {MAX_BAD_IDS:,} ids in all, got {count:,}."
            raise invalid(field, message)
        for i, word in enumerate(words):
            self._check_ids(word.ids, f"{field}[{i}].ids")
        allowed = params.allowed_token_ids.ids or range(self.model.vocabulary_size)
        if {word.ids[0] for word in words if len(word.ids) == 1}.issuperset(allowed):
            raise invalid(field, "The bad words forbid every allowed token; remove some of them.")
        return tuple(tuple(word.ids) for word in words)

    def _logit_bias(self, params: SamplingParams) -> LogitBias | None:
        if not params.logit_bias:
            return None
        for token in params.logit_bias:
            if token >= self.model.vocabulary_size:
                raise invalid(f"sampling.logit_bias[{token}]", self._not_an_id(token))
        return LogitBias(
            array("q", params.logit_bias.keys()), array("f", params.logit_bias.values())
        )

    def _dry(self, params: DryParams) -> DrySettings | None:
        prefix = "sampling.dry"
        if len(params.breaker_ids) > self.model.vocabulary_size:
            size = self.model.vocabulary_size
            message = f"breaker_ids has more ids than the vocabulary ({size})."
            raise invalid(f"{prefix}.breaker_ids", message)
        self._check_ids(params.breaker_ids, f"{prefix}.breaker_ids")
        if params.multiplier == 0:
            return None
        base = _given(params, "base", DRY_BASE)
        allowed_length = int(_given(params, "allowed_length", DRY_ALLOWED_LENGTH))
        return DrySettings(params.multiplier, base, allowed_length, frozenset(params.breaker_ids))

    def _width(self, field: str, request: GenerateRequest) -> int | None:
        if not request.HasField(field):  # type: ignore[arg-type]
            return None
        width: int = getattr(request, field)
        if width > self.max_logprobs:
            raise invalid(field, f"{field} must be at most {self.max_logprobs}, got {width}.")
        return min(width, self.model.vocabulary_size)

    def _resume(self, request: GenerateRequest, n: int) -> Sequence[Resume]:
        count = len(request.prompts) * n
        seen: set[int] = set()
        for i, resumed in enumerate(request.resume):
            field = f"resume[{i}]"
            if resumed.sequence >= count or resumed.sequence in seen:
                message = f"Sequence {resumed.sequence} does not exist or is resumed twice."
                raise invalid(f"{field}.sequence", message)
            seen.add(resumed.sequence)
            ids = resumed.generated.ids
            _check_mu(resumed, request.sampling.HasField("mirostat"), f"{field}.mirostat_mu")
            self._check_ids(ids, f"{field}.generated.ids")
            prompt = request.prompts[resumed.sequence // n].ids
            if len(prompt) + len(ids) > self.model.context_length:
                message = (
                    f"Prompt and generated ids together have {len(prompt) + len(ids)} tokens; the "
                    f"context has {self.model.context_length}."
                )
                raise invalid(f"{field}.generated.ids", message)
        return [
            Resume(
                resumed.sequence,
                tuple(resumed.generated.ids),
                resumed.mirostat_mu if resumed.HasField("mirostat_mu") else None,
            )
            for resumed in request.resume
        ]

    def _prediction(self, request: GenerateRequest, n: int) -> Sequence[int]:
        ids = request.prediction.ids
        if not ids:
            return ()
        if len(request.prompts) * n > 1:
            raise invalid("prediction", "A prediction needs one prompt and n = 1.")
        if request.HasField("beam_search"):
            raise invalid("prediction", "A beam search takes no prediction: leave one of them out.")
        if len(ids) > self.model.context_length:
            message = (
                f"The prediction has {len(ids)} tokens; the context has "
                f"{self.model.context_length}."
            )
            raise invalid("prediction", message)
        self._check_ids(ids, "prediction.ids")
        return tuple(ids) if self.drafts_predictions else ()

    def _constrained(self, request: GenerateRequest) -> bool:
        if not request.HasField("grammar"):
            return False
        if not self.has_grammars:
            message = "This engine has no grammar service; start it with --grammar."
            code = grpc.StatusCode.UNIMPLEMENTED
            raise ServiceError(code, "NOT_IMPLEMENTED", message, field="grammar")
        if request.stopping.ignore_eos:
            message = "ignore_eos contradicts a grammar, which decides where the output ends."
            raise invalid("stopping.ignore_eos", message)
        return True


def _beams(request: GenerateRequest) -> BeamSettings | None:
    """Return the settings of a beam search. Raises for what it can't be combined with."""
    if not request.HasField("beam_search"):
        return None
    others = {"grammar": request.HasField("grammar"), "resume": bool(request.resume)}
    beams = request.beam_search
    check_beam_search(beams, request.sampling, others)
    penalty = beams.length_penalty if beams.HasField("length_penalty") else 1.0
    return BeamSettings(penalty, _EARLY_STOPPING[beams.early_stopping])


def _mirostat(params: MirostatParams) -> MirostatSettings:
    return MirostatSettings(
        _given(params, "target_perplexity", 1.5), _given(params, "learning_rate", 0.1)
    )


def _check_mu(resumed: ResumedSequence, in_use: bool, field: str) -> None:
    """Require Mirostat's state for a resumed sequence: token ids don't restore it."""
    if resumed.HasField("mirostat_mu"):
        if not in_use:
            raise invalid(field, "mirostat_mu is only valid in requests that use mirostat.")
        if not math.isfinite(resumed.mirostat_mu):
            raise invalid(field, "mirostat_mu must be finite.")
    elif in_use and resumed.generated.ids:
        raise invalid(field, "A sequence that resumes with mirostat needs its mirostat_mu.")


def _without_wanted(ids: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    """Return the suppressed ids that a request does not ask for by allowed ids or a bias."""
    wanted = {token for token, bias in params.logit_bias.items() if bias > 0}
    wanted.update(params.allowed_token_ids.ids)
    return tuple(token for token in ids if token not in wanted)


def _default(recommended: float | None, otherwise: float, most: float) -> float:
    """Return the default of a setting: what is recommended, at most what requests may ask for."""
    return otherwise if recommended is None else min(recommended, most)


def _given(
    params: SamplingParams | DryParams | MirostatParams, field: str, default: float
) -> float:
    """Return the value of a field that is within its bounds, or the default."""
    value: float = getattr(params, field)
    return value if params.HasField(field) else default  # type: ignore[arg-type]
