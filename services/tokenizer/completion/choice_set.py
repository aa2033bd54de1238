"""Choices of one completion, and the order in which clients get them."""

from collections.abc import Iterable, Iterator, Sequence
from math import fsum, inf

from services.tokenizer.completion.choice import Choice, ChoiceOutput
from services.tokenizer.completion.plan import CompletionPlan
from services.tokenizer.text.detokenizer import Detokenizer
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["ChoiceSet", "rank"]


class ChoiceSet:
    """The choices by sequence of the engine's request: those of the first prompt come first."""

    def __init__(self, plan: CompletionPlan) -> None:
        self._plan = plan
        self._choices: list[Choice] = []
        for prompt in plan.prompts:
            echo_length = sum(map(len, prompt.texts)) if plan.echo else None
            for _ in range(plan.engine_request.n):
                before = () if plan.begins_text else prompt.ids
                detokenizer = Detokenizer(plan.table, before, begins_text=not prompt.is_infill)
                choice = Choice(len(self._choices), plan.choice, detokenizer, echo_length)
                self._choices.append(choice)
        self._ready: dict[int, Choice] = {}
        """Choices that have output, by index; empty if choices are delivered whole"""
        self._whole_taken = 0
        self._winners: list[Choice] = []
        """Choices that best_of selected, in the order of the answer"""

    def __getitem__(self, sequence: int) -> Choice:
        return self._choices[sequence]

    def __iter__(self) -> Iterator[Choice]:
        return iter(self._choices)

    def resume(self, resumed: Iterable[completion_pb2.ResumedChoice], *, replays: bool) -> None:
        """Skip the output that the client received before its stream was lost.

        replays: whether the engine continues behind the received ids, instead of generating them
        again.
        """
        for each in resumed:
            choice = self._choices[each.index]
            if each.HasField("completion_tokens"):
                choice.skip_all(each.completion_tokens)
                continue
            choice.skip(list(each.generated.ids))
            if replays:
                choice.replay()
            if choice.has_output:  # the received ids complete a stop string
                self.update(choice)

    @property
    def received(self) -> int:
        """Generated tokens of all choices."""
        return sum(choice.completion_tokens for choice in self._choices)

    @property
    def await_echo(self) -> bool:
        """True if a choice has no echo yet."""
        return any(choice.awaits_echo for choice in self._choices)

    @property
    def running(self) -> list[Choice]:
        """Choices that have not ended."""
        return [choice for choice in self._choices if choice.outcome is None]

    @property
    def ended_sequences(self) -> list[int]:
        """Sequences of the choices that have ended."""
        return [place for place, choice in enumerate(self._choices) if choice.outcome is not None]

    def of_prompt(self, index: int) -> Sequence[Choice]:
        """Return all choices of a prompt."""
        draws = self._plan.engine_request.n
        return self._choices[index * draws : (index + 1) * draws]

    def update(self, choice: Choice) -> bool:
        """Register a choice that changed. Returns whether it may be taken now."""
        if self._plan.whole:
            return choice.outcome is not None and choice.has_output
        if choice.has_output:
            self._ready[choice.index] = choice
        return choice.has_output

    def take(self) -> ChoiceOutput | None:
        """Return the next output; None if nothing is ready."""
        choice = self._next_whole() if self._plan.whole else self._next_ready()
        return None if choice is None else choice.take()

    def _next_ready(self) -> Choice | None:
        return self._ready.pop(next(iter(self._ready))) if self._ready else None

    def _next_whole(self) -> Choice | None:
        """Return the next choice in the order of index, if it has ended."""
        has_candidates = self._plan.engine_request.n > self._plan.n
        choices = self._select() if has_candidates else self._choices
        while self._whole_taken < len(choices) and choices[self._whole_taken].is_taken:
            self._whole_taken += 1
        if self._whole_taken == len(choices):
            return None
        choice = choices[self._whole_taken]
        return choice if choice.outcome is not None and choice.has_output else None

    def _select(self) -> Sequence[Choice]:
        """Return the best choices of all prompts whose candidates have ended."""
        n = self._plan.n
        while candidates := self.of_prompt(len(self._winners) // n):
            if any(choice.outcome is None for choice in candidates):
                break
            order: Sequence[int] = range(len(candidates))  # beams come best first
            if self._plan.choice.ranked:
                order = rank([choice.kept_logprobs for choice in candidates])
            for place in order[:n]:
                candidates[place].index = len(self._winners)
                self._winners.append(candidates[place])
        return self._winners


def rank(candidates: Sequence[Sequence[float]]) -> list[int]:
    """Return the indices of candidates by their mean logprob: best first, empty ones last."""
    means = [fsum(logprobs) / len(logprobs) if logprobs else -inf for logprobs in candidates]
    return sorted(range(len(means)), key=lambda index: (-means[index], index))
