"""Lifecycle of the grammar service."""

import os
from collections.abc import Sequence

import grpc

from services.common.model_files.checkpoint_folder import served_name
from services.common.model_files.checkpoint_kind import generates
from services.common.server import Application
from services.common.telemetry import describe_build
from services.grammar.compiling.compiler import Compiler
from services.grammar.grammar_service import GrammarServicer
from services.grammar.matching.cache import GrammarCache
from services.grammar.matching.vocabulary import load
from services.grammar.settings import GrammarSettings
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.grammar.v1.grammar_pb2_grpc import add_GrammarServiceServicer_to_server

__all__ = ["GrammarApplication"]

# Bytes of a mask thread's stack. Trial compiles have half of it; Rust's default is 2 MiB.
_MASK_STACK = 8 << 20


class GrammarApplication(Application):
    """The vocabulary, the compile process and the servicer."""

    def __init__(self, settings: GrammarSettings) -> None:
        super().__init__()
        os.environ.setdefault("RUST_MIN_STACK", str(_MASK_STACK))
        model = settings.model
        self._model = settings.model_id or served_name(model)
        self._compiler = Compiler(model, settings.compile_timeout, settings.compile_concurrency)
        self._servicer: GrammarServicer | None = None
        """Servicer; None = the checkpoint generates nothing, so its tokenizer may be of any kind"""
        if not generates(model):
            return
        self._servicer = GrammarServicer(
            load(model),
            self._compiler,
            GrammarCache(settings.cache_entries, settings.cache_bytes),
            settings.max_grammar_bytes,
        )

    @property
    def model(self) -> str:
        return self._model

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        if self._servicer is not None:
            add_GrammarServiceServicer_to_server(self._servicer, server)
        return [grammar_pb2.DESCRIPTOR.services_by_name["GrammarService"].full_name]

    async def start(self) -> None:
        if self._servicer is not None:
            await self._compiler.start()
        describe_build("grammar")
        self.set_serving(True)

    async def drain(self) -> None:
        if self._servicer is not None:
            await self._servicer.drain()

    async def stop(self) -> None:
        if self._servicer is not None:
            await self._compiler.stop()
