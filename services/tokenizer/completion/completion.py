"""One completion that runs: events of the engine in, events of its client out."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import grpc

from services.common.errors import draining_error, internal_error
from services.common.logging import failure, request_fields
from services.tokenizer.completion.best_of import rank
from services.tokenizer.completion.choice import Choice
from services.tokenizer.completion.columns import Score, read_scores
from services.tokenizer.completion.echo import make_echo
from services.tokenizer.completion.plan import CompletePlan, Work
from services.tokenizer.completion.prompt_logprobs import PromptLogprobs
from services.tokenizer.engine_link import EngineLink
from services.tokenizer.metrics import METRICS
from services.tokenizer.outbox import Outbox
from services.tokenizer.text.detokenizer import Detokenizer
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["CallContext", "Completion", "Completions", "Losses"]

_LOG = logging.getLogger("completion")
_MARGIN_SECONDS = 0.1  # how much earlier than its own caller the engine gives up
_LOGGED = 128  # characters of a user's label
_WINDOW = 1_024  # tokens per choice that may be ahead of the reader of a call
_MOST_CREDIT = 2**32 - 1  # tokens that a message can grant; more than any choice can have

_MOST_FRUITLESS = 3
"""Losses of the engine in a row in which a completion may get nothing: it may be what kills it"""
_LOST = frozenset({"SESSION_LOST", "ENGINE_LOST"})
_HELD = _LOST | {"DRAINING", "LOADING"}
"""Reasons for which a completion waits until the engine serves again"""

AddResponse = Callable[[], completion_pb2.CompleteResponse]


@dataclass(frozen=True, slots=True)
class CallContext:
    """Where a request comes from. The deadline is in the event loop's time."""

    request_id: str
    traceparent: str
    tenant: str
    priority: int
    deadline: float | None
    user: str = ""

    @property
    def names(self) -> dict[str, str]:
        """What its lines in the log are found by."""
        return request_fields(self.request_id, self.traceparent)


class Losses:
    """Losses of the engine by one completion: in a row, without a token between."""

    def __init__(self) -> None:
        self._fruitless = 0
        self._brought = 0

    def count(self, brought: int) -> bool:
        """Count a loss after so many tokens and scores; whether the completion may go on."""
        if brought > self._brought:
            self._fruitless = 0
        self._brought = brought
        self._fruitless += 1
        return self._fruitless <= _MOST_FRUITLESS


class Completions:
    """All completions of the process, and what they share."""

    def __init__(self, link: EngineLink) -> None:
        self.link = link
        self._running: set[Completion] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self.waiting = 0
        """Completions that wait for the engine, and were never admitted"""

    def start(
        self,
        work: Work,
        context: CallContext,
        outbox: Outbox,
        *,
        credit: int | None = None,
        windowed: bool = False,
    ) -> "Completion":
        """Starts a completion, whose output is announced to the outbox. Refusals are output too.

        `credit` is the client's own flow control; `windowed` asks for ours, see `grant`.
        """
        completion = Completion(self, context, outbox, credit, windowed)
        self._running.add(completion)
        self._idle.clear()
        METRICS.running.inc()
        completion.start(work, self._draining)
        return completion

    def discard(self, completion: "Completion") -> None:
        """The completion ended."""
        self._running.discard(completion)
        METRICS.running.dec()
        if not self._running:
            self._idle.set()

    async def drain(self) -> None:
        """Refuse what is new; returns when what runs has ended."""
        self._draining = True
        await self._idle.wait()


