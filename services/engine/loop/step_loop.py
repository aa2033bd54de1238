"""Step loop, which takes commands, plans a step, computes it, draws tokens and reports them."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from services.engine.batch.transfer import Mark
from services.engine.execution.batch_builder import DeviceTokens
from services.engine.execution.draft_model import DraftModel
from services.engine.execution.model_runner import ModelRunner
from services.engine.loop import refusals
from services.engine.loop.beam_draws import BeamDraws
from services.engine.loop.draft_maker import DraftMaker
from services.engine.loop.draws import Draw, HeldLogits, LaunchedDraws
from services.engine.loop.load import load_of
from services.engine.loop.prompt_pooling import PromptPooling
from services.engine.loop.request_table import LoopLimits, RequestTable
from services.engine.loop.step_in_flight import StepInFlight
from services.engine.loop.step_sampler import PromptResults, StepSampler
from services.engine.messages import (
    AdapterLoaded,
    Command,
    LoadAdapter,
    SetEncoding,
    StepOutput,
    UnloadAdapter,
)
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.pooler import Pooler
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import SequenceState, TokenSequence
from services.engine.scheduling.step_plan import StepPlan

__all__ = ["StepLoop"]

_LOG = logging.getLogger("loop")
_SPARE_SHARE = 0.9
"""Share of a step's time for which the next one may wait for masks"""


