"""Models whose weights stay in the mapped file."""

import logging
import os
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaConfig

from services.common.host_memory import in_units
from services.common.model_files.checkpoint import opened_checkpoint
from services.common.settings import StartupError
from services.engine import start_check
from services.engine.engine import Engine
from services.engine.execution.loaded_model import _announce_mapped
from services.engine.kernels.library import InstructionSet, native
from services.engine.model.checkpoint.stored_weights import StoredWeights
from services.engine.model.loader import load_model
from services.engine.model.model import Model
from services.engine.settings import EngineSettings
from services.engine.start_check import check_start, require_room, stored_weights
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, make_packed_checkpoint
from tests.unit.engine.checkpoints.shapes import SHAPE
from tests.unit.engine.gguf_checkpoints import write_gguf

TOKENS = 60
K = GGMLQuantizationType
ROOMY = SHAPE | {"hidden_size": 256, "intermediate_size": 512}
MODELS = {
    "llama": (LlamaConfig(**ROOMY), K.Q4_K),
    "granite moe": (CONFIGS["granite moe"], K.Q8_0),
    "qwen3.5 moe": (CONFIGS["qwen3.5 moe"], K.Q8_0),
    "gpt-oss": (CONFIGS["gpt-oss"], K.MXFP4),
}

if native is None or native.instruction_set() < InstructionSet.AVX2:
    pytest.skip("the kernels were not built", allow_module_level=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_weights_in_memory(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    config, kind = MODELS[name]
    write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "checkpoint", config), kind)
    assert_same_logits(tmp_path / "model.gguf", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_in_mxfp4_stay_in_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    make_packed_checkpoint(tmp_path)
    assert stored_weights(tmp_path).mapped_bytes > 0
    assert_same_logits(tmp_path, dtype)


def assert_same_logits(path: Path, dtype: torch.dtype) -> None:
    logits = []
    tokens = random_tokens(TOKENS, 1)
    for weights in ("full", "mapped"):
        driver = Driver(loaded(path, weights, dtype), [tokens], block_size=32)
        driver.step([(0, TOKENS - 3)])
        for _ in range(3):
            driver.step([(0, 1)])
        logits.append(driver.logits[0])
    assert torch.equal(*logits)


def loaded(path: Path, weights: str, dtype: torch.dtype = torch.float32) -> Model:
    with opened_checkpoint(path) as directory:
        return load_model(directory, dtype, weights=weights)


def test_file_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    """Linux refuses a mapping of such a file that could be written."""
    model = make_checkpoint(tmp_path / "checkpoint", LlamaConfig(**ROOMY))
    write_gguf(tmp_path / "model.gguf", model, K.Q4_K)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    os.truncate(tmp_path / "model.gguf", 2 * memory)
    assert_same_logits(tmp_path / "model.gguf", torch.float32)


@pytest.mark.parametrize(
    ("kind", "dtype", "reason"),
    [
        (K.F16, torch.float32, "has no quantized weights"),
        (K.IQ2_XS, torch.float32, "has weights in IQ2_XS, which are decoded"),
        (K.Q4_K, torch.float16, "needs a CPU with AVX2, .* --dtype bfloat16 or float32"),
    ],
    ids=str,
)
def test_weights_that_products_cannot_read_are_refused(
    tmp_path: Path, kind: K, dtype: torch.dtype, reason: str
) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", LlamaConfig(**ROOMY))
    write_gguf(tmp_path / "model.gguf", model, kind)
    with pytest.raises(StartupError, match=f"^--weights mapped .*{reason}"):
        loaded(tmp_path / "model.gguf", "mapped", dtype)


def test_weights_behind_layer_norms_are_refused(tmp_path: Path) -> None:
    """All of them would be decoded into memory."""
    model = make_checkpoint(tmp_path / "checkpoint", CONFIGS["starcoder2"])
    write_gguf(tmp_path / "model.gguf", model, K.Q8_0)
    with pytest.raises(StartupError, match="has weights behind LayerNorms, which are decoded"):
        loaded(tmp_path / "model.gguf", "mapped")


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "code", "is_offered"),
    [
        ("llama", K.Q8_0, "float32", "auto", True),
        ("llama", K.IQ2_XS, "float32", "auto", False),
        ("llama", K.NVFP4, "float32", "auto", False),
        ("llama", K.Q8_0, "float16", "auto", False),
        ("llama", K.Q8_0, "float32", "transformers", False),
        ("starcoder2", K.Q8_0, "float32", "auto", False),
    ],
    ids=str,
)
def test_start_offers_mapped_weights_only_where_they_would_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: K,
    dtype: str,
    code: str,
    is_offered: bool,
) -> None:
    model = make_checkpoint(
        tmp_path / "checkpoint", LlamaConfig(**ROOMY) if name == "llama" else CONFIGS[name]
    )
    file = tmp_path / "model.gguf"
    write_gguf(file, model, kind)
    weights = stored_weights(file)
    free = weights.num_bytes("full", 2 if dtype == "float16" else 4) - 1
    monkeypatch.setattr(start_check, "free_host_memory", lambda: free)
    remedy = "start with --weights mapped" if is_offered else "serve a smaller model"
    with pytest.raises(StartupError, match=remedy):
        check_start(EngineSettings(model=file, device="cpu", dtype=dtype, model_code=code))


def test_start_needs_memory_for_the_other_weights_alone(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", LlamaConfig(**ROOMY))
    write_gguf(tmp_path / "model.gguf", model, K.Q4_K)
    weights = stored_weights(tmp_path / "model.gguf")
    norms = weights.num_bytes("mapped", 4)
    assert norms == weights.num_bytes("full", 4) - weights.mapped_bytes
    require_room(weights, "mapped", norms, 4, ())
    with pytest.raises(StartupError, match="start with --weights mapped, which reads them from"):
        require_room(weights, "full", norms, 4, ("mapped",))


def test_start_says_how_large_the_mapped_weights_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that steps have to read explains their speed."""
    model = make_checkpoint(tmp_path / "checkpoint", LlamaConfig(**ROOMY))
    write_gguf(tmp_path / "model.gguf", model, K.Q4_K)
    size = stored_weights(tmp_path / "model.gguf").mapped_bytes
    settings = EngineSettings(weights="mapped", dtype="float32", kv_memory="1MiB", device="cpu")
    with caplog.at_level(logging.INFO), Engine(tmp_path / "model.gguf", settings):
        pass
    assert f"{in_units(size)} of weights stay in the file; its pages fit into memory" in caplog.text
    _announce_mapped(size, free=size - 1)
    warning = caplog.records[-1]
    assert warning.levelno == logging.WARNING
    assert warning.getMessage().startswith(
        f"{in_units(size)} of weights stay in the file, and only"
    )


def test_weights_that_are_packed_anew_are_not_sent_to_the_file() -> None:
    packed = StoredWeights(floats=0, coded=10, coded_bytes=10)
    with pytest.raises(StartupError, match="serve a smaller model"):
        require_room(packed, "full", 5, 4, ("mapped", "int4"))