class Completion:
    """Listens to the engine, and writes what its client has not taken yet."""

    def __init__(
        self,
        owner: Completions,
        context: CallContext,
        outbox: Outbox,
        credit: int | None,
        windowed: bool,
    ) -> None:
        self.error: ServiceError | None = None
        """What it failed with; to be told after the last `write`."""
        self._owner = owner
        self._context = context
        self._outbox = outbox
        self._granted = credit
        self._windowed = windowed
        self._began = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._handle: int | None = None  # in the engine's Session
        self._ended = False
        self._losses = Losses()
        self._is_cancelled = False
        self._plan: CompletePlan | None = None
        self._choices: list[Choice] = []
        self._touched: dict[int, Choice] = {}
        self._next_whole = 0
        self._winners: list[Choice] = []  # of best_of, in the order of the answer
        self._last_token_at: list[float] = []
        self._scores: list[list[Score]] = []
        self._prompt_logprobs: PromptLogprobs | None = None
        self._mirostat_mu: dict[int, float] = {}
        """By choice, what the engine needs besides the ids to go on"""
        self._admitted: engine_pb2.Accepted | None = None
        self._admission_written = False
        self._usage: types_pb2.Usage | None = None
        self._end_written = False

    @property
    def is_written(self) -> bool:
        """Whether the last event was written."""
        return self._end_written

    @property
    def is_admitted(self) -> bool:
        """Whether the admission was written."""
        return self._admission_written

    # what the client does

    def start(self, work: Work, draining: bool) -> None:
        """Checks, plans and submits the request."""
        try:
            if draining:
                raise draining_error()
            if self._context.deadline is not None and math.isnan(self._context.deadline):
                raise invalid("context.timeout_seconds", "The timeout must be a number.")
            if self._owner.link.is_known:
                self._prepare(work)
            else:
                self._work(self._prepare_later(work))
        except ServiceError as error:
            self._fail(error)
        except Exception:
            self.fail_unexpectedly()

    def _prepare(self, work: Work) -> None:
        limits = self._owner.link.limits
        work.check(limits)
        plan = work.plan(limits)
        if isinstance(plan, CompletePlan):
            self._submit(plan)
        else:
            self._work(self._submit_later(plan))

    async def _prepare_later(self, work: Work) -> None:
        await self._until_engine_serves("It has not been reached yet.")
        self._prepare(work)

    def credit(self, tokens: int) -> None:
        """The client takes so many more tokens of each choice."""
        if self._granted is None or self._ended:
            return
        self._granted += tokens
        if self._handle is not None and self._plan is not None and not self._plan.whole:
            self._send(credit=engine_pb2.SessionCredit(tokens=tokens))

    def grant(self) -> None:
        """What was written so far was taken: let the engine go on, where it waits for that."""
        if self._granted is None or not self._windowed or self._ended:
            return
        # of the choice that is furthest: others may wait for those before them to end
        taken = max((choice.sent for choice in self._choices if choice.outcome is None), default=0)
        more = taken + _WINDOW - self._granted
        if more >= _WINDOW // 2:
            self.credit(more)

    def cancel(self) -> None:
        """The client wants no more; it is told how the choices ended."""
        self._is_cancelled = True
        if self._handle is not None:
            self._send(cancel=engine_pb2.SessionCancel())
        elif not self._ended:
            self._fail(
                ServiceError(grpc.StatusCode.CANCELLED, "CANCELLED", "The request was cancelled.")
            )

    def abandon(self) -> None:
        """The client is gone."""
        if not self._ended:
            self._leave_engine()
            self._end("cancelled")

    def write(self, add: AddResponse, is_full: Callable[[], bool] = lambda: False) -> None:
        """Write everything that is ready, as responses that `add` makes. When they are full after
        something large, the rest is announced to the outbox again."""
        plan = self._plan
        if plan is None:
            return
        if self._admitted is not None and not self._admission_written:
            self._write_admission(add().accepted, plan, self._admitted)
        if self._prompt_logprobs is not None:
            for run in self._prompt_logprobs.take():
                add().prompt_logprobs.CopyFrom(run)
                if is_full():
                    self._outbox.mark(self)
                    return
        while (choice := self._next_choice(plan)) is not None:
            is_large = choice.is_large
            choice.write(add)
            if is_large and is_full():
                self._outbox.mark(self)
                return
        if self._usage is not None and not self._end_written:
            add().completed.usage.CopyFrom(self._usage)
            self._end_written = True

    def _next_choice(self, plan: CompletePlan) -> Choice | None:
        """The next that has something to write. Whole ones go in the order of index."""
        if not plan.whole:
            return self._touched.pop(next(iter(self._touched))) if self._touched else None
        choices = self._settle_winners(plan) if plan.choice.ranked else self._choices
        if self._next_whole == len(choices):
            return None
        choice = choices[self._next_whole]
        if choice.outcome is None or not choice.has_output:
            return None
        self._next_whole += 1
        return choice

    def _settle_winners(self, plan: CompletePlan) -> list[Choice]:
        """With best_of, the choices to answer, of the prompts whose candidates all ended."""
        draws = plan.engine_request.n
        while candidates := self._choices[len(self._winners) // plan.n * draws :][:draws]:
            if any(choice.outcome is None for choice in candidates):
                break
            for place in rank([choice.kept_logprobs for choice in candidates])[: plan.n]:
                candidates[place].index = len(self._winners)
                self._winners.append(candidates[place])
        return self._winners

    # what the engine tells

    def on_event(self, event: engine_pb2.SessionEvent) -> None:
        """An event of the engine."""
        try:
            self._take(event)
        except ServiceError as error:
            self._leave_engine()
            self._fail(error)
        except Exception:
            self.fail_unexpectedly()

    def on_error(self, error: ServiceError) -> None:
        """The engine refused or failed the request, or was lost."""
        self._handle = None
        blame = self._plan.blame if self._plan is not None else None
        if blame is not None and error.field.startswith("grammar"):
            blame(error)
        if error.reason in _HELD and self._plan is not None and self._may_go_on(error):
            self._work(self._resubmit(self._plan, error))
        else:
            self._fail(error)

    def _may_go_on(self, error: ServiceError) -> bool:
        """Whether to go on after the engine was lost, or refused because it stops or starts."""
        if error.reason not in _LOST:
            return True
        brought = sum(len(choice.received) for choice in self._choices)
        return self._losses.count(brought + sum(map(len, self._scores)))

    def _take(self, event: engine_pb2.SessionEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "delta":
            self._on_delta(event.delta)
        elif kind == "finished":
            finished = event.finished
            choice = self._choices[finished.sequence]
            match = finished.match if finished.HasField("match") else None
            choice.end(finished.reason, match)
            self._touch(choice)
        elif kind == "completed":
            self._on_completed(event.completed.usage)
        elif kind == "prompt_scores":
            self._on_prompt_scores(event.prompt_scores)
        elif kind == "accepted":
            self._on_accepted(event.accepted)

    def _on_delta(self, delta: engine_pb2.OutputDelta) -> None:
        sequence = delta.sequence
        choice = self._choices[sequence]
        if choice.outcome is not None:
            return
        before = len(choice.received)
        choice.add(delta.position, delta.tokens)
        if delta.HasField("mirostat_mu"):
            self._mirostat_mu[sequence] = delta.mirostat_mu
        tokens = len(choice.received) - before
        METRICS.completion_tokens.inc(tokens)
        self._observe(sequence, tokens)
        if choice.outcome is not None:
            self._send(cancel=engine_pb2.SessionCancel(sequences=[sequence]))
        self._touch(choice)

    def _observe(self, sequence: int, tokens: int) -> None:
        now = time.monotonic()
        last = self._last_token_at[sequence]
        if last:
            METRICS.inter_token_seconds.observe((now - last) / max(1, tokens))
        elif not any(self._last_token_at):
            METRICS.first_token_seconds.observe(now - self._began)
        self._last_token_at[sequence] = now

    def _touch(self, choice: Choice) -> None:
        if self._plan is None or (self._plan.whole and choice.outcome is None):
            return
        if choice.has_output:
            self._touched[choice.index] = choice
            self._outbox.mark(self)

    def _on_accepted(self, accepted: engine_pb2.Accepted) -> None:
        if self._admitted is not None or self._plan is None:
            return  # admitted before, elsewhere
        self._admitted = accepted
        METRICS.prompt_tokens.inc(self._plan.prompt_tokens)
        if self._plan.echo:
            for index in range(len(self._plan.prompts)):
                self._put_echo(self._plan, index)
        self._outbox.mark(self)

    def _on_prompt_scores(self, scores: engine_pb2.PromptScores) -> None:
        if self._plan is None:
            return
        known = self._scores[scores.prompt]
        skip = max(0, len(known) + 1 - scores.position)
        fresh = read_scores(scores.tokens)[skip:]
        if fresh and self._prompt_logprobs is not None:
            ids = scores.tokens.ids[skip:]
            self._prompt_logprobs.add(scores.prompt, len(known) + 1, ids, fresh)
            self._outbox.mark(self)
        known.extend(fresh)
        if self._plan.echo and self._plan.choice.scored:
            self._put_echo(self._plan, scores.prompt)

    def _put_echo(self, plan: CompletePlan, index: int) -> None:
        """Puts the prompt in front of its choices, once its scores are there."""
        prompt, scores = plan.prompts[index], self._scores[index]
        if plan.choice.scored and len(scores) != len(prompt.ids) - 1:
            return
        rows: list[Score] | None = None
        if plan.choice.scored:
            width = plan.engine_request.logprobs
            rows = [Score.none(width), *(score.first(width) for score in scores)]
        echo = make_echo(prompt, rows)
        draws = plan.engine_request.n
        for choice in self._choices[index * draws : (index + 1) * draws]:
            choice.put_echo(echo)
            self._touch(choice)

    def _on_completed(self, usage: types_pb2.Usage) -> None:
        if self._plan is None:
            return
        self._handle = None
        self._usage = types_pb2.Usage()
        self._usage.CopyFrom(usage)
        self._usage.prompt_tokens = self._plan.prompt_tokens
        self._usage.completion_tokens = sum(len(choice.received) for choice in self._choices)
        self._outbox.mark(self)
        self._end("cancelled" if self._is_cancelled else "ok")

    # how it gets to the engine, and away from it

    def _work(self, work: Coroutine[None, None, None]) -> None:
        """Does what takes a while, aside. Its failure is the request's."""

        async def watched() -> None:
            try:
                await work
            except ServiceError as error:
                self._fail(error)
            except Exception:
                self.fail_unexpectedly()

        self._task = asyncio.ensure_future(watched())

    async def _submit_later(self, plan: Coroutine[None, None, CompletePlan]) -> None:
        self._submit(await plan)

    def _submit(self, plan: CompletePlan) -> None:
        METRICS.encode_seconds.observe(time.monotonic() - self._began)
        self._plan = plan
        self._scores = [[] for _ in plan.prompts]
        if plan.prompt_logprobs is not None:
            self._prompt_logprobs = PromptLogprobs(plan.full_table, plan.prompt_logprobs)
        for prompt in plan.prompts:
            length = sum(map(len, prompt.texts)) if plan.echo else None
            for _ in range(plan.engine_request.n):
                before = () if plan.begins_text else prompt.ids
                detokenizer = Detokenizer(plan.table, before, begins_text=not prompt.is_infill)
                choice = Choice(len(self._choices), plan.choice, detokenizer, length)
                self._choices.append(choice)
        self._last_token_at = [0.0] * len(self._choices)
        if self._windowed and not plan.whole and plan.engine_request.stopping.max_tokens > _WINDOW:
            self._granted = _WINDOW
        self._open(plan, plan.engine_request)

    def _open(self, plan: CompletePlan, request: engine_pb2.GenerateRequest) -> None:
        start = engine_pb2.SessionStart(
            request=request,
            request_id=self._context.request_id,
            traceparent=self._context.traceparent,
            tenant=self._context.tenant,
            priority=self._context.priority,
        )
        if self._context.deadline is not None:
            left = self._context.deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise _expired("The deadline passed before the request reached the engine.")
            start.timeout_seconds = max(left - _MARGIN_SECONDS, left / 2)
        if self._granted is not None and not plan.whole:
            taken = min(
                (len(choice.received) for choice in self._choices if choice.outcome is None),
                default=0,
            )
            start.credit = min(max(0, self._granted - taken), _MOST_CREDIT)
        self._handle = self._owner.link.session.open(self)
        self._send(start=start)

    async def _until_engine_serves(self, why: str) -> None:
        """Raises ServiceError if that takes too long, or too many wait. `why`: it does not now."""
        owner, is_new = self._owner, self._admitted is None
        if is_new and owner.waiting >= owner.link.max_waiting:
            message = f"{owner.waiting} requests wait for the engine already; try again."
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            raise ServiceError(code, "QUEUE_FULL", message, retry_seconds=1)
        owner.waiting += is_new
        try:
            async with asyncio.timeout_at(self._context.deadline):
                serves = await owner.link.comes_back()
        except TimeoutError:
            raise _expired("The deadline passed while the engine was not there.") from None
        finally:
            owner.waiting -= is_new
        if not serves:
            message = f"The engine can't be reached, or does not serve: {why}"
            code = grpc.StatusCode.UNAVAILABLE
            raise ServiceError(code, "ENGINE_LOST", message, retry_seconds=1)

    async def _resubmit(self, plan: CompletePlan, error: ServiceError) -> None:
        """Continues on an engine that came back: prompt + generated ids, the same seed."""
        if all(choice.outcome is not None for choice in self._choices):
            self._on_completed(types_pb2.Usage())
            return
        await self._until_engine_serves(error.message)
        request = engine_pb2.GenerateRequest()
        request.CopyFrom(plan.engine_request)
        for sequence, choice in enumerate(self._choices):
            if choice.outcome is None and choice.received:
                request.resume.add(
                    sequence=sequence,
                    generated=types_pb2.TokenIds(ids=choice.received),
                    mirostat_mu=self._mirostat_mu.get(sequence),
                )
        can_resume = engine_pb2.CAPABILITY_RESUME in self._owner.link.limits.capabilities
        if request.resume and not can_resume:
            raise error
        if all(
            len(scores) == len(prompt.ids) - 1
            for prompt, scores in zip(plan.prompts, self._scores, strict=True)
        ):
            request.ClearField("prompt_logprobs")
        self._open(plan, request)
        done = [
            sequence for sequence, choice in enumerate(self._choices) if choice.outcome is not None
        ]
        if done:
            self._send(cancel=engine_pb2.SessionCancel(sequences=done))

    def _send(
        self,
        *,
        start: engine_pb2.SessionStart | None = None,
        cancel: engine_pb2.SessionCancel | None = None,
        credit: engine_pb2.SessionCredit | None = None,
    ) -> None:
        if self._handle is not None:
            self._owner.link.session.send(
                engine_pb2.SessionCommand(
                    handle=self._handle, start=start, cancel=cancel, credit=credit
                )
            )

    def _leave_engine(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._handle is not None:
            self._send(cancel=engine_pb2.SessionCancel())
            self._owner.link.session.detach(self._handle)
            self._handle = None

    def _fail(self, error: ServiceError) -> None:
        if self._ended:
            return
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self.error = error
        self._outbox.mark(self)
        self._end(error.code.name.lower(), **failure(_LOG, error.reason, error.message))

    def fail_unexpectedly(self) -> None:
        """A defect of ours: one request's failure must not end the Session."""
        _LOG.exception("unexpected failure", extra=self._context.names)
        self._leave_engine()
        self._fail(internal_error())

    def _end(self, outcome: str, **why: str) -> None:
        self._ended = True
        METRICS.requests.labels(outcome).inc()
        self._owner.discard(self)
        generated = sum(len(choice.received) for choice in self._choices)
        _LOG.info(
            "completion %s",
            outcome,
            extra={
                **self._context.names,
                **why,
                **self._user(),
                "prompt_tokens": self._plan.prompt_tokens if self._plan is not None else 0,
                "completion_tokens": generated,
                "milliseconds": round((time.monotonic() - self._began) * 1e3, 2),
            },
        )

    def _user(self) -> dict[str, str]:
        """Its user's label, which may be a name, while somebody debugs."""
        is_told = self._context.user and _LOG.isEnabledFor(logging.DEBUG)
        return {"user": self._context.user[:_LOGGED]} if is_told else {}

    def _write_admission(
        self,
        accepted: completion_pb2.CompleteAccepted,
        plan: CompletePlan,
        admitted: engine_pb2.Accepted,
    ) -> None:
        accepted.model = plan.limits.model
        accepted.system_fingerprint = plan.limits.system_fingerprint
        accepted.prompts.extend(plan.engine_request.prompts)
        accepted.seed = plan.engine_request.sampling.seed
        accepted.max_tokens.extend(admitted.max_tokens)
        accepted.ignored.extend(plan.ignored)
        self._admission_written = True


def _expired(message: str) -> ServiceError:
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    return ServiceError(code, "DEADLINE_EXCEEDED", message)
