"""Writing of completions: choices of the events of a request."""

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from services.http_shim.dialects.choices import (
    ChoicesWriter,
    PromptLogprobs,
    finish_reason_of,
    matched_stop_of,
    stop_reason_of,
)
from services.http_shim.dialects.completions.types import Choice, Logprobs
from services.http_shim.dialects.content_logprobs import finite
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["CompletionWriter"]


class CompletionWriter(ChoicesWriter):
    """Writer of a completion's choices."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def choice(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        finished: completion_pb2.ChoiceFinished | None,
        prompt: types_pb2.TokenIds | None,
    ) -> Choice:
        """Return a whole choice, or a part of it."""
        options = self.options
        choice = Choice(
            index=index,
            text=deltas[0].text if len(deltas) == 1 else "".join([delta.text for delta in deltas]),
            logprobs=_logprobs(deltas, self.options.tokens_as_ids)
            if self.options.logprobs
            else None,
            finish_reason=None,
            stop_reason=None,
        )
        if finished is not None:
            choice.finish_reason = finish_reason_of(finished)
            choice.stop_reason = stop_reason_of(finished)
            choice.matched_stop = matched_stop_of(finished)
        if options.token_ids:
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
            choice.prompt_logprobs = prompts[choice.index // self.options.choices_per_prompt]

    def chunks(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        finished: completion_pb2.ChoiceFinished | None,
        prompt: types_pb2.TokenIds | None,
    ) -> Sequence[Choice]:
        choice = self.choice(index, deltas, finished, prompt)
        if finished is None and not (
            choice.text or self.options.logprobs or self.options.token_ids
        ):
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
