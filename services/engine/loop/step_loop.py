"""The step loop: take commands, schedule, run, draw, report."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from services.engine.execution.model_runner import SCORED_ROWS, DeviceTokens, ModelRunner
from services.engine.loop.requests import LoopLimits, Requests
from services.engine.messages import (
    Command,
    FinishCause,
    Guessed,
    LoadSnapshot,
    Score,
    ScoredPrompt,
    StepOutput,
)
from services.engine.sampling.bad_words import intersect_masks
from services.engine.sampling.pending_tokens import PendingTokens
from services.engine.sampling.row import NOTHING_ALLOWED, Row
from services.engine.sampling.sampler import argmax, reject_nan, sample
from services.engine.sampling.score import score
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import Sequence, SequenceState
from services.engine.scheduling.step_plan import StepPlan

__all__ = ["StepLoop"]


_LOG = logging.getLogger("loop")


class _Draw(NamedTuple):
    """One row of logits that a sequence may draw its next token from."""

    sequence: Sequence
    row: int
    """Of the step's hidden states, a row for each token that is kept"""
    position: int
    """Of the token to draw, counted from the end of the original prompt"""
    guess: int | None = None
    """The token before it, if that was only guessed when the row was computed"""

    @property
    def runs_ahead(self) -> bool:
        """Whether it can be drawn before the token in front of it is here."""
        return self.sequence.request.runs_ahead and self.sequence.may_draw

    @property
    def is_next(self) -> bool:
        """Whether the sequence has come to this position, and by the token that was guessed."""
        sequence = self.sequence
        if sequence.state is SequenceState.FINISHED or sequence.position != self.position:
            return False
        return self.guess is None or int(sequence.tokens[-1]) == self.guess