class StepLoop:
    """Continuous batching, one step at a time.

    With overlap, the loop launches a step before it takes the tokens of the previous step: the step
    reads them on the device, and the host sees them a step later. Tokens are drawn as early as
    possible. A draw that depends on its row of logits alone is launched with its step. For other
    draws, the logits are held: a draw with penalties or mirostat is launched once the host has the
    token in front, and a constrained draw once its mask has come. Both happen while the device
    computes, so that the sequence still joins the next step. If a mask comes later, only its
    sequence misses that step. Drafts follow from tokens on the host: where they are due, the loop
    takes the tokens of the step in flight before it plans the next one.

    A sequence that has ended meanwhile still has a row in the next step, whose result is dropped.
    Its blocks are free at once nevertheless, because a step that reuses them is launched later, and
    so writes later.
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
        pooler: Pooler | None = None,
        draft: DraftModel | None = None,
    ) -> None:
        """overlaps: launch a step before the tokens of the previous step are on the host, as long
        as no draft depends on them.

        isolates: repeat a step that raises sequence by sequence, and fail only the requests that
        raise again. This is impossible with several ranks, which wait in the middle of the step.
        pooler: makes vectors of prompts; None = no request asks for them. draft: makes draft tokens
        as the scheduler plans them; None = no model does.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._overlaps = overlaps
        self._drafts = DraftMaker(scheduler.drafter, draft)
        self._isolates = isolates
        self._requests = RequestTable(scheduler, limits, clock)
        self._sampler = StepSampler(
            runner,
            self._requests,
            limits.eos_token_ids,
            needs_logits=self._overlaps,
            pooling=None if pooler is None else PromptPooling(pooler, runner),
        )
        self._beams = BeamDraws(scheduler, runner, self._requests, self._sampler)
        self._in_flight: StepInFlight | None = None
        """Present step, if it stays in flight"""
        self._previous: StepInFlight | None = None
        """Previous step, until its tokens are taken"""
        self._last_end = -math.inf
        """Time when the last step was complete"""
        self._launch_seconds = 0.0
        """Seconds that the host took to launch the last step"""
        self._decode_seconds = 0.0
        """Duration of the last step without prompts, in seconds"""
        self._steps = 0
        self._progressed = False
        """True if the last step computed anything"""
        self.had_prompts = False
        """True if the last step computed prompts"""
        self.encoder_works = False
        """True while the image encoder needs a share of the cores"""

    @property
    def is_idle(self) -> bool:
        return not self._requests

    @property
    def progressed(self) -> bool:
        """True if the last step computed anything, or left results to send."""
        return self._progressed or self._requests.is_delivering

    @property
    def reads_adapters(self) -> bool:
        """True while adapters are read and steps run."""
        return self._runner.reads_adapters

    @property
    def spare_seconds(self) -> float:
        """Seconds that the next step may wait for masks without a pause of the device.

        The value is above 0 only if a mask is missing while a step is in flight. It leaves as much
        time for the next launch as the last one took. A share below 1 lets the estimate sink after
        a late step.
        """
        step = self._in_flight
        if step is None or not self._sampler.awaits_masks:
            return 0.0
        end = max(step.started, self._last_end) + _SPARE_SHARE * self._decode_seconds
        return max(end - self._launch_seconds - self._clock(), 0.0)

    def step(self, receive: Callable[[], Iterable[Command]]) -> StepOutput:
        """Take commands, plan a step, compute it, draw, and report.

        receive: returns the commands that have come. The loop calls it before it plans the step,
        and again while the step runs, because masks come meanwhile.
        """
        self.apply(receive())
        for number in self._runner.ready_adapters():
            self._requests.report(self._insert_adapter(number))
        self._requests.cut_starved()
        started = self._clock()
        if self._overlaps:
            self._launch_held(started)
        has_landed = self._land()
        if self._drafts.make(constrained=False):
            started = self._clock()
        plan = self._scheduler.plan(started)
        self.had_prompts = bool(plan.chunks)
        if plan.is_empty and self._in_flight is not None and not self._in_flight.has_results:
            self._in_flight.plan = None  # it waits for masks, so its duration shows no cost
            self._progressed = False
            return self.take_output()
        self._previous, self._in_flight = self._in_flight, None
        self._progressed = has_landed or not plan.is_empty or self._previous is not None
        if not plan.is_empty:
            self._requests.note_started(chunk.sequence for chunk in plan.chunks)
            self._run_isolated(plan, started, receive)
        elif self._previous is not None:
            self._complete(self._previous, [], [])
        if not self._overlaps:
            self._draw_held()
        self._report_drafts()
        return self.take_output()

    def _report_drafts(self) -> None:
        for draft in self._drafts.report():
            self._requests.report(draft)

    def apply(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case SetEncoding():
                    self.encoder_works = command.encodes
                case LoadAdapter():
                    self._runner.read_adapter(command.number, Path(command.path))
                case UnloadAdapter():
                    self._runner.unload_adapter(command.number)
                case _:
                    self._requests.carry_out(command)

    def _insert_adapter(self, number: int) -> AdapterLoaded:
        try:
            return AdapterLoaded(number, self._runner.insert_adapter(number))
        except CheckpointError as error:
            return AdapterLoaded(number, 0, str(error))

    def take_output(self) -> StepOutput:
        """Return the outputs since the last call, and the load."""
        load = load_of(self._scheduler, self._runner, self._steps)
        outputs = self._requests.take_outputs()
        return StepOutput(outputs, load, self._scheduler.caches.take_changes())

    def check(self) -> None:
        """Raise AssertionError if a block or a state is lost or shared wrongly. For tests."""
        self._scheduler.caches.check(self._scheduler.running)

    def _run(
        self, plan: StepPlan, started: float, receive: Callable[[], Iterable[Command]]
    ) -> None:
        """Compute a plan, and draw its tokens now or leave the step in flight."""
        if self._overlaps:
            self._launch(plan, started, receive)
            return
        computed = self._compute(plan)
        self.apply(receive())
        self._draw(plan, *computed)
        self._record_duration(plan, started)

    def _compute(self, plan: StepPlan) -> tuple[list[Draw], Tensor | None, Sequence[int] | None]:
        """Compute a plan and score its prompts. Returns its draws with their logits or tokens."""
        hidden, draws = self._forward(plan)
        self._sampler.report_results(self._sampler.take_results())
        return draws, *self._sampler.compute(draws, hidden)

    def _forward(
        self, plan: StepPlan, drawn: DeviceTokens | None = None
    ) -> tuple[Tensor, list[Draw]]:
        """Compute a plan. Returns its hidden states, and the draws from them."""
        wanted = self._drafts.wants_states(plan)
        keeps = wanted is None or bool(wanted)
        hidden = self._runner.forward(plan, drawn, taps=keeps)
        if keeps:
            self._drafts.keep_states(plan, self._runner.tapped(plan), wanted)
        self._steps += 1
        self._sampler.score_prompts(plan, hidden)
        return hidden, self._sampler.draws(plan)

    def _draw(
        self,
        plan: StepPlan,
        draws: list[Draw],
        logits: Tensor | None,
        tokens: Sequence[int] | None,
    ) -> None:
        """Draw the tokens of a step, and accept the draft tokens that it has verified."""
        if tokens is not None:
            self._sampler.append(draws, tokens, {})
        elif logits is not None:
            self._sampler.draw(draws, logits)
        else:
            self._runner.wait()
        for chunk in plan.chunks:
            if chunk.draft and chunk.sequence.logits_hold is None:
                self._scheduler.accept(chunk.sequence, chunk.draft)

    def _draw_held(self) -> None:
        """Draw tokens of sequences whose mask or credit came after their step, and of beams."""
        self._draw_beams()
        ready = self._sampler.take_ready()
        self._sampler.shrink_held()
        if not ready:
            return
        try:
            self._sampler.draw_held(ready)
        except Exception as error:
            if not self._isolates:
                raise
            self._draw_held_isolated(ready, error)
        self._accept_drafts(ready)

    def _draw_beams(self) -> None:
        """Advance the searches all of whose beams have logits. The host waits for the device."""
        searches = self._sampler.take_beams()
        if searches and self._in_flight is not None:
            # the scores of its prompts come before the end of a search
            step, self._in_flight = self._in_flight, None
            self._complete(step, [], [])
        for beams in searches:
            if not all(held.is_valid for held in beams):
                continue  # another search of the request has failed
            try:
                self._beams.advance(beams)
            except Exception as error:
                if not self._isolates:
                    raise
                sequence = beams[0].sequence
                self._fail(sequence, sequence.num_computed, error)

    def _accept_drafts(self, drawn: Iterable[HeldLogits]) -> None:
        """Accept draft tokens that held logits have verified."""
        for held in drawn:
            if held.draft:
                self._scheduler.accept(held.sequence, held.draft)

    def _record_duration(self, plan: StepPlan, started: float) -> None:
        """Report a step's duration to the scheduler, measured from the end of the previous step."""
        now = self._clock()
        seconds = now - max(started, self._last_end)
        self._scheduler.learn(plan, seconds)
        if not plan.chunks:
            self._decode_seconds = seconds
        self._last_end = now

    # Steps in flight.

    def _launch(
        self, plan: StepPlan, started: float, receive: Callable[[], Iterable[Command]]
    ) -> None:
        """Launch a step, take the tokens of the previous one, and leave the step in flight."""
        previous = self._previous
        hidden, draws = self._forward(plan, None if previous is None else previous.drawn)
        logits, _ = self._sampler.compute(draws, hidden)
        end = Mark(self._runner.device)
        drafted = {chunk.sequence for chunk in plan.chunks if chunk.draft}
        launched, held, held_logits = self._sampler.launch_step(draws, logits, drafted)
        self._in_flight = StepInFlight(plan, started, end, self._sampler.take_results(), launched)
        self._count_in_flight(launched)
        self._launch_seconds = self._clock() - started
        self.apply(receive())
        if previous is not None:
            self._complete(previous, launched, held)
        if held_logits is not None:
            self._sampler.hold(held, held_logits)

    def _launch_held(self, started: float) -> None:
        """Launch the draws whose mask, credit or preceding token has come since their step."""
        self._draw_beams()
        ready = self._sampler.take_ready()
        self._sampler.shrink_held()
        if not ready:
            return
        try:
            launched = self._sampler.launch_held(ready)
        except Exception as error:
            if not self._isolates:
                raise
            self._draw_held_isolated(ready, error)
            self._accept_drafts(ready)
            return
        self._count_in_flight(launched)
        if self._in_flight is None:
            end = Mark(self._runner.device)
            self._in_flight = StepInFlight(None, started, end, PromptResults([], [], []), [])
        self._in_flight.launched += launched

    def _count_in_flight(self, launched: Iterable[LaunchedDraws]) -> None:
        for each in launched:
            if not each.held:
                for draw in each.draws:
                    draw.sequence.in_flight += 1

    def _land(self) -> bool:
        """Take the results of the step in flight if drafts depend on them. Return whether it did.

        The device then waits for the next launch.
        """
        step = self._in_flight
        if step is None or not (step.verifies_drafts or self._drafts.await_tokens()):
            return False
        self._in_flight = None
        self._complete(step, [], [])
        self._report_drafts()
        return True

    def _complete(
        self, step: StepInFlight, next_launched: Sequence[LaunchedDraws], next_held: list[Draw]
    ) -> None:
        """Take the results of a step in flight.

        next_launched, next_held: launched and held draws of the step after it.
        """
        self._previous = None
        step.end.wait()
        self._sampler.report_results(step.results)
        for launched in step.launched:
            if launched.held:
                self._verify(launched)
            else:
                self._settle(launched, next_launched, next_held)
        if step.plan is not None:
            self._record_duration(step.plan, step.started)

    def _settle(
        self, launched: LaunchedDraws, next_launched: Sequence[LaunchedDraws], next_held: list[Draw]
    ) -> None:
        """Append tokens with which their sequences have already continued on the device."""
        arrived = launched.tokens.wait()
        self._sampler.append(launched.draws, arrived.final, arrived.scores)
        for draw, assumption, token in zip(
            launched.draws, arrived.provisional, arrived.final, strict=True
        ):
            if draw.assumed is not None:
                continue  # the draw followed a token that turned out wrong
            if 0 <= token != assumption:
                self._withdraw(draw.sequence, assumption, next_launched, next_held)
            self._scheduler.settle(draw.sequence)

    def _verify(self, launched: LaunchedDraws) -> None:
        """Append tokens that sequences have waited for, and accept their draft tokens."""
        valid = [held for held in launched.held if held.is_valid]
        if valid:
            self._sampler.append_held(launched, {held.sequence for held in valid})
            self._accept_drafts(valid)

    def _withdraw(
        self,
        sequence: TokenSequence,
        assumption: int,
        next_launched: Sequence[LaunchedDraws],
        next_held: list[Draw],
    ) -> None:
        """Discard the row that was computed from a wrong token. The next step computes it again."""
        for draws in (next_held, *(launched.draws for launched in next_launched)):
            for i, draw in enumerate(draws):
                if draw.sequence is sequence:
                    draws[i] = replace(draw, assumed=assumption)
                    self._scheduler.withdraw(sequence)
                    if draws is not next_held:
                        sequence.in_flight -= 1

    # Failed steps.

    def _run_isolated(
        self, plan: StepPlan, started: float, receive: Callable[[], Iterable[Command]]
    ) -> None:
        """Run a step; if it raises, repeat it sequence by sequence and fail those that raise again.

        A sequence that advanced before the step raised stays as it is.
        """
        try:
            self._run(plan, started, receive)
        except (OSError, EOFError):
            raise  # the gRPC process is gone
        except Exception as error:
            if not self._isolates or self._in_flight is not None:
                raise
            _LOG.error("a step failed and is repeated sequence by sequence", exc_info=error)
            self._repeat(plan)

    def _repeat(self, plan: StepPlan) -> None:
        self._runner.wait()  # raises if the device itself is lost
        self._runner.release_memory()
        self._scheduler.uncache(plan)
        if self._previous is not None:
            row = itertools.count()
            following = [Draw(s, next(row), s.position + s.in_flight) for s in plan.decodes]
            self._complete(self._previous, [], following)
        self._sampler.report_results(self._sampler.take_results())
        for sequence in [*plan.decodes, *(chunk.sequence for chunk in plan.chunks)]:
            if sequence.mirostat is not None:
                sequence.mirostat.roll_back()
        for sequence in plan.decodes:
            if sequence.state is SequenceState.RUNNING and sequence.uncomputed == 0:
                start = sequence.num_computed - 1
                self._run_alone(sequence, StepPlan([sequence], [], 1, 0), start)
        for chunk in plan.chunks:
            if chunk.sequence.state is SequenceState.RUNNING:
                alone = StepPlan([], [chunk], 0, chunk.count)
                self._run_alone(chunk.sequence, alone, chunk.start)

    def _run_alone(self, sequence: TokenSequence, plan: StepPlan, start: int) -> None:
        """Run a plan of one sequence, which computes its tokens from `start` on."""
        try:
            self._draw(plan, *self._compute(plan))
        except Exception as error:
            self._fail(sequence, start, error)

    def _draw_held_isolated(self, ready: Sequence[HeldLogits], error: Exception) -> None:
        """Repeat a failed draw sequence by sequence, and fail the sequences that raise again."""
        _LOG.error("a draw failed and is repeated sequence by sequence", exc_info=error)
        for held in ready:
            if not held.is_valid:
                continue  # it drew before another sequence raised
            if held.sequence.mirostat is not None:
                held.sequence.mirostat.roll_back()
            try:
                self._sampler.advance(*held.allowed)
            except Exception as failure:
                self._fail(held.sequence, held.sequence.num_computed, failure)

    def _fail(self, sequence: TokenSequence, start: int, error: Exception) -> None:
        """Abort the request of a sequence whose tokens from `start` on raised an exception."""
        handle = sequence.request.command.handle
        _LOG.error("request %d failed", handle, exc_info=error)
        self._runner.wait()
        if sequence.state is SequenceState.RUNNING:
            self._scheduler.invalidate(sequence, start)
        self._requests.abort(refusals.step_failed(handle, error))
