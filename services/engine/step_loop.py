"""The step loop: take commands, schedule, run, draw, report. Owns every sequence and KV block."""

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from services.engine.messages import (
    AddRequest,
    Admitted,
    CacheFlushed,
    CancelRequest,
    Command,
    FinishCause,
    Finished,
    FlushCache,
    GrantCredit,
    Guessed,
    LoadSnapshot,
    Mask,
    Output,
    Refused,
    RequestDone,
    Score,
    ScoredPrompt,
    SetMasks,
    StepOutput,
    Stop,
    Token,
)
from services.engine.model_runner import Drawn, ModelRunner
from services.engine.sampling import Ahead, Row, argmax, sample, score
from services.engine.scheduler import Scheduler, StepPlan
from services.engine.sequence import Request, Sequence, SequenceState

__all__ = ["LoopLimits", "StepLoop"]

_SCORED_ROWS = 256
"""Prompt rows whose logits exist at once"""


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """What requests may ask of this model."""

    eos_token_ids: frozenset[int]
    max_waiting: int
    """Sequences that may wait"""
    starvation_seconds: float = 30.0
    """How long a sequence may hold its blocks without credit"""


class _Draw(NamedTuple):
    """One row of logits that a sequence may draw its next token from."""

    sequence: Sequence
    row: int
    """Of the step's hidden states"""
    position: int
    """Of the token to draw, counted from the end of the original prompt"""
    guess: int | None = None
    """The token before it, if that was only guessed when the row was computed"""

    @property
    def runs_ahead(self) -> bool:
        """Whether it can be drawn before the token in front of it is here."""
        return self.sequence.runs_ahead and self.sequence.may_draw

    @property
    def is_next(self) -> bool:
        """Whether the sequence has come to this position, and by the token that was guessed."""
        sequence = self.sequence
        if sequence.state is SequenceState.FINISHED or sequence.position != self.position:
            return False
        return self.guess is None or int(sequence.tokens[-1]) == self.guess


