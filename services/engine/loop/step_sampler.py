"""Prompt scores and drawn tokens from the hidden states of a step."""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from services.engine.execution.model_runner import SCORED_ROWS, ModelRunner
from services.engine.loop import refusals
from services.engine.loop.request_table import RequestTable
from services.engine.messages import FinishCause, Score, ScoredPrompt
from services.engine.sampling.bad_words import intersect_masks
from services.engine.sampling.row import NOTHING_ALLOWED, Row
from services.engine.sampling.sampler import argmax, reject_nan, sample
from services.engine.sampling.score import score
from services.engine.scheduling.sequence import Sequence, SequenceState
from services.engine.scheduling.step_plan import Chunk, StepPlan

__all__ = ["Draw", "HeldLogits", "StepSampler"]


class Draw(NamedTuple):
    """One token to draw from one row of logits."""

    sequence: Sequence
    row: int
    """Row of the step's hidden states, which has a row for each kept token"""
    position: int
    """Position of the token to draw, counted from the end of the original prompt"""
    assumed: int | None = None
    """Token that the row assumes in front of `position`, if it was not certain then"""

    @property
    def runs_ahead(self) -> bool:
        """True if the device can draw the token before the host has the preceding one."""
        return self.sequence.request.runs_ahead and self.sequence.may_draw

    @property
    def is_next(self) -> bool:
        """True if the sequence has reached `position`, through the assumed token."""
        sequence = self.sequence
        if sequence.state is SequenceState.FINISHED or sequence.position != self.position:
            return False
        return self.assumed is None or int(sequence.tokens[-1]) == self.assumed


class HeldLogits(NamedTuple):
    """Logits of a sequence that waits for a mask or credit."""

    draws: Items[Draw]
    logits: Tensor
    """float32 [draws, vocabulary]; valid while they are the sequence's `held_logits`"""

    @property
    def sequence(self) -> Sequence:
        return self.draws[0].sequence

    @property
    def is_valid(self) -> bool:
        """False once the sequence has drawn, ended or been preempted."""
        return self.sequence.held_logits is self.logits

    @property
    def draft(self) -> list[int]:
        """Draft tokens that the logits verify."""
        return [draw.assumed for draw in self.draws if draw.assumed is not None]

    @property
    def allowed(self) -> tuple[list[Draw], Tensor]:
        """Draws up to the sequence's last mask, with their logits."""
        draws = [draw for draw in self.draws if self.sequence.may_draw_at(draw.position)]
        return draws, self.logits[: len(draws)]


