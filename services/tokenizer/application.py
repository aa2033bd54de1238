"""The service as a whole: its settings, and what it starts and stops."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.common.server import Application
from services.common.settings import (
    LAST_PORT,
    StartupError,
    StreamSettings,
    require_directory,
    setting,
)
from services.tokenizer.chat.answer.tool_formats import (
    JSON_FORMAT,
    REASONING_FORMATS,
    TOOL_FORMATS,
    answer_marks,
)
from services.tokenizer.chat.prompt import ChatTemplates
from services.tokenizer.completion.completion import Completions
from services.tokenizer.completion_service import CompletionServicer, Works
from services.tokenizer.engine_link import EngineLink, LinkSettings
from services.tokenizer.text.infill import INFILL_FAMILIES, InfillTemplate, detect_infill
from services.tokenizer.text.vocabulary import Vocabulary
from services.tokenizer.tokenizer_service import TokenizerServicer
from tokenwire.channel import LOST_SECONDS
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import add_CompletionServiceServicer_to_server
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import add_TokenizerServiceServicer_to_server

__all__ = ["TokenizerApplication", "TokenizerSettings"]


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings(StreamSettings):
    """Text to token ids and back, and completions at text level."""

    port: int = setting(50051, "Port of the gRPC server; 0 = any free one.", most=LAST_PORT)
    model: Path = setting(Path(), "Directory of the checkpoint, in the Hugging Face format.")
    model_id: str = setting("", "Name of the model for clients; empty = the directory's.")
    engine: str = setting("127.0.0.1:50052", "Address of the engine, host:port.")
    engine_wait: float = setting(
        60.0,
        "Seconds that requests wait for an engine that stops or was lost; longer while it loads.",
    )
    lost_seconds: float = setting(
        LOST_SECONDS, "Seconds of silence after which the engine is taken for lost.", least=1
    )
    max_waiting: int = setting(
        1024, "New requests that may wait for the engine to come back; more are refused."
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
        "append",
        "What becomes of `suffix` on a model without infill.",
        choices=("append", "error"),
    )
    tool_format: str = setting(
        "auto",
        "How the model writes the calls of tools; auto = by its chat templates.",
        choices=("auto", *(form.name for form in (*TOOL_FORMATS, JSON_FORMAT))),
    )
    reasoning_format: str = setting(
        "auto",
        "How the model sets its reasoning apart; auto = by its chat templates.",
        choices=("auto", "none", *(form.name for form in REASONING_FORMATS)),
    )


class TokenizerApplication(Application):
    """Both servicers, and the link to the engine that they share."""

    def __init__(self, settings: TokenizerSettings) -> None:
        """Raises StartupError when settings or checkpoint can't be served."""
        super().__init__()
        if settings.model == Path():
            raise StartupError("--model must name the directory of a checkpoint.")
        directory = require_directory(settings.model, "The model directory")
        model = settings.model_id or directory.resolve().name
        vocabulary = Vocabulary(directory, answer_marks())
        infill = _infill_template(settings.infill, vocabulary)
        link_settings = LinkSettings(
            target=settings.engine,
            model=model,
            max_logprobs=settings.max_logprobs,
            max_stop_strings=settings.max_stop_strings,
            appends_suffix=settings.suffix_fallback == "append",
            wait_seconds=settings.engine_wait,
            lost_seconds=settings.lost_seconds,
            max_waiting=settings.max_waiting,
        )
        self._link = EngineLink(link_settings, vocabulary, self.set_serving)
        self._completions = Completions(self._link)
        self._templates = ChatTemplates(
            vocabulary,
            model,
            tool_format=settings.tool_format,
            reasoning_format=settings.reasoning_format,
        )
        works = Works(vocabulary, infill, self._templates)
        created = int((directory / "tokenizer.json").stat().st_mtime)
        self._completion_servicer = CompletionServicer(
            self._completions, works, model, created, settings
        )
        self._tokenizer_servicer = TokenizerServicer(
            vocabulary, infill, self._templates, self._link, model
        )

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Both services."""
        add_CompletionServiceServicer_to_server(self._completion_servicer, server)
        add_TokenizerServiceServicer_to_server(self._tokenizer_servicer, server)
        return [
            completion_pb2.DESCRIPTOR.services_by_name["CompletionService"].full_name,
            tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name,
        ]

    async def start(self) -> None:
        """Returns when the engine serves."""
        self._templates.start()
        await self._link.start()

    async def drain(self) -> None:
        """Refuse new completions; returns when those that run have ended."""
        await self._completions.drain()

    async def stop(self) -> None:
        """End the Session to the engine, and what renders templates."""
        await self._link.close()
        await self._templates.stop()


def _infill_template(setting: str, vocabulary: Vocabulary) -> InfillTemplate | None:
    if setting == "none":
        return None
    families = [family for family in INFILL_FAMILIES if setting in ("auto", family.name)]
    template = detect_infill(vocabulary.ids, vocabulary.bos_id, families)
    if template is None and setting != "auto":
        raise StartupError(f"The vocabulary has no infill tokens of the family {setting}.")
    return template
