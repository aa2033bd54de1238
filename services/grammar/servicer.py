"""GrammarService over gRPC."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from llguidance import LLExecutor

from services.common.errors import draining_error
from services.grammar import specification
from services.grammar.compiling.compiler import Compiler
from services.grammar.error import GrammarError
from services.grammar.matching.batch import MatcherBatch
from services.grammar.matching.cache import CompiledGrammar, GrammarCache
from services.grammar.matching.prototype import compile_prototype
from services.grammar.matching.steering import Steering
from services.grammar.matching.token_index import TokenIndex
from services.grammar.matching.vocabulary import Vocabulary
from services.grammar.metrics import COMPILE_SECONDS, COMPILES, MATCHERS, STEP_SECONDS
from services.grammar.specification import Kind
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.grammar.v1.grammar_pb2_grpc import GrammarServiceServicer
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

__all__ = ["GrammarServicer"]

_QUICK = 0.005  # seconds; steps that may take longer go to a thread: the event loop stays free


class GrammarServicer(GrammarServiceServicer):
    """Compile and Masks."""

    def __init__(
        self, vocabulary: Vocabulary, compiler: Compiler, cache: GrammarCache, max_bytes: int
    ) -> None:
        self._vocabulary = vocabulary
        self._index = TokenIndex(vocabulary)
        self._compiler = compiler
        self._cache = cache
        self._max_bytes = max_bytes
        self._executor = LLExecutor()
        self._compiling: dict[str, asyncio.Task[CompiledGrammar]] = {}
        self._batches: set[MatcherBatch] = set()
        self._draining = False
        self._idle = asyncio.Event()

    async def drain(self) -> None:
        """Compile nothing new; returns when what compiles has.

        Open matchers are not waited for: their engines open them again at the service's replica, or
        at what is started in its place, and would meanwhile get no new ones.
        """
        self._draining = True
        self._note_load()
        await self._idle.wait()

    async def Compile(
        self,
        request: grammar_pb2.CompileRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> grammar_pb2.CompileResponse:
        if self._draining:
            raise draining_error()
        spec = request.grammar
        kind = self._admit(spec)
        try:
            compiled, outcome = await self._compiled(spec)
        except GrammarError as error:
            COMPILES.labels(kind, "refused").inc()
            raise invalid(f"grammar.{kind}", str(error), reason="INVALID_GRAMMAR") from None
        except ServiceError:
            COMPILES.labels(kind, "failed").inc()
            raise
        COMPILES.labels(kind, outcome).inc()
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
                began = time.perf_counter()
                grammars = self._named(request.commands)
                if is_quick and not grammars:
                    states = batch.step(request.commands, grammars)
                else:  # what is opened may have much to catch up with
                    states = await asyncio.to_thread(batch.step, request.commands, grammars)
                seconds = time.perf_counter() - began
                is_quick = seconds < _QUICK
                STEP_SECONDS.observe(seconds)
                self._note_load()
                yield grammar_pb2.MasksResponse(step=request.step, states=states)
        finally:
            if batch is not None:
                self._batches.discard(batch)
                self._note_load()

    def _admit(self, spec: GrammarSpec) -> Kind:
        try:
            kind = specification.kind_of(spec)
        except GrammarError as error:
            raise invalid("grammar", str(error)) from None
        if (size := specification.size_of(spec)) > self._max_bytes:
            COMPILES.labels(kind, "refused").inc()
            raise invalid(
                f"grammar.{kind}",
                f"The grammar takes {size} bytes; the limit is {self._max_bytes}.",
                reason="GRAMMAR_TOO_LARGE",
            )
        return kind

    async def _compiled(self, spec: GrammarSpec) -> tuple[CompiledGrammar, str]:
        """The grammar, and whether it was "cached" or "compiled". The same one compiles once."""
        grammar_id = specification.identity(spec)
        if held := self._cache.get(grammar_id):
            return held, "cached"
        task = self._compiling.get(grammar_id)
        if task is None:
            task = asyncio.ensure_future(self._compile(grammar_id, spec))
            self._compiling[grammar_id] = task
            task.add_done_callback(lambda done: self._forget(grammar_id, done))
        # one caller that goes away must not fail the others that wait for the same grammar
        return await asyncio.shield(task), "compiled"

    def _forget(self, grammar_id: str, task: asyncio.Task[CompiledGrammar]) -> None:
        del self._compiling[grammar_id]
        if not task.cancelled():
            task.exception()  # its callers have it, if any are left
        self._note_load()

    async def _compile(self, grammar_id: str, spec: GrammarSpec) -> CompiledGrammar:
        with COMPILE_SECONDS.time():
            size = await self._compiler.try_out(spec)
            compiled = await asyncio.to_thread(self._compile_here, grammar_id, spec, size)
        self._cache.put(compiled)
        return compiled

    def _compile_here(self, grammar_id: str, spec: GrammarSpec, size: int) -> CompiledGrammar:
        """Of a grammar that was tried."""
        grammar = specification.translate(spec)
        prototype = compile_prototype(self._vocabulary.tokenizer, grammar)
        positions = specification.positions(spec)
        steering = None if positions is None else Steering(positions, self._index)
        return CompiledGrammar(grammar_id, prototype, size, steering)

    def _named(self, commands: Iterable[grammar_pb2.MatcherCommand]) -> dict[str, CompiledGrammar]:
        """The grammars that commands open, by id."""
        named = {c.open.grammar_id for c in commands if c.HasField("open")}
        found = ((grammar_id, self._cache.get(grammar_id)) for grammar_id in named)
        return {grammar_id: grammar for grammar_id, grammar in found if grammar is not None}

    def _note_load(self) -> None:
        matchers = sum(len(batch) for batch in self._batches)
        MATCHERS.set(matchers)
        if self._draining and not self._compiling:
            self._idle.set()