class StepSampler:
    """Scores prompts, draws tokens, and holds the logits of sequences that may not draw yet."""

    def __init__(
        self,
        runner: ModelRunner,
        requests: RequestTable,
        eos_token_ids: frozenset[int],
        *,
        needs_logits: bool,
    ) -> None:
        """needs_logits: compute logits even where the most likely token would do."""
        self._runner = runner
        self._requests = requests
        self._eos_token_ids = eos_token_ids
        self._searches = runner.finds_most_likely and not needs_logits
        self._held: list[HeldLogits] = []

    def score_prompts(self, plan: StepPlan, hidden: Tensor) -> None:
        """Report the scores of the prompt tokens whose predecessors the step computed."""
        end_row = len(plan.decodes)
        for chunk in plan.chunks:
            end_row += chunk.num_outputs
            sequence = chunk.sequence
            width = sequence.request.command.checked.prompt_logprobs
            if width is not None:
                self._score_chunk(chunk, hidden, end_row, width)
            sequence.scored = max(sequence.scored, min(chunk.end + 1, sequence.prompt_length))

    def _score_chunk(self, chunk: Chunk, hidden: Tensor, end_row: int, width: int) -> None:
        """Score the prompt tokens after a chunk's; `end_row` is one past its last kept row."""
        sequence = chunk.sequence
        end = min(chunk.end + 1, sequence.prompt_length)
        for start in range(max(sequence.scored, chunk.start + 1), end, SCORED_ROWS):
            if sequence.state is SequenceState.FINISHED:
                return  # the model has computed NaN
            ids = sequence.tokens[start : min(start + SCORED_ROWS, end)].tolist()
            row = end_row - chunk.end + start - 1
            logits = self._runner.logits(hidden, list(range(row, row + len(ids))))
            handle, prompt = sequence.request.command.handle, sequence.prompt_index
            scores = score(logits, ids, width)
            if any(math.isnan(each.logprob) for each in scores):
                self._requests.abort(refusals.not_finite(handle))
            else:
                self._requests.report(ScoredPrompt(handle, prompt, start, ids, scores))
                sequence.scored = start + len(ids)

    def draws(self, plan: StepPlan) -> list[Draw]:
        """Return the draws that a step makes possible, and end sequences that only score."""
        draws: list[Draw] = []
        for row, sequence in enumerate(plan.decodes):
            if self._generates(sequence):
                draws.append(Draw(sequence, row, sequence.position + sequence.in_flight))
        last_row = len(plan.decodes) - 1
        for chunk in plan.chunks:
            last_row += chunk.num_outputs
            sequence = chunk.sequence
            is_complete = chunk.end - len(chunk.draft) >= sequence.length
            if is_complete and self._generates(sequence):
                row = last_row - len(chunk.draft)
                draws.append(Draw(sequence, row, sequence.position))
                draws += [
                    Draw(sequence, row + i, sequence.position + i, token)
                    for i, token in enumerate(chunk.draft, start=1)
                ]
        return draws

    def _generates(self, sequence: Sequence) -> bool:
        """Return whether a computed sequence goes on; end it if it only scores its prompt."""
        if sequence.state is SequenceState.FINISHED:
            return False  # its request was aborted over the scores of a prompt
        if sequence.max_tokens == 0:
            self._requests.finish(sequence, FinishCause.LENGTH)
            return False
        return True

    def compute(
        self, draws: Items[Draw], hidden: Tensor
    ) -> tuple[Tensor | None, Items[int] | None]:
        """Return the logits of the draws, or the most likely tokens where they suffice."""
        rows = [draw.row for draw in draws]
        if not rows:
            return None, None
        if self._searches and all(draw.sequence.request.needs_no_logits for draw in draws):
            return None, self._runner.most_likely(hidden, rows)
        return self._runner.logits(hidden, rows), None

    def rows(self, draws: Items[Draw]) -> list[Row] | None:
        """Return the sampling of each draw; None = take the most likely token of every row."""
        if all(draw.sequence.request.is_plainly_greedy for draw in draws):
            return None
        return [self._row(draw) for draw in draws]

    def draw(self, draws: Items[Draw], logits: Tensor) -> None:
        """Draw tokens for the sequences that may; hold the logits of the others."""
        ready: list[int] = []
        held: dict[Sequence, list[int]] = {}
        for i, draw in enumerate(draws):
            sequence = draw.sequence
            if sequence.state is SequenceState.FINISHED or draw.position < sequence.position:
                continue  # ended, or advanced by forced tokens, while the step ran
            if sequence.may_draw_at(draw.position):
                ready.append(i)
            elif draw.assumed is None:
                held[sequence] = [i]
            elif sequence in held:
                held[sequence].append(i)
        if held:
            self._hold(draws, logits, list(held.values()))
        if ready:
            some = logits if len(ready) == len(draws) else logits[ready]
            self.advance([draws[i] for i in ready], some)

    def _hold(self, draws: Items[Draw], logits: Tensor, held: Items[list[int]]) -> None:
        """Keep a copy of the logits of some sequences, given by the indices of their draws."""
        copied = logits[[i for indices in held for i in indices]]
        for indices in held:
            own, copied = copied[: len(indices)], copied[len(indices) :]
            self._held.append(HeldLogits([draws[i] for i in indices], own))
            draws[indices[0]].sequence.held_logits = own

    def take_ready(self) -> list[HeldLogits]:
        """Remove and return the held logits of sequences that may draw now."""
        held = [each for each in self._held if each.is_valid]
        self._held = [each for each in held if not each.sequence.may_draw]
        return [each for each in held if each.sequence.may_draw]

    def draw_held(self, ready: Items[HeldLogits]) -> None:
        """Draw tokens from held logits."""
        allowed = [each.allowed for each in ready]
        self.advance(
            [draw for draws, _ in allowed for draw in draws],
            torch.cat([logits for _, logits in allowed]),
        )

    def advance(self, draws: Items[Draw], logits: Tensor) -> None:
        """Draw tokens, report them with their scores, and end sequences that are complete.

        logits: float32 [draws, vocabulary].
        """
        rows = self.rows(draws)
        tokens = argmax(logits) if rows is None else sample(logits, rows)
        scores = self._scores(draws, logits, tokens)
        tokens = reject_nan(logits, tokens)
        for i, row in enumerate(rows or ()):
            if row.allows_nothing:
                tokens[i] = NOTHING_ALLOWED
        self.append(draws, tokens, scores)

    def append(self, draws: Items[Draw], tokens: Items[int], scores: Mapping[int, Score]) -> None:
        """Append drawn tokens and report them; `scores` is by index of the draw.

        A negative token aborts the request: its logits are NaN, or its limits allow no id.
        """
        for i, (draw, token) in enumerate(zip(draws, tokens, strict=True)):
            if not draw.is_next:
                continue
            command = draw.sequence.request.command
            if token == NOTHING_ALLOWED:
                sampling = command.checked.sampling
                self._requests.abort(refusals.nothing_allowed(command.handle, sampling))
            elif token < 0:
                self._requests.abort(refusals.not_finite(command.handle))
            else:
                self._requests.append(draw.sequence, token, scores.get(i))
        for draw in draws:
            draw.sequence.drop_draft_masks()

    def _scores(self, draws: Items[Draw], logits: Tensor, tokens: Items[int]) -> dict[int, Score]:
        """Return the scores of the drawn tokens that a request asks for, by index of the draw."""
        widths = [draw.sequence.request.command.checked.logprobs for draw in draws]
        scores: dict[int, Score] = {}
        for width in {width for width in widths if width is not None}:
            rows = [i for i, each in enumerate(widths) if each == width]
            found = score(logits[rows], [tokens[i] for i in rows], width)
            scores.update(zip(rows, found, strict=True))
        return scores

    def _row(self, draw: Draw) -> Row:
        sequence, checked = draw.sequence, draw.sequence.request.command.checked
        sampling, stopping = checked.sampling, checked.stopping
        banned: tuple[int, ...] = ()
        if draw.position < stopping.min_tokens:
            eos = () if stopping.ignore_eos else self._eos_token_ids
            banned = (*eos, *stopping.stop_token_ids)
        if sequence.penalties is not None:
            sequence.penalties.update(sequence.tokens)
        mask = sequence.mask.allows_at(draw.position) if sequence.mask is not None else None
        forbidden: Items[int] = ()
        if sampling.limits_ids:
            words = sequence.request.bad_words
            if words is not None:
                forbidden = words.forbidden_after(sequence.tokens[sequence.prompt_length :])
            if mask is not None or sampling.allowed is not None:
                mask, forbidden = intersect_masks(mask, sampling.allowed, forbidden), ()
        return Row(
            sampling,
            sequence.index,
            draw.position,
            banned,
            mask,
            sequence.penalties,
            sequence.mirostat,
            forbidden,
        )
