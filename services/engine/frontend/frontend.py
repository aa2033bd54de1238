"""The engine behind its servicers. It takes requests, and sends events through sinks.

The frontend lives on the event loop and owns the requests' sinks; the step loop owns the sequences.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from services.common.block_hash import tenant_salt
from services.common.contract import MAX_SEQUENCES
from services.common.errors import draining_error, internal_error
from services.common.logging import request_fields
from services.common.model_files.checkpoint_folder import served_name
from services.common.settings import StartupError
from services.common.sharing.shares import Shares
from services.engine.checked_request import CheckedRequest
from services.engine.frontend import events, request_accounting
from services.engine.frontend.adapter_registry import Adapter, AdapterRegistry, parse_adapters
from services.engine.frontend.admission import Admission
from services.engine.frontend.cache_mirror import CacheMirror
from services.engine.frontend.child_process import Child
from services.engine.frontend.image_client import ImageClient
from services.engine.frontend.live_request import Caller, LiveRequest
from services.engine.frontend.loop_client import LoopClient
from services.engine.frontend.matchers import CompiledGrammar, Matchers
from services.engine.frontend.preparations import Preparations, deadline_exceeded, queue_full
from services.engine.frontend.request_inputs import RequestInputs
from services.engine.frontend.request_span import RequestSpan
from services.engine.frontend.retry_clock import RetryClock
from services.engine.frontend.sink import Sink
from services.engine.messages import (
    AdapterLoaded,
    AddRequest,
    Admitted,
    CacheFlushed,
    CancelRequest,
    DraftTokens,
    Embedded,
    Finished,
    FlushCache,
    FollowCache,
    GrantCredit,
    LoadSnapshot,
    Refused,
    RequestDone,
    RequestOutput,
    ScoredPrompt,
    SetEncoding,
    SetMasks,
    StepOutput,
    Token,
)
from services.engine.model_description import GenerationDefaults, ModelDescription
from services.engine.settings import EngineSettings, parse_bytes
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.engine.v1.engine_pb2 import EmbedRequest, GenerateRequest

__all__ = ["Frontend"]

_LOG = logging.getLogger("engine")


class Frontend:
    """Frontend that sends requests to the loop, and its outputs to the requests' sinks."""

    def __init__(
        self, settings: EngineSettings, loop: Child, on_failure: Callable[[str], None]
    ) -> None:
        """loop: the loop process. on_failure: called with a message when it has died."""
        self._settings = settings
        self._max_requests = settings.max_waiting
        self._on_failure = on_failure
        self._admission: Admission | None = None
        self._loop = LoopClient(settings, loop, self._on_output, self._on_death)
        self._images: ImageClient | None = None
        self._matchers: Matchers | None = None
        self._preparations = Preparations(settings.max_waiting, self.notify)
        self._live: dict[int, LiveRequest] = {}
        self._places = Shares(self._max_requests, reserve=self._max_requests)
        """Shares of the tenants in the number of live requests"""
        self._image_shares = Shares(parse_bytes(settings.held_image_memory))
        """Shares of the tenants in the bytes of live requests' images, which the loop copies"""
        self._handles = itertools.count(1)
        self._flushes: deque[asyncio.Future[int]] = deque()
        self._token_rate = request_accounting.TokenRate()
        self._retry_clock = RetryClock()
        self._load_metrics = request_accounting.LoadMetrics()
        self._last_output = 0.0
        """time.monotonic() of the loop's last output, or of the first request after idling"""
        self._changed = asyncio.Event()
        self.model_id = settings.model_id or served_name(settings.model)
        self.adapters = AdapterRegistry(self.model_id, settings.max_adapters, self._loop.send)
        self.load = LoadSnapshot()
        self.cache = CacheMirror(lambda: self._loop.send(FollowCache()))
        self.draining = False
        """True once new requests are refused"""
        self.version = 0
        """Number of steps and of changes to the live requests"""

    async def start(self) -> None:
        """Load the model. Raises StartupError."""
        settings = self._settings
        # before the loop, which gives the remaining memory to the KV cache
        self._images = await ImageClient.start_for(
            settings, lambda works: self._loop.send(SetEncoding(works))
        )
        model = await self._loop.start()
        self._max_requests = model.max_running + settings.max_waiting
        self._places = Shares(self._max_requests, reserve=self._max_requests)
        self._admission = Admission(
            self.model_id,
            model,
            settings.max_logprobs,
            # the loop could never admit a request of more sequences, so it is refused as invalid
            min(MAX_SEQUENCES, self._max_requests),
            bool(settings.grammar),
            self._images is not None,
            settings.speculate != "off",
            model.recommended if settings.generation_config else GenerationDefaults(),
        )
        self.load = LoadSnapshot(free_blocks=model.total_blocks, total_blocks=model.total_blocks)
        self._load_metrics.observe(self.load)
        self.notify()  # watchers of the load must learn the number of blocks
        self.adapters.add_tasks(model.tasks, str(settings.model), model.weights_fingerprint)
        await self._load_adapters()
        self._matchers = Matchers.start_for(
            settings,
            model,
            on_masks=lambda masks: self._loop.send(SetMasks(masks)),
            on_failed=lambda handle, error: self._fail(handle, error, "failed"),
        )

    async def _load_adapters(self) -> None:
        for name, path in parse_adapters(self._settings.adapters).items():
            try:
                await self.load_adapter(name, path)
            except ServiceError as error:
                raise StartupError(f"--adapters {name}={path}: {error.message}") from None

    async def stop(self) -> None:
        """Abort all requests and end the loop process."""
        self.drain()
        # before the channel is closed, because closing cancels compilations without an error
        self._preparations.fail(draining_error())
        while self._preparations:
            await self.changed_since(self.version)
        if self._matchers is not None:
            await self._matchers.aclose()
        if self._images is not None:
            await self._images.stop()
        await self._loop.stop()

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    async def drained(self) -> None:
        """Return when no request is left."""
        while self.num_requests:
            await self.changed_since(self.version)

    async def changed_since(self, version: int) -> None:
        """Return once `version` has changed from this value."""
        while self.version == version:
            await self._changed.wait()

    def notify(self) -> None:
        """Advance `version`."""
        self.version += 1
        self._changed.set()  # wakes only the tasks that wait now
        self._changed.clear()

    @property
    def admission(self) -> Admission:
        """Checks of requests. Raises ServiceError while the model loads."""
        if self._admission is None:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE, "LOADING", "The model is loading.", retry_seconds=1
            )
        return self._admission

    @property
    def model(self) -> ModelDescription:
        """The loaded model. Raises ServiceError while it loads."""
        return self.admission.model

    @property
    def num_requests(self) -> int:
        """Number of requests that run, wait, or prepare their grammar and images."""
        return len(self._live) + len(self._preparations)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the loop's last output, if requests run: the step is slow or hangs."""
        return time.monotonic() - self._last_output if self._live else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self._token_rate.per_second

    # Requests of clients.

    async def submit(
        self,
        request: GenerateRequest | EmbedRequest,
        caller: Caller,
        credit: int | None,
        sink: Sink[Any],
    ) -> int:
        """Check a request, prepare its grammar and images, and send it to the loop.

        Returns its handle.

        Raises ServiceError. A request that the loop refuses gets its error through the sink. The
        caller counts a cancelled call: a task may be cancelled before its first step.
        """
        arrival = time.monotonic()
        span = RequestSpan(self.model_id, caller.request_id, caller.traceparent)
        try:
            grammar, checked = await self._check(request, caller)
        except BaseException as error:  # the cancellation of the call, too
            span.fail(error)
            raise
        try:
            adapter = self.adapters.enter(request.model)
        except ServiceError as error:
            request_accounting.count_error(error.reason)
            span.fail(error)
            raise
        handle = next(self._handles)
        latency = request_accounting.TokenLatency(arrival)
        self._enter(handle, LiveRequest(caller, checked, sink, latency, span, adapter))
        if self._matchers is not None and grammar is not None:
            generated = {resume.sequence: resume.generated for resume in checked.resume}
            self._matchers.open(handle, checked.num_sequences, grammar, generated)
        if caller.timeout_seconds is not None:
            self._set_deadline(handle, arrival + caller.timeout_seconds)
        self._loop.send(
            AddRequest(
                handle=handle,
                checked=checked,
                credit=credit,
                cache_salt=tenant_salt(caller.tenant),
                priority=caller.priority,
                arrival=arrival,
                adapter=0 if adapter is None else adapter.number,
                adapter_fingerprint="" if adapter is None else adapter.fingerprint,
            )
        )
        return handle

    def cancel(self, handle: int, sequences: Sequence[int] = ()) -> None:
        """End some sequences, or all if none is named. Raises ServiceError for unknown ones."""
        live = self._live.get(handle)
        if live is None:
            return
        count = live.checked.num_sequences
        if any(index >= count for index in sequences):
            raise invalid("cancel.sequences", f"The request has {count} sequences.")
        live.is_cancelled = live.is_cancelled or not sequences
        self._loop.send(CancelRequest(handle, tuple(sequences)))

    def drop(self, handle: int) -> None:
        """End a request whose client has left. Its sink gets no further events."""
        if handle in self._live:
            self._loop.send(CancelRequest(handle))
            live = self._leave(handle)
            live.count_usage(self.model_id, None)
            live.span.cancel()
            request_accounting.count_request("cancelled")

    def grant(self, handle: int, tokens: int) -> None:
        """Let every sequence of a request generate further tokens."""
        if handle in self._live:
            self._loop.send(GrantCredit(handle, tokens))

    def abort(self, request_ids: Sequence[str] | None) -> int:
        """End requests by id, None = all. Returns their number."""
        error = ServiceError(
            grpc.StatusCode.CANCELLED, "ABORTED", "An operator aborted the request."
        )
        handles = [
            handle
            for handle, live in self._live.items()
            if request_ids is None or live.caller.request_id in request_ids
        ]
        for handle in handles:
            self._fail(handle, error, "aborted")
        return len(handles) + self._preparations.fail(error, request_ids)

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Load an adapter. Raises ServiceError."""
        takes_some = self.model.takes_adapters
        if not (takes_some and self.adapters.most):
            others = "its model is an encoder without adapters, DeepSeek V4 or in a GGUF file"
            why = "--max-adapters is 0" if takes_some else others
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "NO_ADAPTERS",
                f"This engine takes no adapters: {why}.",
            )
        adapter = await self.adapters.load(name, path)
        self.notify()
        return adapter

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter. Running requests go on. Raises ServiceError."""
        self.adapters.unload(name)
        _LOG.info("adapter %s unloaded", name)
        self.notify()

    async def flush_cache(self) -> int:
        """Evict all cached blocks that no sequence holds. Returns their number."""
        flushed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._flushes.append(flushed)
        self._loop.send(FlushCache())
        return await flushed

    async def _check(
        self, request: GenerateRequest | EmbedRequest, caller: Caller
    ) -> tuple[CompiledGrammar | None, CheckedRequest]:
        """Check a request, and prepare its grammar and images. Raises ServiceError."""
        try:
            self._require_room(caller.tenant)
            if isinstance(request, EmbedRequest):
                return None, self.admission.check_embed(request, self.adapters.named)
            checked = self.admission.check(request, self.adapters.named)
            if not (checked.constrained or request.images):
                return None, checked
            inputs = RequestInputs(request, checked, caller.tenant)
            together = self.model.images_are_consecutive
            grammar, checked = await self._preparations.run(
                lambda: inputs.prepare(self._matchers, self._images, consecutive_images=together),
                caller.request_id,
                caller.timeout_seconds,
                caller.tenant,
            )
            self._require_image_memory(checked, caller.tenant)
        except ServiceError as error:
            n = 1 if isinstance(request, EmbedRequest) else request.n
            sequences = max(1, len(request.prompts)) * max(1, n)  # not checked yet
            self._set_retry(error, min(sequences, MAX_SEQUENCES))
            request_accounting.count_error(error.reason)
            raise
        return grammar, checked

    def _require_room(self, tenant: str) -> None:
        if self.draining:
            raise draining_error()
        if not self._places.has_room(tenant, 1):
            # the loop would refuse it, too, but counting its sequences there delays a step
            raise queue_full(f"{self.num_requests} requests are here already; try again.")

    def _set_retry(self, error: ServiceError, sequences: int) -> None:
        """Set the delay of a retry in the error of a request that found no room."""
        if error.reason == "QUEUE_FULL":
            rate = self._token_rate.while_busy
            error.retry_seconds = self._retry_clock.turn(sequences, self.load.waiting, rate)

    def _require_image_memory(self, checked: CheckedRequest, tenant: str) -> None:
        held, size = self._image_shares.held, checked.image_bytes
        if held and size and not self._image_shares.has_room(tenant, size):
            raise queue_full(f"Other requests hold {held:,} bytes of encoded images; try again.")

    # Outputs of the loop.

    def _on_output(self, output: StepOutput) -> None:
        now, generated = time.monotonic(), 0
        self.load, self._last_output = output.load, now
        self._load_metrics.observe(output.load)
        if output.cache:
            self.cache.apply(output.cache)
        if self._matchers is not None:  # first, because the loop may wait for the masks
            self._matchers.feed(o for o in output.outputs if isinstance(o, Token | DraftTokens))
        for item in output.outputs:
            if isinstance(item, CacheFlushed):
                self._on_flushed(item)
            elif isinstance(item, AdapterLoaded):
                self.adapters.on_loaded(item)
            elif (live := self._live.get(item.handle)) is not None:  # otherwise its client has left
                generated += isinstance(item, Token)
                self._deliver(item, live, now)
        self._token_rate.add(now, generated)
        self.notify()

    def _on_flushed(self, flushed: CacheFlushed) -> None:
        waiter = self._flushes.popleft()
        if not waiter.done():  # its client may have left
            waiter.set_result(flushed.freed_blocks)

    def _deliver(self, item: RequestOutput, live: LiveRequest, now: float) -> None:
        try:
            match item:
                case Token():
                    live.sink.on_token(item)
                    live.latency.observe(item.sequence, now)
                case ScoredPrompt():
                    live.sink.on_prompt_scores(events.prompt_scores(item))
                case Embedded():
                    live.sink.on_embedded(item)
                case Finished():
                    self._close_matchers(item.handle, live, (item.sequence,))
                    request_accounting.count_finished(item.cause)
                    self._retry_clock.on_finished(item.completion_tokens)
                    finished = events.finished(item)
                    live.span.on_finished(finished)
                    live.sink.on_finished(finished)
                case Admitted():
                    live.sink.on_accepted(events.accepted(item, live.checked.sampling))
                case RequestDone():
                    live.latency.observe_end(now)
                    self._on_done(item, live)
                case Refused():
                    self._on_refused(item, live)
        except Exception:
            _LOG.exception("unexpected failure")
            self._fail(item.handle, internal_error(), "failed")

    def _on_done(self, done: RequestDone, live: LiveRequest) -> None:
        completed = events.completed(done)  # first, as only a live request can fail
        self._leave(done.handle)
        live.count_usage(self.model_id, done)
        outcome = "cancelled" if live.is_cancelled else "ok"
        live.span.complete(done, outcome)
        request_accounting.count_request(outcome)
        request_accounting.observe_done(done)
        live.sink.on_completed(completed)

    def _on_refused(self, refused: Refused, live: LiveRequest) -> None:
        error = events.refusal(refused)
        self._leave(refused.handle)
        live.count_usage(self.model_id, None, is_error=True)
        request_accounting.count_error(refused.reason)
        self._set_retry(error, live.checked.num_sequences)
        if error.code is grpc.StatusCode.INTERNAL:
            names = request_fields(live.caller.request_id, live.span.traceparent)
            _LOG.error(refused.message, extra=names)
        live.span.fail(error)
        live.sink.on_error(error)

    def _on_death(self, why: str) -> None:
        self.drain()  # clients that retry must choose another engine
        self._on_failure(why)
        error = ServiceError(grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST", why, retry_seconds=1)
        for handle in list(self._live):
            self._fail(handle, error, "failed")
        self._preparations.fail(error)

    # Live requests.

    def _enter(self, handle: int, live: LiveRequest) -> None:
        if not self._live:
            self._last_output = time.monotonic()
        self._live[handle] = live
        self._places.add(live.caller.tenant, 1)
        self._image_shares.add(live.caller.tenant, live.checked.image_bytes)

    def _set_deadline(self, handle: int, deadline: float) -> None:
        """Fail the request at this time.monotonic()."""
        self._live[handle].deadline = asyncio.get_running_loop().call_later(
            deadline - time.monotonic(), self._fail, handle, deadline_exceeded(), "expired"
        )

    def _fail(self, handle: int, error: ServiceError, outcome: str) -> None:
        live = self._live.get(handle)
        if live is not None:
            self._loop.send(CancelRequest(handle))
            self._leave(handle).span.fail(error)
            live.count_usage(self.model_id, None, is_error=True)
            request_accounting.count_request(outcome)
            live.sink.on_error(error)

    def _leave(self, handle: int) -> LiveRequest:
        live = self._live.pop(handle)
        self._places.add(live.caller.tenant, -1)
        self._image_shares.add(live.caller.tenant, -live.checked.image_bytes)
        if live.deadline is not None:
            live.deadline.cancel()
        self._close_matchers(handle, live, range(live.checked.num_sequences))
        if live.adapter is not None:
            self.adapters.leave(live.adapter)
        self.notify()
        return live

    def _close_matchers(self, handle: int, live: LiveRequest, sequences: Iterable[int]) -> None:
        if self._matchers is not None and live.checked.constrained:
            for sequence in sequences:
                live.span.mask_seconds += self._matchers.close(handle, sequence)
