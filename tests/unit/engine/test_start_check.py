"""Checks before torch is loaded: the architecture, and the memory for the weights."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.gguf.gguf_file import GgufFile
from services.common.host_memory import in_units
from services.common.model_files.checkpoint import opened_checkpoint
from services.common.settings import StartupError
from services.engine import start_check
from services.engine.model.checkpoint.config import Config
from services.engine.model.checkpoint.stored_weights import StoredWeights
from services.engine.settings import EngineSettings
from services.engine.start_check import (
    check_room,
    check_start,
    gpu_memory_by_weights,
    needed_bytes,
    require_room,
    stored_weights,
)
from tests.text_models import make_jina_v3, make_jina_v5, make_jina_v5_nano
from tests.unit.engine.mmproj_checkpoints import write_pair
from tests.unit.engine.tiny import make_checkpoint

FLOAT32 = 4


def test_unknown_architecture_is_refused_without_loading(tmp_path: Path) -> None:
    file = make_checkpoint(tmp_path) / "config.json"
    check_start(EngineSettings(model=tmp_path))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["Unheard"]}))
    with pytest.raises(StartupError, match="the architecture Unheard is not supported"):
        check_start(EngineSettings(model=tmp_path))


def test_weights_that_cannot_fit_are_refused_with_the_format_that_would(tmp_path: Path) -> None:
    weights = stored_weights(make_checkpoint(tmp_path))
    whole = weights.num_bytes("full", FLOAT32)
    assert weights.num_bytes("int8", FLOAT32) == whole // 4
    require_room(weights, "full", whole, FLOAT32, ("int8", "int4"))
    with pytest.raises(StartupError, match=r"1 bytes of memory are missing\..* --weights int8"):
        require_room(weights, "full", whole - 1, FLOAT32, ("int8", "int4"))
    with pytest.raises(StartupError, match="start with --weights int4"):
        require_room(weights, "full", whole // 5, FLOAT32, ("int8", "int4"))
    with pytest.raises(StartupError, match="serve a smaller model"):
        require_room(weights, "full", whole // 20, FLOAT32, ("int8", "int4"))


def test_decoded_weights_that_cannot_fit_are_refused_with_those_that_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((make_checkpoint(tmp_path) / "config.json").read_text())
    save_file({"a.weight": torch.zeros(64, 64).half()}, tmp_path / "model.safetensors")
    decoded, stored = 64 * 64 * 4, 64 * 64 * 2
    monkeypatch.setattr(start_check, "_processor_flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    monkeypatch.setattr(start_check, "free_host_memory", lambda: stored)
    settings = EngineSettings(model=tmp_path, device="cpu", weights="decoded")
    weights = stored_weights(tmp_path)
    assert weights.num_bytes("decoded", None) == decoded
    with pytest.raises(StartupError, match="start with --weights full"):
        check_room(weights, Config(str(tmp_path), config), settings)


def test_vision_tower_that_cannot_fit_is_refused_with_the_flag_that_leaves_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image encoder would end without a reason, or another process of the machine."""
    write_pair(tmp_path, "gemma3")
    settings = EngineSettings(model=tmp_path / "model.gguf", device="cpu", dtype="float32")
    tensors = GgufFile(tmp_path / "mmproj-model.gguf").tensors.values()
    tower = sum(math.prod(tensor.shape) for tensor in tensors) * FLOAT32
    blind = replace(settings, vision="off", kv_memory="1MiB")
    assert needed_bytes(replace(blind, vision="auto")) == needed_bytes(blind) + tower
    room = needed_bytes(blind) - (1 << 20) + tower
    monkeypatch.setattr(start_check, "free_host_memory", lambda: room)
    check_start(settings)
    monkeypatch.setattr(start_check, "free_host_memory", lambda: room - 1)
    check_start(replace(settings, vision="off"))
    with pytest.raises(StartupError, match=r"tower .* 1 bytes of memory .* --vision off"):
        check_start(settings)
    with (
        opened_checkpoint(settings.model, "") as directory,
        pytest.raises(StartupError, match="The vision tower in the mmproj file"),
    ):
        check_start(replace(settings, model=directory))


def test_weights_that_stay_as_they_are_need_the_memory_of_their_file(tmp_path: Path) -> None:
    numbers = {"a.weight": torch.zeros(4, 8, dtype=torch.bfloat16), "b.weight": torch.zeros(3)}
    save_file(numbers, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    weights = stored_weights(tmp_path)
    assert weights.num_bytes("full", None) == 4 * 8 * 2 + 3 * 4
    assert weights.num_bytes("full", FLOAT32) == weights.num_bytes("decoded", None) == 35 * 4


def test_gpu_holds_codes_as_small_as_the_file_and_the_table_of_tokens(tmp_path: Path) -> None:
    """70 billion weights in 4 bits fit one card; decoded at loading they would not."""
    rows = {"lm_head.weight": torch.zeros(8, 4, dtype=torch.bfloat16)}
    rows["model.embed_tokens.weight"] = torch.zeros(8, 4, dtype=torch.bfloat16)
    save_file(
        rows | {"layer.qweight": torch.zeros(100, dtype=torch.int32)}, tmp_path / "a.safetensors"
    )
    weights = StoredWeights.of_directory(tmp_path)
    assert weights.on_gpu(packs=True).num_bytes("full", 2) == 400 + 2 * 32 * 2
    assert weights.on_gpu(packs=False).num_bytes("full", 2) == 2 * 400 + 2 * 32 * 2
    (tmp_path / "config.json").write_text("{}")
    assert gpu_memory_by_weights(tmp_path) == {"full": 528, "decoded": 928}
    with pytest.raises(StartupError, match=r"serve a smaller model\.$"):
        require_room(weights.on_gpu(packs=False), "full", 600, 2, ("fp8",))


def test_gpu_holds_weights_of_an_fp8_checkpoint_in_a_byte_each(tmp_path: Path) -> None:
    """A card of 80 GB holds 70 billion of them, and the check before loading must say so."""
    save_file({"a.weight": torch.zeros(64, 64).to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert gpu_memory_by_weights(tmp_path) == {"full": 64 * 64, "decoded": 64 * 64 * 2}


@pytest.mark.parametrize("make", [make_jina_v3, make_jina_v5, make_jina_v5_nano])
def test_adapters_of_tasks_count_in_the_memory_of_the_weights(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    """Else an engine whose adapters don't fit is killed while it loads them."""
    base = sum(tensor.numel() for tensor in make(tmp_path).state_dict().values())
    weights = stored_weights(tmp_path)
    stored = [load_file(file) for file in tmp_path.rglob("*.safetensors")]
    held = sum(t.numel() for tensors in stored for name, t in tensors.items() if ".lora_" in name)
    assert weights.adapters == held > 0
    assert weights.num_bytes("full", FLOAT32) == (base + held) * FLOAT32
    assert weights.num_bytes("int8", FLOAT32) == base + held * FLOAT32
    with pytest.raises(StartupError, match=re.escape(f"{in_units(held * FLOAT32)} of memory are")):
        require_room(weights, "full", base * FLOAT32, FLOAT32, ())
