"""Conversion of the step loop's outputs to protobuf events and errors for clients."""

from collections.abc import Sequence

import grpc

from services.engine.checked_request import SamplingSettings
from services.engine.messages import (
    Admitted,
    FinishCause,
    Finished,
    Refused,
    RequestDone,
    Score,
    ScoredPrompt,
)
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1.engine_pb2 import Accepted, Completed, PromptScores, SequenceFinished
from tokenwire.pb.types.v1.types_pb2 import (
    DraftSource,
    DraftUsage,
    DryParams,
    FinishReason,
    MirostatParams,
    SamplingParams,
    StopMatch,
    TokenColumns,
    TokenIds,
    Usage,
)

__all__ = ["accepted", "add_scores", "completed", "finished", "prompt_scores", "refusal"]

_FINISH: dict[FinishCause, FinishReason.ValueType] = {
    FinishCause.EOS: FinishReason.FINISH_REASON_STOP,
    FinishCause.STOP_TOKEN: FinishReason.FINISH_REASON_STOP,
    FinishCause.GRAMMAR: FinishReason.FINISH_REASON_STOP,
    FinishCause.LENGTH: FinishReason.FINISH_REASON_LENGTH,
    FinishCause.CANCELLED: FinishReason.FINISH_REASON_CANCELLED,
}
_BITS = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]
"""Places of the ones in each byte, from the lowest bit"""


def accepted(admitted: Admitted, sampling: SamplingSettings) -> Accepted:
    return Accepted(
        sampling=_sampling_params(sampling),
        max_tokens=admitted.max_tokens,
        cached_tokens=admitted.cached_tokens,
        queue_position=admitted.queue_position,
    )


def prompt_scores(scored: ScoredPrompt) -> PromptScores:
    event = PromptScores(prompt=scored.prompt, position=scored.position)
    event.tokens.ids.extend(scored.ids)
    add_scores(event.tokens, scored.scores)
    return event


def add_scores(columns: TokenColumns, scores: Sequence[Score]) -> None:
    """Append scores to the columns."""
    for score in scores:
        columns.logprobs.append(score.logprob)
        columns.ranks.append(score.rank)
        columns.top_width = len(score.top_ids)
        columns.top_ids.extend(score.top_ids)
        columns.top_logprobs.extend(score.top_logprobs)


def finished(ended: Finished) -> SequenceFinished:
    match: StopMatch | None = None
    if ended.cause is FinishCause.EOS and ended.token_id is not None:
        match = StopMatch(eos_token_id=ended.token_id)
    elif ended.cause is FinishCause.STOP_TOKEN and ended.token_id is not None:
        match = StopMatch(stop_token_id=ended.token_id)
    return SequenceFinished(
        sequence=ended.sequence,
        reason=_FINISH[ended.cause],
        match=match,
        completion_tokens=ended.completion_tokens,
    )


def completed(done: RequestDone) -> Completed:
    usage = Usage(
        prompt_tokens=done.prompt_tokens,
        completion_tokens=done.completion_tokens,
        cached_tokens=done.cached_tokens,
        queue_seconds=done.queue_seconds,
        prefill_seconds=done.prefill_seconds,
        decode_seconds=done.decode_seconds,
        drafts=[
            DraftUsage(
                source=DraftSource.Value(f"DRAFT_SOURCE_{each.source.upper()}"),
                drafted_tokens=each.drafted,
                accepted_tokens=each.accepted,
            )
            for each in done.drafts
        ],
    )
    return Completed(usage=usage)


def refusal(refused: Refused) -> ServiceError:
    return ServiceError(
        grpc.StatusCode[refused.code],
        refused.reason,
        refused.message,
        field=refused.field,
        retry_seconds=refused.retry_seconds,
    )


def _ids_of(mask: bytes) -> list[int]:
    """Return the ids of a bitmask. numpy would lengthen each start by 0.1 s for this alone."""
    return [8 * place + bit for place, byte in enumerate(mask) if byte for bit in _BITS[byte]]


def _sampling_params(settings: SamplingSettings) -> SamplingParams:
    """Return the settings echoed to the client: defaults filled in, unused features left out."""
    params = SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        seed=settings.seed,
        frequency_penalty=settings.frequency_penalty,
        presence_penalty=settings.presence_penalty,
        repetition_penalty=settings.repetition_penalty,
        penalty_window=settings.penalty_window,
    )
    if settings.allowed is not None:
        params.allowed_token_ids.ids.extend(_ids_of(settings.allowed))
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
