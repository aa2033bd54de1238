"""config.json of GGUF files: wrong metadata is refused in one sentence with GGUF's own key."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from services.common.gguf.gguf_config import config_of
from services.common.gguf.gguf_file import GgufError, GgufFile

COMMON = {
    "context_length": 64,
    "embedding_length": 8,
    "block_count": 2,
    "feed_forward_length": 16,
    "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
GEMMA4 = {"attention.sliding_window_pattern": 1, "attention.head_count_kv": 2}
"""Keys with one number for all layers in place of a list"""
LATENT = {"rope.dimension_count": 2, "expert_count": 4, "expert_used_count": 2}
GATING = "expert_gating_func"
WRONG: list[tuple[str, Mapping[str, int | float], str]] = [
    ("llama", {"attention.key_length": 0}, "attention.key_length must be .* of at least 1, not 0"),
    ("llama", {"attention.head_count": 0}, "attention.head_count must be .* from 1 to 8, not 0"),
    ("llama", {"attention.head_count": 9}, "attention.head_count must be .* from 1 to 8, not 9"),
    ("llama", {"rope.dimension_count": 0}, "rope.dimension_count must be .* at least 1, not 0"),
    ("llama", {"rope.freq_base": float("nan")}, "rope.freq_base must be a finite number"),
    ("llama", {"nextn_predict_layers": 2}, "nextn_predict_layers must be .* from 0 to 1, not 2"),
    ("gemma2", {"block_count": 46, "attention.head_count": 0}, "attention.head_count must be"),
    *(("gemma4", GEMMA4 | {"block_count": n}, "block_count must be") for n in (0, -1, 2**31)),
    *(("deepseek2", LATENT | {GATING: n}, f"{GATING} must be .* 0 to 2") for n in (-1, 3)),
    *(
        ("deepseek2", LATENT | {"expert_group_count": n}, "expert_group_count must be .* 1, not")
        for n in (-1, 0)
    ),
]


@pytest.mark.parametrize(("architecture", "values", "reason"), WRONG)
def test_wrong_number_is_refused_with_its_key(
    tmp_path: Path, architecture: str, values: Mapping[str, int | float], reason: str
) -> None:
    """A traceback, or 16 GB for the layers of gemma4, would tell nobody which file is damaged."""
    write(tmp_path / "model.gguf", architecture, values)
    assert_refused(tmp_path / "model.gguf", rf": {architecture}\.{reason}")


@pytest.mark.parametrize("shape", [(8,), (2, 3, 8)])
def test_embeddings_of_other_dimensions_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    write(tmp_path / "model.gguf", "llama", embeddings=shape)
    assert_refused(tmp_path / "model.gguf", r": token_embd\.weight must have two dimensions, not ")


def test_biased_experts_without_their_function_are_refused(tmp_path: Path) -> None:
    """A softmax in place of DeepSeek V3's sigmoids would choose other experts."""
    write(tmp_path / "model.gguf", "deepseek2", LATENT, vectors={"blk.1.exp_probs_b.bias": 4})
    assert_refused(tmp_path / "model.gguf", r"deepseek2\.expert_gating_func must be 2")


def test_suppressed_ids_of_a_file_are_read(tmp_path: Path) -> None:
    """Gemma 4's files exclude the ends of images and sounds from answers."""
    ids: dict[str, list[int]] = {"tokenizer.ggml.suppress_tokens": [3, -1, 2]}  # -1: no id
    write(tmp_path / "model.gguf", "llama", lists=ids)
    assert config_of(GgufFile(tmp_path / "model.gguf"))["suppress_tokens"] == [3, -1, 2]
    write(tmp_path / "none.gguf", "llama", lists={"tokenizer.ggml.suppress_tokens": []})
    assert "suppress_tokens" not in config_of(GgufFile(tmp_path / "none.gguf"))


def test_layers_with_indexers_are_known_where_a_file_leaves_them_out(tmp_path: Path) -> None:
    """GLM-5.2's first files; layers without indexers would ask for tensors that nobody wrote."""
    values = LATENT | {
        "context_length": 2**20,
        **{f"attention.{name}_lora_rank": 4 for name in ("q", "kv")},
        **{f"attention.{name}_length_mla": 4 for name in ("key", "value")},
        **{f"attention.indexer.{name}": 2 for name in ("head_count", "key_length", "top_k")},
    }
    write(tmp_path / "model.gguf", "glm-dsa", values)
    config = config_of(GgufFile(tmp_path / "model.gguf"))
    assert (config["index_topk_freq"], config["index_skip_topk_offset"]) == (4, 3)


@pytest.mark.parametrize("count", [5, 2**40, 2**62])
def test_numbers_beyond_the_file_are_refused(tmp_path: Path, count: int) -> None:
    path, name = tmp_path / "model.gguf", b"rope_freqs.weight"
    write(path, "llama", vectors={name.decode(): 4})
    header = name + (1).to_bytes(4, "little")
    content = path.read_bytes()
    assert content.count(header + (4).to_bytes(8, "little")) == 1
    damaged = content.replace(
        header + (4).to_bytes(8, "little"), header + count.to_bytes(8, "little")
    )
    path.write_bytes(damaged[: content.rindex(np.ones(4, np.float32).tobytes()) + 16])
    assert_refused(path, r" is truncated: rope_freqs\.weight ends beyond it")


def assert_refused(path: Path, reason: str) -> None:
    with pytest.raises(GgufError, match=reason) as refused:
        config_of(GgufFile(path))
    message = str(refused.value)
    assert message.startswith(str(path))
    assert message.endswith(".")
    assert "\n" not in message


def write(
    path: Path,
    architecture: str,
    values: Mapping[str, int | float] | None = None,
    *,
    embeddings: tuple[int, ...] = (5, 8),
    vectors: Mapping[str, int] | None = None,
    lists: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Write a file without weights but embeddings, norms and vectors of these sizes."""
    writer = GGUFWriter(path, architecture)
    for key, numbers in (lists or {}).items():
        writer.add_array(key, numbers)
    for key, value in (COMMON | dict(values or {})).items():
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif value < 0:
            writer.add_int32(f"{architecture}.{key}", value)
        else:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros(embeddings, np.float32))
    for layer in range(46):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.zeros(8, np.float32))
    for name, size in (vectors or {}).items():
        writer.add_tensor(name, np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