class _HeldLogits(NamedTuple):
    """The rows of one sequence that could not be drawn from when they were computed."""

    draws: Items[_Draw]
    logits: Tensor
    """float32 [draws, vocabulary]; the sequence's `held_logits` for as long as they are of use"""

    @property
    def sequence(self) -> Sequence:
        return self.draws[0].sequence


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that still runs while the next one is planned: its tokens are not here yet."""

    plan: StepPlan
    draws: list[_Draw]
    tokens: PendingTokens
    began: float

    @property
    def drawn(self) -> DeviceTokens | None:
        """The newest tokens of its sequences, where the next step finds them."""
        if not self.draws:
            return None
        indices = {draw.sequence: i for i, draw in enumerate(self.draws)}
        return DeviceTokens(self.tokens.on_device, indices)


class StepLoop:
    """Continuous batching. `step` is one turn; everything else prepares it or follows from it.

    Where steps overlap, a turn launches its step before it takes the tokens of the one before. A
    step whose tokens can all be drawn without the host then stays in flight: the next step reads
    them on the device, and what they mean, that a sequence has ended say, shows a turn later. The
    row that such a sequence has in the next step is in vain. Its blocks are free at once all the
    same: what is launched later writes later.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        limits: LoopLimits,
        clock: Callable[[], float] = time.monotonic,
        *,
        overlaps: bool = False,
        isolates: bool = True,
    ) -> None:
        """overlaps: launch a step before the tokens of the last one are here; not where tokens are
        guessed, because guesses need them.

        isolates: a step that raises is repeated sequence by sequence, and only requests whose own
        part raises fail. Several ranks can't do that: the others wait in the middle of the step.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._limits = limits
        self._clock = clock
        self._requests = Requests(scheduler, limits, clock)
        self._held: list[_HeldLogits] = []
        """What keeps its logits until a mask comes, or credit"""
        self._overlaps = overlaps and not scheduler.limits.speculate
        self._isolates = isolates
        self._flight: _Flight | None = None
        self._landing: _Flight | None = None
        """The step before, while its tokens are not taken"""
        self._last_end = -math.inf
        """When the last step had run"""
        self._steps = 0
        self.progressed = False
        """Whether the last step computed anything"""

    @property
    def is_idle(self) -> bool:
        """Whether no request is here at all."""
        return not self._requests

    def step(self, receive: Callable[[], Iterable[Command]]) -> StepOutput:
        """One turn: schedule, run, draw, report.

        `receive` gives the commands that have come; it is asked before the batch is chosen and
        again after it ran, because masks come while it runs.
        """
        self.apply(receive())
        self._requests.cut_starved()
        began = self._clock()
        plan = self._scheduler.plan(began)
        self._landing, self._flight = self._flight, None
        self.progressed = not plan.is_empty or self._landing is not None
        if not plan.is_empty:
            self._requests.note_started(chunk.sequence for chunk in plan.chunks)
            try:
                self._run(plan, began, receive)
            except (OSError, EOFError):
                raise  # the gRPC side is gone
            except Exception as error:
                if not self._isolates or self._flight is not None:
                    raise
                self._run_apart(plan, error)
        elif self._landing is not None:
            self._settle(self._landing, [])
        self._draw_held()
        self._tell_guesses()
        return self.take_output()

    def _run(self, plan: StepPlan, began: float, receive: Callable[[], Iterable[Command]]) -> None:
        """Compute a plan, and draw from it."""
        before = self._landing
        hidden = self._runner.forward(plan, before.drawn if before is not None else None)
        self._steps += 1
        self._score_prompts(plan, hidden)
        draws = self._draws(plan)
        logits, tokens = self._look_at(draws, hidden)
        if self._overlaps and all(draw.runs_ahead for draw in draws):
            self._flight = self._launch(plan, draws, logits, began)
        self.apply(receive())
        if before is not None:
            self._settle(before, draws)
        if self._flight is None:
            self._take(plan, draws, logits, tokens)
            self._learn(plan, began)

    def _take(
        self,
        plan: StepPlan,
        draws: list[_Draw],
        logits: Tensor | None,
        tokens: Items[int] | None,
    ) -> None:
        """Draw what a step brings now, and count what came true of its guesses."""
        if tokens is not None:
            self._accept(draws, tokens, {})
        elif logits is not None:
            self._draw(draws, logits)
        else:
            self._runner.wait()
        self._accept_guesses(plan)

    def _run_apart(self, plan: StepPlan, error: Exception) -> None:
        """Repeat a step that raised, a sequence at a time; fail those that raise again.

        A sequence that had advanced before the step raised is left as it is.
        """
        _LOG.error("a step failed and is repeated sequence by sequence", exc_info=error)
        self._runner.wait()  # raises where the device itself is lost
        if self._landing is not None:
            row = itertools.count()
            self._settle(
                self._landing,
                [_Draw(s, next(row), s.position + s.in_flight) for s in plan.decodes],
            )
        sequences = [*plan.decodes, *(chunk.sequence for chunk in plan.chunks)]
        for sequence in sequences:
            if sequence.mirostat is not None:
                sequence.mirostat.roll_back()
        for sequence in plan.decodes:
            if sequence.state is SequenceState.RUNNING and sequence.uncomputed == 0:
                self._run_alone(StepPlan([sequence], [], 1, 0), sequence.num_computed - 1)
        for chunk in plan.chunks:
            if chunk.sequence.state is SequenceState.RUNNING:
                self._run_alone(StepPlan([], [chunk], 0, chunk.count), chunk.start)

    def _run_alone(self, plan: StepPlan, start: int) -> None:
        """Compute what a plan holds of its one sequence, from token `start` on."""
        [sequence] = [*plan.decodes, *(chunk.sequence for chunk in plan.chunks)]
        try:
            hidden = self._runner.forward(plan)
            self._steps += 1
            self._score_prompts(plan, hidden)
            draws = self._draws(plan)
            self._take(plan, draws, *self._look_at(draws, hidden))
        except Exception as error:
            self._fail(sequence, start, error)

    def _fail(self, sequence: Sequence, start: int, error: Exception) -> None:
        """Cut the request of a sequence that could not be computed from token `start` on."""
        request = sequence.request
        _LOG.error("request %d failed", request.command.handle, exc_info=error)
        self._runner.wait()
        if sequence.state is SequenceState.RUNNING:
            self._scheduler.invalidate(sequence, start)
        self._requests.break_off(request, error)

    def take_output(self) -> StepOutput:
        """What has happened since the last call."""
        scheduler = self._scheduler
        load = LoadSnapshot(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            queued_tokens=scheduler.queued_tokens,
            free_blocks=scheduler.pool.num_free,
            total_blocks=scheduler.pool.num_blocks,
            preemptions=scheduler.preemptions,
            steps=self._steps,
        )
        return StepOutput(self._requests.take_outputs(), load)

    def apply(self, commands: Iterable[Command]) -> None:
        """Carry out commands, in order."""
        for command in commands:
            self._requests.carry_out(command)

    def check(self) -> None:
        """Raise AssertionError if a block is lost or shared wrongly. For tests."""
        self._scheduler.pool.check([s.blocks for s in self._scheduler.running])

    def _launch(
        self, plan: StepPlan, draws: list[_Draw], logits: Tensor | None, began: float
    ) -> _Flight:
        """Draw on the device; the step is in flight from now on."""
        rows = None
        if logits is None:  # only parts of prompts
            logits, rows = torch.empty((0, 1), device=self._runner.device), []
        elif not all(draw.sequence.request.is_plainly_greedy for draw in draws):
            rows = [self._row(draw) for draw in draws]
        tokens = PendingTokens(logits, rows)
        for draw in draws:
            draw.sequence.in_flight += 1
        return _Flight(plan, draws, tokens, began)

    def _settle(self, flight: _Flight, following: list[_Draw]) -> None:
        """Take the tokens of a step that ran ahead; `following` is what is drawn after them."""
        self._landing = None
        taken, tokens = flight.tokens.wait()
        for draw, guess, token in zip(flight.draws, taken, tokens, strict=True):
            if draw.guess is not None:
                continue  # drawn after a token that turned out to be another one
            if draw.is_next:
                self._requests.append(draw.sequence, token, None)
            if token != guess:
                self._withdraw(draw.sequence, guess, following)
            self._scheduler.settle(draw.sequence)
        self._learn(flight.plan, flight.began)

    def _withdraw(self, sequence: Sequence, guess: int, following: list[_Draw]) -> None:
        """Void what was computed from a guess that was wrong: the right token is computed next."""
        for i, draw in enumerate(following):
            if draw.sequence is sequence:
                following[i] = draw._replace(guess=guess)
                self._scheduler.withdraw(sequence)
                if self._flight is not None:
                    sequence.in_flight -= 1

    def _learn(self, plan: StepPlan, began: float) -> None:
        """What a step took, from when the one before it had run."""
        now = self._clock()
        self._scheduler.learn(plan, now - max(began, self._last_end))
        self._last_end = now

    def _score_prompts(self, plan: StepPlan, hidden: Tensor) -> None:
        """Report the scores of the prompt tokens whose predecessors were computed."""
        end_row = len(plan.decodes)
        for chunk in plan.chunks:
            end_row += chunk.num_outputs
            sequence = chunk.sequence
            end = min(chunk.end + 1, sequence.prompt_length)
            width = sequence.request.command.prompt_logprobs
            if width is not None:
                for start in range(max(sequence.scored, chunk.start + 1), end, SCORED_ROWS):
                    if sequence.state is SequenceState.FINISHED:
                        break  # for want of numbers
                    ids = sequence.tokens[start : min(start + SCORED_ROWS, end)].tolist()
                    row = end_row - chunk.end + start - 1
                    logits = self._runner.logits(hidden, list(range(row, row + len(ids))))
                    handle, prompt = sequence.request.command.handle, sequence.prompt_index
                    scores = score(logits, ids, width)
                    if any(math.isnan(each.logprob) for each in scores):
                        self._requests.fail(sequence.request)
                    else:
                        self._requests.report(ScoredPrompt(handle, prompt, start, ids, scores))
                        sequence.scored = start + len(ids)
            sequence.scored = max(sequence.scored, end)

    def _draws(self, plan: StepPlan) -> list[_Draw]:
        """What may be drawn now that the plan was computed; ends sequences that only score."""
        draws: list[_Draw] = []
        for row, sequence in enumerate(plan.decodes):
            if sequence.state is SequenceState.FINISHED:
                continue  # its request has failed over the scores of a prompt
            if sequence.max_tokens == 0:
                self._requests.finish(sequence, FinishCause.LENGTH)
            else:
                draws.append(_Draw(sequence, row, sequence.position + sequence.in_flight))
        last_row = len(plan.decodes) - 1
        for chunk in plan.chunks:
            last_row += chunk.num_outputs
            sequence = chunk.sequence
            unfinished = chunk.end - len(chunk.draft) < sequence.length
            if unfinished or sequence.state is SequenceState.FINISHED:
                continue
            if sequence.max_tokens == 0:
                self._requests.finish(sequence, FinishCause.LENGTH)
                continue
            row = last_row - len(chunk.draft)
            draws.append(_Draw(sequence, row, sequence.position))
            draws += [
                _Draw(sequence, row + i, sequence.position + i, guess)
                for i, guess in enumerate(chunk.draft, start=1)
            ]
        return draws

    def _look_at(
        self, draws: Items[_Draw], hidden: Tensor
    ) -> tuple[Tensor | None, Items[int] | None]:
        """The logits to draw from; or the most likely tokens, where nothing else is of interest.

        Steps that overlap draw from logits on the device.
        """
        rows = [draw.row for draw in draws]
        if not rows:
            return None, None
        may_search = self._runner.finds_most_likely and not self._overlaps
        if may_search and all(draw.sequence.request.needs_no_logits for draw in draws):
            return None, self._runner.most_likely(hidden, rows)
        return self._runner.logits(hidden, rows), None

    def _draw(self, draws: Items[_Draw], logits: Tensor) -> None:
        """Draw for those that may; the others keep their logits until they may."""
        ready: list[int] = []
        late: dict[Sequence, list[int]] = {}
        for row, draw in enumerate(draws):
            sequence = draw.sequence
            if sequence.state is SequenceState.FINISHED or draw.position < sequence.position:
                continue  # ended, or moved on by forced tokens, while the step ran
            if sequence.may_draw_at(draw.position):
                ready.append(row)
            elif draw.guess is None:
                late[sequence] = [row]
            elif sequence in late:
                late[sequence].append(row)
        if late:
            self._hold(draws, logits, list(late.values()))
        if ready:
            some = logits if len(ready) == len(draws) else logits[ready]
            self._advance([draws[row] for row in ready], some)

    def _hold(self, draws: Items[_Draw], logits: Tensor, late: Items[list[int]]) -> None:
        """Keep a copy of some sequences' rows."""
        kept = logits[[row for mine in late for row in mine]]
        for mine in late:
            held, kept = kept[: len(mine)], kept[len(mine) :]
            self._held.append(_HeldLogits([draws[row] for row in mine], held))
            draws[mine[0]].sequence.held_logits = held

    def _accept_guesses(self, plan: StepPlan) -> None:
        """Count what was computed for guesses that turned out right."""
        for chunk in plan.chunks:
            if chunk.draft and chunk.sequence.held_logits is None:
                self._scheduler.accept(chunk.sequence, chunk.draft)

    def _draw_held(self) -> None:
        """Draw for sequences that may, now that their logits were computed in an earlier step."""
        # those preempted, ended or moved on in the meantime have lost their logits
        late = [each for each in self._held if each.sequence.held_logits is each.logits]
        self._held = [each for each in late if not each.sequence.may_draw]
        ready = [each for each in late if each.sequence.may_draw]
        draws: list[_Draw] = []
        logits: list[Tensor] = []
        for each in ready:
            allowed = [d for d in each.draws if each.sequence.may_draw_at(d.position)]
            draws += allowed
            logits.append(each.logits[: len(allowed)])
        if ready:
            try:
                self._advance(draws, torch.cat(logits))
            except Exception as error:
                if not self._isolates:
                    raise
                self._draw_held_apart(ready, error)
        for each in ready:
            guesses = [draw.guess for draw in each.draws if draw.guess is not None]
            if guesses:
                self._scheduler.accept(each.sequence, guesses)

    def _draw_held_apart(self, ready: Items[_HeldLogits], error: Exception) -> None:
        """Repeat a draw that raised, a sequence at a time; fail those that raise again."""
        _LOG.error("a draw failed and is repeated sequence by sequence", exc_info=error)
        for each in ready:
            if each.sequence.held_logits is not each.logits:
                continue  # it had drawn before the others failed
            if each.sequence.mirostat is not None:
                each.sequence.mirostat.roll_back()
            allowed = [d for d in each.draws if each.sequence.may_draw_at(d.position)]
            try:
                self._advance(allowed, each.logits[: len(allowed)])
            except Exception as failure:
                self._fail(each.sequence, each.sequence.num_computed, failure)

    def _tell_guesses(self) -> None:
        """Report guesses of constrained sequences: the next step needs the masks along them."""
        for sequence, draft in self._scheduler.report_drafts():
            handle = sequence.request.command.handle
            self._requests.report(Guessed(handle, sequence.index, list(draft)))

    def _advance(self, draws: Items[_Draw], logits: Tensor) -> None:
        """Draw tokens, report them, and end the sequences that they end.

        logits: float32 [draws, vocabulary].
        """
        rows: list[Row] = []
        if all(draw.sequence.request.is_plainly_greedy for draw in draws):
            tokens = argmax(logits)
        else:
            rows = [self._row(draw) for draw in draws]
            tokens = sample(logits, rows)
        scores = self._scores(draws, logits, tokens)
        tokens = reject_nan(logits, tokens)
        for i, row in enumerate(rows):
            if row.allows_nothing:
                tokens[i] = NOTHING_ALLOWED
        self._accept(draws, tokens, scores)

    def _accept(self, draws: Items[_Draw], tokens: Items[int], scores: Mapping[int, Score]) -> None:
        """Report what was drawn, with the scores of some rows, and end what it ends.

        A token below 0 is none: the model computed no number, or the request allows none.
        """
        for i, (draw, token) in enumerate(zip(draws, tokens, strict=True)):
            if not draw.is_next:
                continue
            if token == NOTHING_ALLOWED:
                self._requests.contradict(draw.sequence.request)
            elif token < 0:
                self._requests.fail(draw.sequence.request)
            else:
                self._requests.append(draw.sequence, token, scores.get(i))
        for draw in draws:
            draw.sequence.drop_draft_masks()

    def _scores(self, draws: Items[_Draw], logits: Tensor, tokens: Items[int]) -> dict[int, Score]:
        """What was drawn, scored where that was asked for; by row."""
        widths = [draw.sequence.request.command.logprobs for draw in draws]
        scores: dict[int, Score] = {}
        for width in {width for width in widths if width is not None}:
            rows = [i for i, each in enumerate(widths) if each == width]
            found = score(logits[rows], [tokens[i] for i in rows], width)
            scores.update(zip(rows, found, strict=True))
        return scores

    def _row(self, draw: _Draw) -> Row:
        sequence, stopping = draw.sequence, draw.sequence.request.command.stopping
        banned: tuple[int, ...] = ()
        if draw.position < stopping.min_tokens:
            eos = () if stopping.ignore_eos else self._limits.eos_token_ids
            banned = (*eos, *stopping.stop_token_ids)
        if sequence.penalties is not None:
            sequence.penalties.update(sequence.tokens)
        sampling = sequence.request.command.sampling
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
