"""Settings of the tokenizer service, from flags and environment variables."""

from dataclasses import dataclass

from services.common.settings import (
    LAST_PORT,
    CheckpointSettings,
    LimitSettings,
    PeerSettings,
    ReportSettings,
    StreamSettings,
    setting,
)
from services.tokenizer.chat.answer.reasoning_formats import REASONING_FORMATS
from services.tokenizer.chat.answer.tool_formats import JSON_FORMAT, TOOL_FORMATS
from services.tokenizer.text.infill import INFILL_FAMILIES
from tokenwire.channel_options import LOST_SECONDS

__all__ = ["TokenizerSettings"]


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings(
    StreamSettings, PeerSettings, LimitSettings, ReportSettings, CheckpointSettings
):
    """Encoding and decoding of text, and completions and chats in text."""

    port: int = setting(50051, "Port of the gRPC server; 0 = any free one.", most=LAST_PORT)
    engine: str = setting(
        "127.0.0.1:50052",
        "Engines of the model: host:port or dns:///name:port, several separated by commas.",
    )
    engine_wait: float = setting(
        60.0,
        "Seconds that requests wait if no engine serves, besides the time that it loads.",
    )
    lost_seconds: float = setting(
        LOST_SECONDS, "Seconds of silence after which the engine counts as lost.", least=1
    )
    max_waiting: int = setting(
        1024, "Most new requests that wait for an engine that stops or was lost."
    )
    max_logprobs: int = setting(
        5, "Most candidates per token that a request may ask for, up to 20.", most=20
    )
    max_stop_strings: int = setting(16, "Most stop strings that a request may have.")
    infill: str = setting(
        "auto",
        "Family of infill tokens; auto = by the vocabulary.",
        choices=("auto", "none", *(family.name for family in INFILL_FAMILIES)),
    )
    suffix_fallback: str = setting(
        "append", "Treatment of `suffix` on a model that can't infill.", choices=("append", "error")
    )
    chat_template: str = setting(
        "", "File (Jinja) of the default chat template; empty = the checkpoint's."
    )
    tool_format: str = setting(
        "auto",
        "Form of the model's tool calls; auto = by its chat templates.",
        choices=("auto", *(form.name for form in (*TOOL_FORMATS, JSON_FORMAT))),
    )
    reasoning_format: str = setting(
        "auto",
        "Form of the model's reasoning; auto = by its chat templates.",
        choices=("auto", "none", *(form.name for form in REASONING_FORMATS)),
    )
    vllm_metrics: bool = setting(
        False, "Serve the load of the engines also under vLLM's names, for routers that know them."
    )
    vllm_api: bool = setting(
        False,
        "Serve vLLM's gRPC too, for gateways. It tells its clients the prompts' token ids.",
    )
