"""The scores of a prompt's tokens as vLLM's API writes them. Pure."""

from collections.abc import Iterable, Sequence

from services.http_shim.formats.responses import PromptLogprobs, PromptToken, finite
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["prompt_logprobs_of"]


def prompt_logprobs_of(runs: Iterable[completion_pb2.PromptLogprobs]) -> PromptLogprobs:
    """The scores of a prompt, from its runs in order."""
    return [None, *(row for run in runs for row in _rows(run))]


def _rows(run: completion_pb2.PromptLogprobs) -> Sequence[dict[str, PromptToken]]:
    columns, width = run.tokens, run.tokens.top_width
    tops = list(zip(columns.top_ids, columns.top_logprobs, run.top_texts, strict=True))
    rows: list[dict[str, PromptToken]] = []
    tokens = zip(columns.ids, columns.logprobs, columns.ranks, run.token_texts, strict=True)
    for place, (token, logprob, rank, text) in enumerate(tokens):
        row = {str(token): PromptToken(finite(logprob), rank, text)}
        candidates = enumerate(tops[place * width : (place + 1) * width], start=1)
        for candidate_rank, (candidate, score, candidate_text) in candidates:
            row[str(candidate)] = PromptToken(finite(score), candidate_rank, candidate_text)
        rows.append(row)
    return rows
