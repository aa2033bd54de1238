"""Models that transformers' code can't serve here are refused by name, before weights are read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    XLNetConfig,
)

import services.engine.model.checkpoint.model_code
from services.common.settings import StartupError
from services.engine.execution.model_loader import load_any_model
from services.engine.model.checkpoint.config import CheckpointError

REFUSED = {
    "XLNetLMHeadModel": (XLNetConfig(n_layer=2), "its layers take no positions"),
    "MambaForCausalLM": (MambaConfig(num_hidden_layers=2), "its layers are recurrent"),
    "BertLMHeadModel": (BertConfig(num_hidden_layers=2), "its tokens see later tokens"),
    "Llama4ForCausalLM": (
        Llama4TextConfig(num_hidden_layers=2),
        "it has layers of the type chunked_attention",
    ),
}


def write_config(directory: Path, values: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("architecture", REFUSED)
def test_model_that_pages_cannot_serve_is_refused_by_name_and_reason(
    architecture: str, tmp_path: Path
) -> None:
    config, reason = REFUSED[architecture]
    write_config(tmp_path, config.to_dict() | {"architectures": [architecture]})
    with pytest.raises(CheckpointError, match=f"{architecture} can't be served on .*: {reason}"):
        load_any_model(tmp_path, torch.float32, "transformers")


def test_code_of_a_checkpoint_never_runs(tmp_path: Path) -> None:
    (tmp_path / "modeling_mine.py").write_text("raise SystemExit('ran')")
    code = {"AutoModelForCausalLM": "modeling_mine.Mine", "AutoConfig": "modeling_mine.MyConfig"}
    write_config(tmp_path, {"architectures": ["Mine"], "model_type": "mine", "auto_map": code})
    with pytest.raises(CheckpointError, match=r"Mine is not supported.*auto_map.*never runs"):
        load_any_model(tmp_path, torch.float32)


def test_missing_transformers_is_named_with_the_extra_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services.engine.model.checkpoint.model_code, "find_spec", lambda name: None)
    write_config(tmp_path, {"architectures": ["HeliumForCausalLM"], "model_type": "helium"})
    with pytest.raises(CheckpointError, match=r"pip install .*transformers"):
        load_any_model(tmp_path, torch.float32)


def test_rotation_that_depends_on_other_sequences_is_refused(tmp_path: Path) -> None:
    factors = {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
    rotation = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **factors}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=1, rope_parameters=rotation
    )
    write_config(tmp_path, config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(CheckpointError, match="longrope"):
        load_any_model(tmp_path, torch.float32, "transformers")


def test_cache_type_that_this_machine_lacks_is_refused_before_weights_are_read(
    tmp_path: Path,
) -> None:
    """A large model would load for a minute first. This checkpoint has no weights to read."""
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    write_config(tmp_path, config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(StartupError, match="--kv-dtype int8: only the compiled CPU kernels"):
        load_any_model(tmp_path, torch.float16, "transformers", kv_dtype="int8")
