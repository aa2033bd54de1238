"""Lifecycle of the tokenizer service."""

import asyncio
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from prometheus_client import REGISTRY

from services.common.model_files.checkpoint_facts import checkpoint_facts
from services.common.model_files.checkpoint_folder import served_name
from services.common.peers.targets import parse_targets, warn_of_clear_text
from services.common.server import Application
from services.common.settings import StartupError
from services.common.telemetry import describe_build
from services.common.vllm_metrics import ModelLoad, VllmLoadMetrics
from services.tokenizer.chat.answer.tool_formats import answer_marks
from services.tokenizer.chat.chat_templates import ChatTemplates
from services.tokenizer.completion.completion_registry import CompletionRegistry
from services.tokenizer.completion_service import CompletionServicer
from services.tokenizer.embedding.embedding_calls import EmbeddingCalls
from services.tokenizer.embedding.label_names import LabelNames
from services.tokenizer.embedding.late_interaction import LateInteraction
from services.tokenizer.embedding.pair_template import PairTemplate
from services.tokenizer.embedding.sentence_prompts import SentencePrompts
from services.tokenizer.embedding.task_prompts import TaskPrompts
from services.tokenizer.engines.engine_pool import EnginePool, PoolSettings
from services.tokenizer.images.families import image_tokens, read_image_family
from services.tokenizer.images.image_reader import ImageReader
from services.tokenizer.images.processor_settings import read_processor_settings
from services.tokenizer.model_status import model_load
from services.tokenizer.orca_service import OrcaServicer
from services.tokenizer.processor_factory import ProcessorFactory
from services.tokenizer.settings import TokenizerSettings
from services.tokenizer.text.infill import INFILL_FAMILIES, InfillTemplate, detect_infill
from services.tokenizer.text.vocabulary import Vocabulary
from services.tokenizer.tokenizer_service import TokenizerServicer
from tokenwire.extras import install_command
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import add_CompletionServiceServicer_to_server
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import add_TokenizerServiceServicer_to_server

if TYPE_CHECKING:
    from services.tokenizer.vllm_api.facade import VllmFacade

__all__ = ["TokenizerApplication"]


_COMPLETION = completion_pb2.DESCRIPTOR.services_by_name["CompletionService"].full_name


class TokenizerApplication(Application):
    """The gRPC services, and their connection to the engines."""

    peer_methods = frozenset(f"/{_COMPLETION}/{name}" for name in ("LoadAdapter", "UnloadAdapter"))

    def __init__(self, settings: TokenizerSettings) -> None:
        """Load the checkpoint. Raises StartupError if the checkpoint or a setting can't be used."""
        super().__init__()
        directory = settings.model
        model = self._model = settings.model_id or served_name(directory)
        processor = read_processor_settings(directory)
        template = Path(settings.chat_template) if settings.chat_template else None
        vocabulary = Vocabulary(directory, answer_marks() | image_tokens(processor), template)
        family = read_image_family(processor, vocabulary)
        infill = _infill_template(settings.infill, vocabulary)
        pool_settings = PoolSettings(
            targets=parse_targets(settings.engine, "--engine"),
            model=model,
            max_logprobs=settings.max_logprobs,
            max_stop_strings=settings.max_stop_strings,
            appends_suffix=settings.suffix_fallback == "append",
            wait_seconds=settings.engine_wait,
            lost_seconds=settings.lost_seconds,
            max_waiting=settings.max_waiting,
            tls=settings.peer_tls,
            knows_blocks=settings.vllm_api,
            token=settings.peer_token,
        )
        warn_of_clear_text(pool_settings.targets, settings)
        self._pool = EnginePool(pool_settings, vocabulary, self.set_serving)
        self._registry = CompletionRegistry(self._pool)
        self._images = ImageReader(family, vocabulary, model)
        self._templates = ChatTemplates(
            vocabulary,
            model,
            family,
            tool_format=settings.tool_format,
            reasoning_format=settings.reasoning_format,
        )
        processors = ProcessorFactory(vocabulary, infill, self._templates, self._images)
        prompts = SentencePrompts(directory, vocabulary)
        labels = LabelNames(directory)
        late = self._late = LateInteraction(directory, vocabulary)
        pair_template = PairTemplate.among(vocabulary.chat_templates)
        self._embeddings = EmbeddingCalls(
            vocabulary,
            prompts,
            labels,
            late,
            pair_template,
            TaskPrompts(directory, vocabulary),
            self._pool,
        )
        self._completion_servicer = CompletionServicer(
            self._registry,
            processors,
            self._embeddings,
            self._pool,
            model,
            int((directory / "tokenizer.json").stat().st_mtime),
            checkpoint_facts(directory),
            settings,
        )
        self._tokenizer_servicer = TokenizerServicer(
            vocabulary, infill, self._templates, self._images, self._pool, model
        )
        self._orca_servicer = OrcaServicer(self._pool)
        self._has_vllm_metrics = settings.vllm_metrics
        self._facade: VllmFacade | None = None
        if settings.vllm_api:
            make = _facade_type()
            self.peer_methods |= make.peer_methods
            self._facade = make(self._registry, processors, self._pool, model, directory, settings)

    @property
    def model(self) -> str:
        return self._model

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add the services to the server; return their full names."""
        self._orca_servicer.register(server)
        add_CompletionServiceServicer_to_server(self._completion_servicer, server)
        add_TokenizerServiceServicer_to_server(self._tokenizer_servicer, server)
        return [
            _COMPLETION,
            tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name,
            *(self._facade.register(server) if self._facade is not None else ()),
        ]

    async def start(self) -> None:
        """Wait until an engine serves. Raises StartupError if it can't encode queries."""
        describe_build("tokenizer")
        if self._has_vllm_metrics:
            self._pool.follow_load()
            REGISTRY.register(VllmLoadMetrics(self._loads))
        self._templates.start()
        await self._pool.start(self._registry.move_from)
        self._late.check(self._pool.limits)

    async def drain(self) -> None:
        """Refuse new completions; return when the running ones have ended."""
        self._orca_servicer.drain()
        await asyncio.gather(self._registry.drain(), self._embeddings.drain())

    async def stop(self) -> None:
        """End the Sessions to the engines, the render process and the image decoders' threads."""
        self._images.close()
        await self._pool.close()
        await self._templates.stop()

    def _loads(self) -> Sequence[ModelLoad]:
        load = model_load(self._model, self._pool.loads())
        return [] if load is None else [load]


def _facade_type() -> "type[VllmFacade]":
    """Import the façade, which needs the extra vllm_api. Raises StartupError without it."""
    if importlib.util.find_spec("smg_grpc_proto") is None:
        raise StartupError(
            f"--vllm-api needs the package smg-grpc-proto: {install_command('vllm_api')}"
        )
    from services.tokenizer.vllm_api.facade import VllmFacade

    return VllmFacade


def _infill_template(setting: str, vocabulary: Vocabulary) -> InfillTemplate | None:
    if setting == "none":
        return None
    families = [family for family in INFILL_FAMILIES if setting in ("auto", family.name)]
    template = detect_infill(vocabulary.ids, vocabulary.bos_id, families)
    if template is None and setting != "auto":
        raise StartupError(
            f"The vocabulary has no infill tokens of the family {setting}; use --infill auto."
        )
    return template
