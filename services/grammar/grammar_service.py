"""The gRPC servicer of GrammarService."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from llguidance import LLExecutor

from services.common import tracing
from services.common.bounds import check_bounds
from services.common.errors import draining_error
from services.common.sharing.fair_executor import FairExecutor
from services.common.sharing.tenant import current_tenant
from services.grammar import GrammarError, specification
from services.grammar.compiling.compile_slots import too_many_compiles
from services.grammar.compiling.compiler import Compiler
from services.grammar.matching.cache import CompiledGrammar, GrammarCache
from services.grammar.matching.initial_state import initial_state
from services.grammar.matching.matcher_batch import MatcherBatch
from services.grammar.matching.prototype import compile_prototype
from services.grammar.matching.token_index import TokenIndex
from services.grammar.matching.vocabulary import Vocabulary
from services.grammar.metrics import COMPILE_SECONDS, COMPILES, MATCHERS, STEP_SECONDS
from services.grammar.specification import Kind
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.grammar.v1.grammar_pb2_grpc import GrammarServiceServicer
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

__all__ = ["GrammarServicer"]

_THREADS = 2
"""Threads that compile grammars"""
_RETRY_SECONDS = 5.0
_ANSWER_SECONDS = 2.0
"""Seconds reserved for an answer's way back: an engine whose deadline passes treats the service as
hanging"""
_QUICK = 0.005  # seconds; longer steps run in a thread, so that the event loop stays responsive


class GrammarServicer(GrammarServiceServicer):
    """Compilation of grammars, and streams of masks."""

    def __init__(
        self, vocabulary: Vocabulary, compiler: Compiler, cache: GrammarCache, max_bytes: int
    ) -> None:
        self._vocabulary = vocabulary
        self._index = TokenIndex(vocabulary)
        self._compiler = compiler
        self._cache = cache
        self._max_bytes = max_bytes
        self._executor = LLExecutor()
        self._threads = FairExecutor(_THREADS, "grammars")
        self._compiling: dict[str, asyncio.Task[CompiledGrammar]] = {}
        self._batches: set[MatcherBatch] = set()
        self._draining = False
        self._idle = asyncio.Event()

    async def drain(self) -> None:
        """Refuse new grammars, and return when the running compilations have ended.

        Open matchers don't delay this: their engines reopen them at another replica or at the
        service's successor, and could open no new ones here.
        """
        self._draining = True
        self._update_load()
        await self._idle.wait()

    async def Compile(
        self, request: grammar_pb2.CompileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> grammar_pb2.CompileResponse:
        if self._draining:
            raise draining_error()
        check_bounds(request)
        spec = request.grammar
        kind = self._admit(spec)
        span = tracing.current.get()
        span.set({"tokenwire.grammar.kind": kind})
        try:
            async with asyncio.timeout(_within(context.time_remaining())):
                compiled, outcome = await self._find_or_compile(spec)
        except TimeoutError:
            COMPILES.labels(kind, "failed").inc()
            raise too_many_compiles(_RETRY_SECONDS) from None
        except GrammarError as error:
            COMPILES.labels(kind, "refused").inc()
            raise invalid(f"grammar.{kind}", str(error), reason="INVALID_GRAMMAR") from None
        except ServiceError:
            COMPILES.labels(kind, "failed").inc()
            raise
        COMPILES.labels(kind, outcome).inc()
        span.set({"tokenwire.outcome": outcome, "tokenwire.grammar.bytes": compiled.size})
        return grammar_pb2.CompileResponse(
            grammar_id=compiled.grammar_id,
            tokenizer_fingerprint=self._vocabulary.fingerprint,
            size_bytes=compiled.size,
        )

    async def Masks(
        self,
        request_iterator: AsyncIterator[grammar_pb2.MasksRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[grammar_pb2.MasksResponse]:
        batch: MatcherBatch | None = None
        is_quick = True
        try:
            async for request in request_iterator:
                if batch is None:
                    batch = MatcherBatch(request.configuration, self._vocabulary, self._executor)
                    self._batches.add(batch)
                started = time.perf_counter()
                grammars = self._grammars_to_open(request.commands)
                if is_quick and not grammars:
                    states = batch.step(request.commands, grammars)
                else:  # a newly opened matcher may have many tokens to accept
                    states = await asyncio.to_thread(batch.step, request.commands, grammars)
                seconds = time.perf_counter() - started
                is_quick = seconds < _QUICK
                STEP_SECONDS.observe(seconds)
                self._update_load()
                yield grammar_pb2.MasksResponse(step=request.step, states=states)
        finally:
            if batch is not None:
                self._batches.discard(batch)
                self._update_load()

    def _admit(self, spec: GrammarSpec) -> Kind:
        try:
            kind = specification.kind_of(spec)
        except GrammarError as error:
            raise invalid("grammar", str(error)) from None
        if (size := spec.ByteSize()) > self._max_bytes:
            COMPILES.labels(kind, "refused").inc()
            raise invalid(
                f"grammar.{kind}",
                f"The grammar has {size} bytes; the limit is {self._max_bytes}.",
                reason="GRAMMAR_TOO_LARGE",
            )
        try:
            specification.check_white_space(spec)
        except GrammarError as error:
            COMPILES.labels(kind, "refused").inc()
            field = "grammar.json_whitespace"
            raise invalid(field, str(error), reason="INVALID_GRAMMAR") from None
        return kind

    async def _find_or_compile(self, spec: GrammarSpec) -> tuple[CompiledGrammar, str]:
        """Return a grammar, and "cached" or "compiled".

        Concurrent calls of a tenant compile it only once.
        """
        grammar_id = specification.identity(spec, current_tenant.get())
        if cached := self._cache.get(grammar_id):
            return cached, "cached"
        task = self._compiling.get(grammar_id)
        if task is None:
            task = asyncio.ensure_future(self._compile(grammar_id, spec))
            self._compiling[grammar_id] = task
            task.add_done_callback(lambda done: self._on_compiled(grammar_id, done))
        # cancelling one caller must not fail the others that wait for the same grammar
        return await asyncio.shield(task), "compiled"

    def _on_compiled(self, grammar_id: str, task: asyncio.Task[CompiledGrammar]) -> None:
        del self._compiling[grammar_id]
        if not task.cancelled():
            task.exception()  # asyncio logs an exception that no caller retrieves
        self._update_load()

    async def _compile(self, grammar_id: str, spec: GrammarSpec) -> CompiledGrammar:
        with COMPILE_SECONDS.time():
            size = await self._compiler.try_out(spec)
            # apart from the threads that compute masks, because running sequences wait for those
            compiled = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._compile_tried, grammar_id, spec, size
            )
        self._cache.put(compiled, current_tenant.get())
        return compiled

    def _compile_tried(self, grammar_id: str, spec: GrammarSpec, size: int) -> CompiledGrammar:
        grammar = specification.translate(spec)
        prototype = compile_prototype(self._vocabulary.tokenizer, grammar)
        state = initial_state(spec, self._index)
        return CompiledGrammar(grammar_id, prototype, size, state)

    def _grammars_to_open(
        self, commands: Iterable[grammar_pb2.MatcherCommand]
    ) -> dict[str, CompiledGrammar]:
        """Return the cached grammars that commands open, by id."""
        named = {c.open.grammar_id for c in commands if c.HasField("open")}
        found = ((grammar_id, self._cache.get(grammar_id)) for grammar_id in named)
        return {grammar_id: grammar for grammar_id, grammar in found if grammar is not None}

    def _update_load(self) -> None:
        matchers = sum(len(batch) for batch in self._batches)
        MATCHERS.set(matchers)
        if self._draining and not self._compiling:
            self._idle.set()


def _within(seconds: float | None) -> float | None:
    """Return the part of a caller's deadline that the work may take; None = no limit."""
    return None if seconds is None else max(seconds / 2, seconds - _ANSWER_SECONDS)
