"""Vectors of small encoders on the device, beside float32 on the CPU."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu.context import Context, Rows, release
from services.engine.engine import Engine
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.tensors import FoundTensor, StoredTensor, TensorFiles
from services.engine.model.encoder_reader import EncoderReader
from services.engine.model.operators.torch_operators import TorchOperators
from services.engine.settings import EngineSettings

__all__ = ["check_vectors"]

_LEAST_COSINE = 0.99
_CPU = torch.device("cpu")
_SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 514,
    "pad_token_id": 1,
}
_ENCODERS: Mapping[str, dict[str, Any]] = {
    "bert": {"architectures": ["BertModel"]},
    "xlm roberta": {"architectures": ["XLMRobertaModel"], "type_vocab_size": 1},
    "modernbert": {"architectures": ["ModernBertModel"], "local_attention": 64},
    "mpnet": {"architectures": ["MPNetModel"]},
    "nomic": {"architectures": ["NomicBertModel"], "hidden_act": "silu"},
}
_LENGTHS = (1, 7, 64, 65, 300, 500)


def check_vectors(context: Context) -> Rows:
    """Compare the mean of each text's hidden states by its cosine; the device's is bfloat16."""
    device = context.device
    texts = [random.Random(size).choices(range(3, 900), k=size) for size in _LENGTHS]
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    for name in context.size(tuple(_ENCODERS), tuple(_ENCODERS)[:2]):
        path = _make(context.checkpoints / f"encoder-{name}", _ENCODERS[name])
        try:
            found = _vectors(path, dtype, device, texts)
            exact = _vectors(path, "float32", _CPU, texts)
            least = torch.cosine_similarity(found, exact, dim=1).min().item()
            yield {"encoder": name, "least cosine": least, "ok": least >= _LEAST_COSINE}
        except Exception as error:  # one encoder must not hide the others
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"[:200]
            yield {"encoder": name, "ok": False, "failure": failure}
        release()


def _vectors(
    path: Path, dtype: str, device: torch.device, texts: Sequence[Sequence[int]]
) -> Tensor:
    with Engine(path, EngineSettings(dtype=dtype, device=device.type)) as engine:
        return engine.embed(texts)


def _make(out: Path, config: Mapping[str, Any]) -> Path:
    """Make a checkpoint with random weights, unless it is there."""
    if (out / "config.json").exists():
        return out
    out.mkdir(parents=True)
    values = {**_SHAPE, **config}
    maker = _RandomTensors(out)
    spec, operators = ModelSpec.from_config(values), TorchOperators(torch.float32, _CPU)
    reader = EncoderReader(maker, spec, torch.float32, _CPU, operators, shows_progress=False)
    reader.read()
    save_file(maker.made, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(values))
    return out


class _RandomTensors(TensorFiles):
    """Makes up every tensor that a reader asks for."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.made: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(1)

    def __exit__(self, *failure: object) -> None:
        pass

    def holds(self, name: str) -> bool:
        return True

    def require(
        self,
        wanted: Iterable[StoredTensor],
        ignored: Sequence[str],
        among: Sequence[str] = ("*",),
    ) -> int:
        return sum(1 for _ in wanted)

    def num_bytes(self, stored: StoredTensor) -> int:
        return 0

    def _num_bytes(self, stored: StoredTensor, found: FoundTensor) -> int:
        return 0

    def tensor(self, stored: StoredTensor) -> Tensor:
        weight = torch.randn(stored.shape, generator=self._generator)
        if len(stored.shape) == 1:
            weight = weight * 0.1 + (0 if stored.name.endswith(".bias") else 1)
        elif "embeddings" not in stored.name:
            weight *= stored.shape[-1] ** -0.5
        self.made[stored.name] = weight
        return weight
