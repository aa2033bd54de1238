"""Scores of prompt tokens: for echoes, and as events of their own."""

from collections import deque
from collections.abc import Iterator, Sequence

from services.tokenizer.completion.columns import Score, read_scores, write_scores
from services.tokenizer.completion.echo import Echo, make_echo
from services.tokenizer.completion.plan import CompletionPlan
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["PromptScores"]


class PromptScores:
    """Scores that the engine sent so far, by prompt. The first token of a prompt has none."""

    def __init__(self, plan: CompletionPlan) -> None:
        self._plan = plan
        self._scores: list[list[Score]] = [[] for _ in plan.prompts]
        self._runs: deque[completion_pb2.PromptLogprobs] = deque()
        self._sent = [0] * len(plan.prompts)
        """Number of each prompt's scores that the client received before it resumed the request"""
        if plan.resume is not None:
            for index, count in enumerate(plan.resume.scored_prompt_tokens):
                self._sent[index] = count

    @property
    def received(self) -> int:
        """Scored tokens of all prompts."""
        return sum(map(len, self._scores))

    @property
    def lacks_runs(self) -> bool:
        """True if the client gets runs for which scores are missing."""
        return self._plan.prompt_logprobs is not None and any(
            max(len(scores), sent) < len(prompt.ids) - 1
            for scores, sent, prompt in zip(
                self._scores, self._sent, self._plan.prompts, strict=True
            )
        )

    @property
    def has_runs(self) -> bool:
        """True if `take_runs` yields anything."""
        return bool(self._runs)

    def add(self, scores: engine_pb2.PromptScores) -> bool:
        """Add scores. Returns whether any of them was not received before."""
        known = self._scores[scores.prompt]
        skip = max(0, len(known) + 1 - scores.position)
        fresh = read_scores(scores.tokens)[skip:]
        sent = max(0, self._sent[scores.prompt] - len(known))
        if fresh[sent:] and self._plan.prompt_logprobs is not None:
            ids = scores.tokens.ids[skip + sent :]
            self._runs.append(self._run(scores.prompt, len(known) + sent + 1, ids, fresh[sent:]))
        known.extend(fresh)
        return bool(fresh)

    def take_runs(self) -> Iterator[completion_pb2.PromptLogprobs]:
        """Yield new runs for the client. Runs that the caller does not reach stay for later."""
        while self._runs:
            yield self._runs.popleft()

    def echo(self, index: int) -> Echo | None:
        """Return the echo of a prompt; None while scores that it shows are missing."""
        prompt = self._plan.prompts[index]
        if not self._plan.choice.scored:
            return make_echo(prompt, None)
        if not self._is_scored(index):
            return None
        width = self._plan.engine_request.logprobs
        shown = [score.first(width) for score in self._scores[index]]
        return make_echo(prompt, [Score.none(width), *shown])

    def _is_scored(self, index: int) -> bool:
        return len(self._scores[index]) == len(self._plan.prompts[index].ids) - 1

    def _run(
        self, prompt: int, position: int, ids: Sequence[int], scores: Sequence[Score]
    ) -> completion_pb2.PromptLogprobs:
        run = completion_pb2.PromptLogprobs(prompt=prompt, position=position)
        columns = run.tokens
        columns.ids.extend(ids)
        write_scores([score.first(self._plan.prompt_logprobs or 0) for score in scores], columns)
        run.token_texts.extend(map(self._text, columns.ids))
        run.top_texts.extend(map(self._text, columns.top_ids))
        return run

    def _text(self, token: int) -> str:
        """Return the text of a token on its own. Bytes of incomplete characters become U+FFFD."""
        table = self._plan.full_table
        text = table.texts[token]
        return table.pieces[token].decode(errors="replace") if text is None else text
