"""Every checkpoint that cannot be served is refused in one sentence naming the file and tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.model.errors import CheckpointError
from services.engine.model.loader import (
    GenerationDefaults,
    load_generation_defaults,
    load_model,
    load_spec,
    resolve_dtype,
)

from .checkpoints import CONFIGS, Driver, make_checkpoint, random_tokens, reference_logits

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    make_checkpoint(path, CONFIGS["llama"])
    return path


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(saved, tmp_path / "checkpoint")


def set_config(path: Path, **values: object) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def set_tensor(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(path / WEIGHTS)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, path / WEIGHTS)


def truncate(path: Path) -> None:
    file = path / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1000])


Q = "model.layers.1.self_attn.q_proj.weight"
SPOILS: list[tuple[str, Callable[[Path], None], list[str]]] = [
    ("no directory", shutil.rmtree, ["checkpoint", "not a directory"]),
    ("no config", lambda p: (p / "config.json").unlink(), ["config.json", "does not exist"]),
    ("no JSON", lambda p: (p / "config.json").write_text("{"), ["config.json", "JSON"]),
    ("no weights", lambda p: (p / WEIGHTS).unlink(), [WEIGHTS, "does not exist"]),
    ("truncated", truncate, [WEIGHTS, "truncated"]),
    ("missing tensor", lambda p: set_tensor(p, Q, None), [Q]),
    ("unexpected tensor", lambda p: set_tensor(p, "stray", torch.ones(1)), [WEIGHTS, "stray"]),
    ("wrong shape", lambda p: set_tensor(p, Q, torch.ones(64, 32)), [WEIGHTS, Q, "[64, 32]"]),
    ("wrong dtype", lambda p: set_tensor(p, Q, torch.ones(64, 64).to(torch.int8)), [Q, "I8"]),
    ("more layers", lambda p: set_config(p, num_hidden_layers=4), ["model.layers.3"]),
    ("fewer layers", lambda p: set_config(p, num_hidden_layers=2), [WEIGHTS, "model.layers.2"]),
    ("wider vocabulary", lambda p: set_config(p, vocab_size=98), ["embed_tokens", "[98, 64]"]),
    (
        "unknown architecture",
        lambda p: set_config(p, architectures=["MambaForCausalLM"]),
        ["MambaForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"],
    ),
    ("no architecture", lambda p: set_config(p, architectures=...), ["architectures"]),
    ("unknown dtype", lambda p: set_config(p, dtype="float8_e4m3fn"), ["float8_e4m3fn"]),
    (
        "quantized",
        lambda p: set_config(p, quantization_config={"quant_method": "awq"}),
        ["quantization_config", "awq"],
    ),
    ("no width", lambda p: set_config(p, hidden_size=...), ["config.json", "hidden_size"]),
    ("text for a number", lambda p: set_config(p, hidden_size="64"), ["hidden_size", '"64"']),
    ("heads", lambda p: set_config(p, num_key_value_heads=3), ["num_key_value_heads"]),
    ("activation", lambda p: set_config(p, hidden_act="gelu"), ["hidden_act", "gelu"]),
    (
        "rope",
        lambda p: set_config(p, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        ["rope_type", "longrope", "yarn"],
    ),
]


@pytest.mark.parametrize(
    ("spoil", "named"), [case[1:] for case in SPOILS], ids=[case[0] for case in SPOILS]
)
def test_a_spoilt_checkpoint_is_refused(
    checkpoint: Path, spoil: Callable[[Path], None], named: list[str]
) -> None:
    spoil(checkpoint)
    with pytest.raises(CheckpointError) as refusal:
        load_model(checkpoint, torch.float32)
    message = str(refusal.value)
    assert message.endswith(".")
    assert "\n" not in message
    for part in named:
        assert part in message


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, CONFIGS["qwen2, tied"], shard="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    tokens = random_tokens(20, 1)
    driver = Driver(load_model(tmp_path, torch.float32), [tokens])
    driver.step([(0, 20)])
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load_model(tmp_path, torch.float32)


def test_an_index_cannot_point_outside(checkpoint: Path) -> None:
    index = {"weight_map": {Q: "../elsewhere.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside"):
        load_model(checkpoint, torch.float32)


def test_names_of_older_releases_are_read(checkpoint: Path) -> None:
    """rope_theta, rope_scaling and torch_dtype, as checkpoints of before transformers 5 have."""
    new = load_spec(checkpoint)
    rope = json.loads((checkpoint / "config.json").read_text())["rope_parameters"]
    set_config(
        checkpoint,
        rope_parameters=...,
        rope_theta=rope["rope_theta"],
        rope_scaling={"type": "linear", "factor": 2.0},
        dtype=...,
        torch_dtype="bfloat16",
    )
    old = load_spec(checkpoint)
    assert old.dtype == "bfloat16"
    assert old.rotary.frequencies == tuple(f / 2 for f in new.rotary.frequencies)


def test_generation_config_names_the_ends_and_the_sampling(checkpoint: Path) -> None:
    """A chat model ends its turns with an id that config.json does not name."""
    set_config(checkpoint, eos_token_id=2)
    file = checkpoint / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [7, 9], "temperature": 0.6, "top_k": 20}))
    assert load_spec(checkpoint).eos_token_ids == (7, 9)
    assert load_generation_defaults(checkpoint) == GenerationDefaults(temperature=0.6, top_k=20)
    file.write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    assert load_spec(checkpoint).eos_token_ids == (2,)
    assert load_generation_defaults(checkpoint).temperature == 0.0
    file.unlink()
    assert load_generation_defaults(checkpoint) == GenerationDefaults()


def test_weights_convert_to_the_dtype_asked_for(checkpoint: Path) -> None:
    """weight_bytes is what the roofline is drawn from."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        decoder = load_model(checkpoint, dtype)
        assert decoder.dtype == dtype
        numel = sum(t.numel() for t in load_file(checkpoint / WEIGHTS).values())
        embedding = decoder.spec.vocab_size * decoder.spec.hidden_size
        assert decoder.weight_bytes == (numel - embedding) * dtype.itemsize


def test_progress_is_told_where_there_is_no_terminal(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        load_model(checkpoint, torch.float32, progress=True)
        shown = len(caplog.messages)
        load_model(checkpoint, torch.float32)
    assert 1 <= shown == len(caplog.messages) <= 4


def test_dtypes_resolve_by_name() -> None:
    assert resolve_dtype("float16") == torch.float16
    assert resolve_dtype("auto") in (torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match="int4"):
        resolve_dtype("int4")
