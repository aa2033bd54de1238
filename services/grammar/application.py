"""Settings and lifecycle of the grammar service."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from services.common.checkpoint_kind import generates
from services.common.server import Application
from services.common.settings import (
    INSTANT,
    LAST_PORT,
    CheckpointSettings,
    ServerSettings,
    setting,
)
from services.common.telemetry import describe_build
from services.grammar.compiling.compiler import Compiler
from services.grammar.grammar_service import GrammarServicer
from services.grammar.matching.cache import GrammarCache
from services.grammar.matching.vocabulary import load
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.grammar.v1.grammar_pb2_grpc import add_GrammarServiceServicer_to_server
from tokenwire.serving.checkpoint_folder import served_name

__all__ = ["GrammarApplication", "GrammarSettings"]

# Bytes of a mask thread's stack. Trial compiles have half of it; Rust's default is 2 MiB.
_MASK_STACK = 8 << 20


@dataclass(frozen=True, kw_only=True)
class GrammarSettings(ServerSettings, CheckpointSettings):
    """Tokenwire's grammar service: token masks from JSON Schema, regex and Lark grammars."""

    port: int = setting(50053, "Port of the gRPC server; 0 = any free one.", most=LAST_PORT)
    compile_timeout: float = setting(5.0, "Most CPU seconds to compile a grammar.", least=INSTANT)
    compile_concurrency: int = setting(
        2, "Quick grammars compiled at once, and also slow grammars compiled at once.", least=1
    )
    max_grammar_bytes: int = setting(256 * 1024, "Largest grammar, in bytes.", least=1)
    cache_entries: int = setting(
        1024, "Most cached grammars; the least recently used is evicted.", least=1
    )
    cache_bytes: int = setting(
        512 * 1024**2, "Most memory of all cached grammars, in bytes.", least=1, most=2**50
    )


class GrammarApplication(Application):
    """The vocabulary, the compile process and the servicer."""

    def __init__(self, settings: GrammarSettings) -> None:
        super().__init__()
        os.environ.setdefault("RUST_MIN_STACK", str(_MASK_STACK))
        model = settings.model
        self._model = settings.model_id or served_name(model)
        self._compiler = Compiler(model, settings.compile_timeout, settings.compile_concurrency)
        self._servicer: GrammarServicer | None = None
        """None: the checkpoint generates nothing, so its tokenizer may be of any kind"""
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
