"""Output of one completion: responses from events of the engine."""

import time
from collections.abc import Callable, Iterator, Sequence

from services.common.accounts.usage import RequestUsage
from services.tokenizer import metrics
from services.tokenizer.completion.choice_set import ChoiceSet
from services.tokenizer.completion.plan import CompletionPlan
from services.tokenizer.completion.prompt_scores import PromptScores
from services.tokenizer.completion.request_processor import AddResponse, RequestProcessor
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["CompletionOutput"]


class CompletionOutput:
    """Everything that the engine sent for one plan, until the client takes it.

    The methods that take an event return whether `write` has something to write for it.
    """

    def __init__(self, plan: CompletionPlan, started: float) -> None:
        """started: time of the request's arrival on the monotonic clock, in seconds."""
        self.plan = plan
        self.encode_seconds = time.monotonic() - started
        """Seconds from the request's arrival to its plan"""
        self.first_token_seconds: float | None = None
        """Seconds from the request's arrival to its first token; None before that token"""
        self.choices = ChoiceSet(plan)
        self.is_admission_written = False
        self.is_written = False
        """True if the last event was written"""
        self._prompt_scores = PromptScores(plan)
        self._admission: engine_pb2.Accepted | None = None
        self._usage: types_pb2.Usage | None = None
        self._mirostat_mu: dict[int, float] = {}
        """State of Mirostat by sequence, which can't be restored from ids"""
        self._started = started
        self._last_token_at: dict[int, float] = {}
        if plan.resume is not None:
            self.choices.resume(plan.resume.choices, replays=not plan.generates_again)

    @property
    def is_admitted(self) -> bool:
        """True if the engine has admitted the request."""
        return self._admission is not None

    def usage(self, *, is_error: bool) -> RequestUsage:
        """Return the tokens of prompt and output so far; none before the admission."""
        if self._admission is None:
            return RequestUsage("", is_error=is_error)
        return RequestUsage(
            self.plan.limits.model,
            self.plan.prompt_tokens,
            self.choices.received,
            sum(self._admission.cached_tokens),
            is_error=is_error,
        )

    @property
    def progress(self) -> int:
        """Tokens and scores that the engine sent."""
        return self.choices.received + self._prompt_scores.received

    def computed(self) -> Iterator[tuple[Sequence[int], Iterator[Sequence[int]]]]:
        """Yield the ids of each prompt, and the ids that an engine has computed for its choices.

        The last id of a choice is computed only with the next one.
        """
        for index, prompt in enumerate(self.plan.prompts):
            choices = self.choices.of_prompt(index)
            yield prompt.ids, (choice.received[:-1] for choice in choices)

    def accept(self, admission: engine_pb2.Accepted) -> bool:
        """Take the engine's admission. An admission after a resubmission changes nothing."""
        if self._admission is not None:
            return False
        self._admission = admission
        metrics.PROMPT_TOKENS.inc(self.plan.prompt_tokens)
        metrics.CACHED_TOKENS.inc(sum(admission.cached_tokens))
        if self.plan.echo:
            for index in range(len(self.plan.prompts)):
                self._put_echo(index)
        return True

    def add_tokens(self, delta: engine_pb2.OutputDelta) -> bool:
        """Take generated tokens. Raises INTERNAL if tokens are missing in between."""
        choice = self.choices[delta.sequence]
        before = len(choice.received)
        choice.add(delta.position, delta.tokens)
        if delta.HasField("mirostat_mu"):
            self._mirostat_mu[delta.sequence] = delta.mirostat_mu
        self._observe(delta.sequence, len(choice.received) - before)
        return self.choices.update(choice)

    def end_choice(self, finished: engine_pb2.SequenceFinished) -> bool:
        """Take the end of a sequence."""
        choice = self.choices[finished.sequence]
        choice.end(finished.reason, finished.match if finished.HasField("match") else None)
        return self.choices.update(choice)

    def add_prompt_scores(self, scores: engine_pb2.PromptScores) -> bool:
        """Take scores of prompt tokens."""
        is_new = self._prompt_scores.add(scores)
        scores_echo = self.plan.echo and self.plan.choice.scored
        has_echo = is_new and scores_echo and self._put_echo(scores.prompt)
        return has_echo or self._prompt_scores.has_runs

    def complete(self, usage: types_pb2.Usage) -> None:
        """Take the end of the request; `usage` is the engine's."""
        self._usage = types_pb2.Usage()
        self._usage.CopyFrom(usage)
        self._usage.prompt_tokens = self.plan.prompt_tokens
        self._usage.completion_tokens = self.choices.received

    def write(
        self,
        processor: RequestProcessor,
        add: AddResponse,
        is_full: Callable[[], bool],
    ) -> bool:
        """Write ready output as responses from `add`. Returns whether output is left."""
        if self._admission is not None and not self.is_admission_written:
            self._write_admission(add().accepted, self._admission)
        for run in self._prompt_scores.take_runs():
            add().prompt_logprobs.CopyFrom(run)
            if self.plan.writes_one_large or is_full():
                return True
        while (output := self.choices.take()) is not None:
            processor.write_choice(output, add)
            if output.is_large and (self.plan.writes_one_large or is_full()):
                return True
        if self._usage is not None and not self.is_written:
            self._usage.reasoning_tokens = processor.reasoning_tokens
            add().completed.usage.CopyFrom(self._usage)
            self.is_written = True
        return False

    def remaining_request(self) -> engine_pb2.GenerateRequest:
        """Return the engine request that continues the running choices, with the same seed.

        A beam search begins anew, and finds the same tokens.
        """
        request = engine_pb2.GenerateRequest()
        request.CopyFrom(self.plan.engine_request)
        for sequence, choice in enumerate(self.choices):
            if self.plan.searches:
                break
            if choice.outcome is None and choice.received:
                request.resume.add(
                    sequence=sequence,
                    generated=types_pb2.TokenIds(ids=choice.received),
                    mirostat_mu=self._mirostat_mu.get(sequence),
                )
        if not self._prompt_scores.lacks_runs and not self.choices.await_echo:
            request.ClearField("prompt_logprobs")
        return request

    def _put_echo(self, index: int) -> bool:
        """Put the prompt in front of its choices, as soon as its scores are there."""
        echo = self._prompt_scores.echo(index)
        if echo is None:
            return False
        has_output = False
        for choice in self.choices.of_prompt(index):
            choice.put_echo(echo)
            has_output |= self.choices.update(choice)
        return has_output

    def _observe(self, sequence: int, tokens: int) -> None:
        metrics.COMPLETION_TOKENS.inc(tokens)
        now = time.monotonic()
        last = self._last_token_at.get(sequence)
        if last is not None:
            metrics.INTER_TOKEN_SECONDS.observe((now - last) / max(1, tokens))
        elif not self._last_token_at:
            self.first_token_seconds = now - self._started
            metrics.FIRST_TOKEN_SECONDS.observe(self.first_token_seconds)
            metrics.RECENT_FIRST_TOKENS.add(now, self.first_token_seconds)
        self._last_token_at[sequence] = now

    def _write_admission(
        self, accepted: completion_pb2.Accepted, admission: engine_pb2.Accepted
    ) -> None:
        plan = self.plan
        accepted.model = plan.limits.model
        accepted.system_fingerprint = plan.limits.system_fingerprint
        accepted.prompts.extend(plan.engine_request.prompts)
        accepted.seed = plan.engine_request.sampling.seed
        accepted.max_tokens.extend(admission.max_tokens)
        accepted.ignored.extend(plan.ignored)
        accepted.cached_tokens.extend(admission.cached_tokens)
        self.is_admission_written = True
