"""The gRPC services that gateways call."""

from collections.abc import Sequence
from pathlib import Path

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server

from services.common.settings import StreamSettings
from services.tokenizer.completion.completion_registry import CompletionRegistry
from services.tokenizer.engines.engine_pool import EnginePool
from services.tokenizer.processor_factory import ProcessorFactory
from services.tokenizer.vllm_api.engine_service import VllmEngine
from services.tokenizer.vllm_api.generate_calls import GenerateCalls
from services.tokenizer.vllm_api.inference_service import VllmInference
from services.tokenizer.vllm_api.model_info import ModelInfo
from tokenwire.pb.vllm import inference_pb2
from tokenwire.pb.vllm.inference_pb2_grpc import add_InferenceServicer_to_server

__all__ = ["VllmFacade"]


_ENGINE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name


class VllmFacade:
    """vLLM's services in front of the tokenizer service's own."""

    peer_methods = frozenset(
        f"/{_ENGINE}/{name}" for name in ("Abort", "FlushCache", "SubscribeKvEvents")
    )
    """Methods that concern the requests of others, so that holders of API keys may not call them"""

    def __init__(
        self,
        registry: CompletionRegistry,
        processors: ProcessorFactory,
        pool: EnginePool,
        model: str,
        directory: Path,
        settings: StreamSettings,
    ) -> None:
        """pool: pool that keeps the ids of its engines' blocks. directory: the checkpoint's."""
        calls = GenerateCalls(registry, processors, model, settings)
        info = ModelInfo(model, directory, processors.vocabulary)
        self._engine = VllmEngine(calls, pool, info)
        self._inference = VllmInference(calls)

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add the services to the server; return their full names."""
        add_VllmEngineServicer_to_server(self._engine, server)  # type: ignore[no-untyped-call]
        add_InferenceServicer_to_server(self._inference, server)
        return [
            _ENGINE,
            inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
        ]
