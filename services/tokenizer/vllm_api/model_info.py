"""Description of the model for gateways."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2

from services.tokenizer.engines.engine_pool import EnginePool
from services.tokenizer.text.checkpoint_files import read_json
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["ModelInfo"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The checkpoint, under its name for clients."""

    model: str
    directory: Path
    vocabulary: Vocabulary

    def message(self, pool: EnginePool) -> vllm_engine_pb2.GetModelInfoResponse:
        """Return the description. Raises UNAVAILABLE until an engine has answered once."""
        limits, vocabulary = pool.limits, self.vocabulary
        config: Mapping[str, Any] = read_json(self.directory / "config.json")
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=str(self.directory.resolve()),
            is_generation=True,
            max_context_length=limits.context_length,
            vocab_size=limits.vocabulary_size,
            supports_vision=takes_images(limits.capabilities),
            served_model_name=self.model,
            tokenizer_path=str(self.directory.resolve()),
            model_type=str(config.get("model_type") or ""),
            architectures=[str(name) for name in config.get("architectures") or ()],
            eos_token_ids=sorted(limits.eos_ids),
            pad_token_id=vocabulary.pad_id or 0,
            bos_token_id=vocabulary.bos_id or 0,
            max_req_input_len=limits.context_length - 1,
        )


def takes_images(capabilities: Collection["engine_pb2.Capability.ValueType"]) -> bool:
    """Return whether the engines take images."""
    return engine_pb2.CAPABILITY_IMAGES in capabilities
