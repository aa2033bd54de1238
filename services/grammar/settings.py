"""Settings of the grammar service, from flags and environment variables."""

from dataclasses import dataclass

from services.common.settings import (
    INSTANT,
    LAST_PORT,
    CheckpointSettings,
    ServerSettings,
    setting,
)

__all__ = ["GrammarSettings"]


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
