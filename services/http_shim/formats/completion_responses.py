"""JSON of completion answers, made of the events of a completion."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from msgspec import UNSET, Struct, UnsetType

from services.http_shim.formats.request_bodies import CompletionBody
from services.http_shim.formats.responses import (
    ChoiceFormatter,
    PromptLogprobs,
    finish_reason_of,
    finite,
    matched_stop_of,
    stop_reason_of,
)
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["Choice", "CompletionFormatter"]


class Logprobs(Struct):
    """Log probabilities: four parallel lists with one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(Struct):
    """A choice, or a part of it in a chunk."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    matched_stop: str | int | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class CompletionFormatter(ChoiceFormatter):
    """Formatter of a completion's choices."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    @classmethod
    def of(cls, body: CompletionBody) -> Self:
        """Return the formatter that a request asks for."""
        return cls(
            choices_per_prompt=1 if body.n is None else body.n,
            logprobs=body.logprobs is not None,
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            prompt_logprobs=body.prompt_logprobs is not None,
        )

    def tokens_in(self, deltas: Sequence[completion_pb2.ChoiceDelta]) -> int:
        count = 0
        for delta in deltas:
            if not delta.is_prompt:
                count += len(delta.token_ids)
        return count

    def choice(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        finished: completion_pb2.ChoiceFinished | None,
        prompt: types_pb2.TokenIds | None,
    ) -> Choice:
        """Return a whole choice, or a part of it."""
        choice = Choice(
            index=index,
            text=deltas[0].text if len(deltas) == 1 else "".join([delta.text for delta in deltas]),
            logprobs=_logprobs(deltas, self.tokens_as_ids) if self.logprobs else None,
            finish_reason=None,
            stop_reason=None,
        )
        if finished is not None:
            choice.finish_reason = finish_reason_of(finished)
            choice.stop_reason = stop_reason_of(finished)
            choice.matched_stop = matched_stop_of(finished)
        if self.token_ids:
            generated = [delta for delta in deltas if not delta.is_prompt]
            choice.token_ids = [token for delta in generated for token in delta.token_ids]
            if prompt is not None:
                choice.prompt_token_ids = list(prompt.ids)
        return choice

    def add_prompt_logprobs(
        self, choices: Sequence[Struct], prompts: Sequence[PromptLogprobs]
    ) -> None:
        for choice in choices:
            assert isinstance(choice, Choice)
            choice.prompt_logprobs = prompts[choice.index // self.choices_per_prompt]

    def chunks(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        finished: completion_pb2.ChoiceFinished | None,
        prompt: types_pb2.TokenIds | None,
    ) -> Sequence[Choice]:
        choice = self.choice(index, deltas, finished, prompt)
        if finished is None and not (choice.text or self.logprobs or self.token_ids):
            return ()
        return (choice,)


def _logprobs(deltas: Iterable[completion_pb2.ChoiceDelta], as_ids: bool) -> Logprobs:
    result = Logprobs([], [], [], [])
    for delta in deltas:
        columns = delta.tokens
        texts = _names(columns.ids) if as_ids else list(delta.token_texts)
        top_texts = _names(columns.top_ids) if as_ids else list(delta.top_texts)
        scores = list(columns.logprobs)
        result.tokens += texts
        result.token_logprobs += [_number(score) for score in scores]
        result.top_logprobs += _tops(
            texts, scores, top_texts, list(columns.top_logprobs), columns.top_width
        )
        result.text_offset += delta.text_offsets
    return result


def _tops(
    texts: list[str], scores: list[float], top_texts: list[str], top_scores: list[float], width: int
) -> list[dict[str, float] | None]:
    """Return for each token a mapping of its text and its candidates' texts to scores.

    The token itself is first, where vLLM's clients expect it; the candidates follow, best first.
    Of equal texts, the likelier counts.
    """
    rows: list[dict[str, float] | None] = []
    for i, (text, score) in enumerate(zip(texts, scores, strict=True)):
        if math.isnan(score):
            rows.append(None)
            continue
        row = {text: finite(score)}
        columns = slice(i * width, (i + 1) * width)
        for candidate, candidate_score in zip(top_texts[columns], top_scores[columns], strict=True):
            row[candidate] = max(row.get(candidate, -math.inf), finite(candidate_score))
        rows.append(row)
    return rows


def _names(ids: Iterable[int]) -> list[str]:
    return [f"token_id:{token}" for token in ids]


def _number(score: float) -> float | None:
    return None if math.isnan(score) else finite(score)