class _Late(NamedTuple):
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
    tokens: Ahead
    began: float

    @property
    def drawn(self) -> Drawn | None:
        """The newest tokens of its sequences, where the next step finds them."""
        if not self.draws:
            return None
        return Drawn(self.tokens.taken, {draw.sequence: i for i, draw in enumerate(self.draws)})


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
    ) -> None:
        """overlaps: launch a step before the tokens of the last one are here; not where tokens are
        guessed, because guesses need them."""
        self._scheduler = scheduler
        self._runner = runner
        self._limits = limits
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._outputs: list[Output] = []
        self._late: list[_Late] = []
        """What keeps its logits until a mask comes, or credit"""
        self._overlaps = overlaps and not scheduler.limits.speculate
        self._flight: _Flight | None = None
        self._last_end = -math.inf
        """When the last step had run"""
        self._steps = 0
        self.progressed = False
        """Whether the last step computed anything"""
        self.stopped = False

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
        self._cut_starved()
        began = self._clock()
        plan = self._scheduler.plan()
        before, self._flight = self._flight, None
        self.progressed = not plan.is_empty or before is not None
        if not plan.is_empty:
            self._note_started(plan)
            hidden = self._runner.forward(plan, before.drawn if before is not None else None)
            self._steps += 1
            self._score_prompts(plan, hidden)
            draws = self._draws(plan)
            logits = self._runner.logits(hidden, [draw.row for draw in draws]) if draws else None
            if self._overlaps and all(draw.runs_ahead for draw in draws):
                self._flight = self._launch(plan, draws, logits, began)
            self.apply(receive())
            if before is not None:
                self._settle(before, draws)
            if self._flight is None:
                if logits is not None:
                    self._draw(draws, logits)
                else:
                    self._runner.wait()
                self._accept_guesses(plan)
                self._learn(plan, began)
        elif before is not None:
            self._settle(before, [])
        self._draw_late()
        self._tell_guesses()
        return self.take_output()

    def take_output(self) -> StepOutput:
        """What has happened since the last call."""
        outputs, self._outputs = self._outputs, []
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
        return StepOutput(outputs, load)

    def apply(self, commands: Iterable[Command]) -> None:
        """Carry out commands, in order."""
        for command in commands:
            match command:
                case AddRequest():
                    self._add(command)
                case CancelRequest():
                    self._cancel(command)
                case GrantCredit():
                    self._grant(command)
                case SetMasks():
                    for mask in command.masks:
                        self._set_mask(mask)
                case FlushCache():
                    self._outputs.append(CacheFlushed(self._scheduler.pool.flush()))
                case Stop():
                    self.stopped = True

    def check(self) -> None:
        """Raise AssertionError if a block is lost or shared wrongly. For tests."""
        self._scheduler.pool.check([s.blocks for s in self._scheduler.running])

    # Commands.

    def _add(self, command: AddRequest) -> None:
        room = [command.stopping.context_length - len(prompt) for prompt in command.prompts]
        max_tokens = [min(command.stopping.max_tokens, r) for r in room]
        refused = self._refusal(command, max_tokens)
        if refused is not None:
            self._outputs.append(refused)
            return
        request = Request(command)
        resumed = {resume.sequence: resume for resume in command.resume}
        position = len(self._scheduler.waiting)
        cached = [0] * len(command.prompts)
        for index in range(len(command.prompts) * command.n):
            prompt = index // command.n
            sequence = Sequence(
                request,
                index,
                command.prompts[prompt],
                resumed.get(index),
                max_tokens[prompt],
                self._scheduler.limits.block_size,
            )
            request.sequences.append(sequence)
            cached[prompt] = max(cached[prompt], self._scheduler.add(sequence))
        request.unfinished = len(request.sequences)
        self._requests[command.handle] = request
        self._outputs.append(Admitted(command.handle, max_tokens, cached, position))
        for sequence in request.sequences:
            if sequence.position:
                self._end_if_done(sequence, sequence.newest)

    def _refusal(self, command: AddRequest, max_tokens: Items[int]) -> Refused | None:
        waiting, count = len(self._scheduler.waiting), len(command.prompts) * command.n
        if waiting and waiting + count > self._limits.max_waiting:
            message = f"{waiting} sequences wait already; try again."
            return Refused(command.handle, "RESOURCE_EXHAUSTED", "QUEUE_FULL", message, 1.0)
        for prompt, most in zip(command.prompts, max_tokens, strict=True):
            if not self._scheduler.fits(len(prompt) + most):
                size = self._scheduler.limits.block_size * self._scheduler.pool.num_blocks
                message = (
                    f"{len(prompt)} prompt tokens and {most} to generate can never fit: the KV "
                    f"cache holds {size} tokens."
                )
                return Refused(command.handle, "OUT_OF_RANGE", "KV_CACHE_TOO_SMALL", message)
        return None

    def _cancel(self, command: CancelRequest) -> None:
        request = self._requests.get(command.handle)
        if request is None:
            return
        for index in command.sequences or range(len(request.sequences)):
            if request.sequences[index].state is not SequenceState.FINISHED:
                self._finish(request.sequences[index], FinishCause.CANCELLED)

    def _grant(self, command: GrantCredit) -> None:
        request = self._requests.get(command.handle)
        for sequence in request.sequences if request else ():
            if sequence.credit is not None:
                sequence.credit += command.tokens
                sequence.starved_since = None
                self._append_forced(sequence)

    def _set_mask(self, mask: Mask) -> None:
        request = self._requests.get(mask.handle)
        if request is None:
            return
        sequence = request.sequences[mask.sequence]
        # it may have drawn some of what the mask forces by an older one, of a service since lost
        current = mask.position <= sequence.position <= mask.end
        if sequence.state is SequenceState.FINISHED or not current:
            return
        sequence.mask = mask
        if sequence.is_at_end:
            self._finish(sequence, FinishCause.GRAMMAR)
        else:
            self._append_forced(sequence)

    def _append_forced(self, sequence: Sequence) -> None:
        """Append what the mask leaves no choice about, which takes no logits.

        Where scores are asked for it is drawn like the rest: they are made of logits.
        """
        scores = sequence.request.command.logprobs is not None
        if scores or sequence.scored < sequence.prompt_length or sequence.max_tokens == 0:
            return
        for token in sequence.forced:
            if sequence.state is SequenceState.FINISHED or sequence.credit == 0:
                return
            if sequence.mirostat is not None:
                sequence.mirostat.observe(0.0)  # what is certain surprises nobody
            self._append(sequence, token, None)

    # What a step brings.

    def _note_started(self, plan: StepPlan) -> None:
        now = self._clock()
        for chunk in plan.chunks:
            request = chunk.sequence.request
            if request.started is None:
                request.started = now

    def _launch(
        self, plan: StepPlan, draws: list[_Draw], logits: Tensor | None, began: float
    ) -> _Flight:
        """Draw on the device; the step is in flight from now on."""
        rows = None
        if logits is None:  # only parts of prompts
            logits, rows = torch.empty((0, 1), device=self._runner.device), []
        elif not all(draw.sequence.is_plainly_greedy for draw in draws):
            rows = [self._row(draw) for draw in draws]
        for draw in draws:
            draw.sequence.in_flight += 1
        return _Flight(plan, draws, Ahead(logits, rows), began)

    def _settle(self, flight: _Flight, following: list[_Draw]) -> None:
        """Take the tokens of a step that ran ahead; `following` is what is drawn after them."""
        taken, tokens = flight.tokens.wait()
        for draw, guess, token in zip(flight.draws, taken, tokens, strict=True):
            if draw.guess is not None:
                continue  # drawn after a token that turned out to be another one
            if draw.is_next:
                self._append(draw.sequence, token, None)
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
        first_row = len(plan.decodes)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            end = min(chunk.end + 1, sequence.prompt_length)
            width = sequence.request.command.prompt_logprobs
            if width is not None:
                for start in range(max(sequence.scored, chunk.start + 1), end, _SCORED_ROWS):
                    ids = sequence.tokens[start : min(start + _SCORED_ROWS, end)].tolist()
                    row = first_row + start - 1 - chunk.start
                    logits = self._runner.logits(hidden, list(range(row, row + len(ids))))
                    handle, prompt = sequence.request.command.handle, sequence.prompt_index
                    scores = score(logits, ids, width)
                    self._outputs.append(ScoredPrompt(handle, prompt, start, ids, scores))
            sequence.scored = max(sequence.scored, end)
            first_row += chunk.count

    def _draws(self, plan: StepPlan) -> list[_Draw]:
        """What may be drawn now that the plan was computed; ends sequences that only score."""
        draws: list[_Draw] = []
        for row, sequence in enumerate(plan.decodes):
            if sequence.max_tokens == 0:
                self._finish(sequence, FinishCause.LENGTH)
            else:
                draws.append(_Draw(sequence, row, sequence.position + sequence.in_flight))
        last_row = len(plan.decodes) - 1
        for chunk in plan.chunks:
            last_row += chunk.count
            sequence = chunk.sequence
            if chunk.end - len(chunk.draft) < sequence.length:
                continue
            if sequence.max_tokens == 0:
                self._finish(sequence, FinishCause.LENGTH)
                continue
            row = last_row - len(chunk.draft)
            draws.append(_Draw(sequence, row, sequence.position))
            draws += [
                _Draw(sequence, row + i, sequence.position + i, guess)
                for i, guess in enumerate(chunk.draft, start=1)
            ]
        return draws

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
        """Keep some sequences' rows, but not the logits of a whole step for the sake of a few."""
        rows = [row for mine in late for row in mine]
        kept = logits if len(rows) == len(draws) else logits[rows]
        for mine in late:
            held, kept = kept[: len(mine)], kept[len(mine) :]
            self._late.append(_Late([draws[row] for row in mine], held))
            draws[mine[0]].sequence.held_logits = held

    def _accept_guesses(self, plan: StepPlan) -> None:
        """Count what was computed for guesses that turned out right."""
        for chunk in plan.chunks:
            if chunk.draft and chunk.sequence.held_logits is None:
                self._scheduler.accept(chunk.sequence, chunk.draft)

    def _draw_late(self) -> None:
        """Draw for sequences that may, now that their logits were computed in an earlier step."""
        # those preempted, ended or moved on in the meantime have lost their logits
        late = [each for each in self._late if each.sequence.held_logits is each.logits]
        self._late = [each for each in late if not each.sequence.may_draw]
        ready = [each for each in late if each.sequence.may_draw]
        draws: list[_Draw] = []
        logits: list[Tensor] = []
        for each in ready:
            allowed = [d for d in each.draws if each.sequence.may_draw_at(d.position)]
            draws += allowed
            logits.append(each.logits[: len(allowed)])
        if ready:
            self._advance(draws, torch.cat(logits))
        for each in ready:
            guesses = [draw.guess for draw in each.draws if draw.guess is not None]
            if guesses:
                self._scheduler.accept(each.sequence, guesses)

    def _tell_guesses(self) -> None:
        """Report guesses of constrained sequences: the next step needs the masks along them."""
        for sequence in self._scheduler.guess_ahead():
            _, guesses = sequence.guesses
            handle = sequence.request.command.handle
            self._outputs.append(Guessed(handle, sequence.index, list(guesses)))

    def _advance(self, draws: Items[_Draw], logits: Tensor) -> None:
        """Draw tokens, report them, and end the sequences that they end.

        logits: float32 [draws, vocabulary].
        """
        if all(draw.sequence.is_plainly_greedy for draw in draws):
            tokens = argmax(logits)
        else:
            tokens = sample(logits, [self._row(draw) for draw in draws])
        scores = self._scores(draws, logits, tokens)
        for i, (draw, token) in enumerate(zip(draws, tokens, strict=True)):
            if draw.is_next:
                self._append(draw.sequence, token, scores.get(i))
        for draw in draws:
            draw.sequence.leave_guesses()

    def _append(self, sequence: Sequence, token: int, score: Score | None) -> None:
        """Append a token, report it, and end the sequence if it ends it."""
        request, position = sequence.request, sequence.position
        if request.first_token is None:
            request.first_token = self._clock()
        sequence.append(token)
        if sequence.credit is not None:
            sequence.credit -= 1
            if sequence.credit == 0:
                sequence.starved_since = self._clock()
        mu = sequence.mirostat.mu if sequence.mirostat is not None else None
        self._outputs.append(
            Token(request.command.handle, sequence.index, position, token, score, mu)
        )
        self._end_if_done(sequence, token)

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
            sequence.penalties.follow(sequence.tokens)
        return Row(
            sequence.request.command.sampling,
            sequence.index,
            draw.position,
            banned,
            sequence.mask.allows_at(draw.position) if sequence.mask is not None else None,
            sequence.penalties,
            sequence.mirostat,
        )

    def _end_if_done(self, sequence: Sequence, token: int) -> None:
        stopping = sequence.request.command.stopping
        if token in stopping.stop_token_ids:
            self._finish(sequence, FinishCause.STOP_TOKEN, token)
        elif token in self._limits.eos_token_ids and not stopping.ignore_eos:
            self._finish(sequence, FinishCause.EOS, token)
        elif sequence.position >= sequence.max_tokens:
            self._finish(sequence, FinishCause.LENGTH)
        elif sequence.is_at_end:
            self._finish(sequence, FinishCause.GRAMMAR)

    def _finish(self, sequence: Sequence, cause: FinishCause, token: int | None = None) -> None:
        """End a sequence, and its request with its last one."""
        self._scheduler.remove(sequence)
        request, handle = sequence.request, sequence.request.command.handle
        self._outputs.append(Finished(handle, sequence.index, cause, token, sequence.position))
        request.unfinished -= 1
        if request.unfinished == 0:
            del self._requests[handle]
            self._outputs.append(self._done(request))

    def _done(self, request: Request) -> RequestDone:
        command, now = request.command, self._clock()
        started = request.started if request.started is not None else now
        # forced tokens may come before anything is computed
        first = max(request.first_token, started) if request.first_token is not None else now
        # the first choice of each prompt tells what was reused; the others share what it computed
        firsts = request.sequences[:: command.n]
        return RequestDone(
            handle=command.handle,
            prompt_tokens=sum(len(prompt) for prompt in command.prompts),
            completion_tokens=sum(s.position for s in request.sequences),
            cached_tokens=sum(s.cached_tokens or 0 for s in firsts),
            queue_seconds=started - command.arrival,
            prefill_seconds=first - started,
            decode_seconds=now - first,
        )

    def _cut_starved(self) -> None:
        """Cut requests that have had no credit for too long; their blocks are needed."""
        limit = self._clock() - self._limits.starvation_seconds
        starved = {
            s.request.command.handle: s.request
            for s in self._scheduler.running
            if s.starved_since is not None and s.starved_since < limit
        }
        for handle, request in starved.items():
            for sequence in request.sequences:
                if sequence.state is not SequenceState.FINISHED:
                    self._scheduler.remove(sequence)
            del self._requests[handle]
            message = f"No credit for {self._limits.starvation_seconds:g} s: the client is stalled."
            self._outputs.append(Refused(handle, "RESOURCE_EXHAUSTED", "STALLED", message))
