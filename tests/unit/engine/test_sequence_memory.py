"""Memory of a sequence by config.json alone, against what the engine allocates."""

import json
from pathlib import Path

import pytest
import torch

from services.common.json_values import Json
from services.engine.model.architecture.model_layers import read_model_layers
from services.engine.model.attention.interface import KVCache
from services.engine.model.checkpoint.config import Config
from services.engine.model.loader import load_model
from services.engine.sequence_memory import sequence_memory
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.checkpoints.recurrent import RECURRENT

_FAMILIES = (
    *(family for family in RECURRENT if family != "nemotron h"),  # a CPU pads heads of 24 numbers
    *("llama", "gemma3", "gemma3n", "gemma4, shared keys", "gpt2", "mimo v2 flash", "llama4"),
    *("deepseek v2", "deepseek v3", "deepseek v3.2", "deepseek v4", "glm moe dsa"),
    *("longcat flash", "minicpm3", "minimax m3", "mistral4", "youtu", "qwen3.5 vl"),
)
"""Families of every kind of mixer"""


@pytest.mark.parametrize("family", _FAMILIES)
def test_memory_is_what_the_engine_allocates(family: str, tmp_path: Path) -> None:
    """`tokenwire show` says how long a text fits, before the model is loaded."""
    make_checkpoint(tmp_path, CONFIGS[family])
    values = json.loads((tmp_path / "config.json").read_text())
    memory = sequence_memory(Config("config.json", values))
    assert memory is not None
    model = load_model(tmp_path, torch.float32)
    size = model.block_size
    one, two = (_bytes(model.allocate_cache(count, size)) for count in (1, 2))
    assert sum(group.block_width(size) for group in memory.groups) * 4 == two - one
    assert memory.state_bytes(4) == model.state_bytes
    layers = read_model_layers(values)
    assert (layers.layers, layers.family) == (model.spec.layers, model.spec.family)


def test_latents_of_deepseek_v3_take_70_kb_a_token() -> None:
    """A figure of its report (https://arxiv.org/abs/2412.19437): 61 layers of 512 + 64 numbers."""
    values: dict[str, Json] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129280,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 163840,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
    }
    memory = sequence_memory(Config("config.json", values))
    assert memory is not None
    assert memory.cached_numbers(1) * 2 == 70_272
    assert memory.cached_numbers(100) == 100 * memory.cached_numbers(1)
    assert memory.state_bytes(2) == 0


def test_layers_with_a_window_stop_growing() -> None:
    values: dict[str, Json] = {
        "architectures": ["Olmo3ForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "sliding_window": 10,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    memory = sequence_memory(Config("config.json", values))
    assert memory is not None
    assert memory.cached_numbers(5) == 2 * 16 * 5
    assert memory.cached_numbers(100) == 16 * 100 + 16 * 10


def test_entries_take_the_place_of_earlier_tokens() -> None:
    """DeepSeek V4: a window of tokens in all layers, and an entry for each 4 or 128 tokens."""
    values: dict[str, Json] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "vocab_size": 129280,
        "hidden_size": 4096,
        "num_hidden_layers": 3,
        "num_attention_heads": 64,
        "compress_ratios": [0, 4, 128],
    }
    memory = sequence_memory(Config("config.json", values))
    assert memory is not None
    near = memory.cached_numbers(129) - memory.cached_numbers(128)
    assert near == 0, "the window has 128 tokens, and there is no further entry"
    assert memory.cached_numbers(132) - memory.cached_numbers(128) == 640
    assert memory.cached_numbers(256) - memory.cached_numbers(128) == 32 * 640 + 512


def test_states_of_qwen3_next_are_known() -> None:
    """36 layers of 32 states of 128 x 128 numbers, and three tokens' inputs of 8,192 channels."""
    values: dict[str, Json] = {
        "architectures": ["Qwen3NextForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }
    memory = sequence_memory(Config("config.json", values))
    assert memory is not None
    assert memory.state_bytes(2) == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert memory.cached_numbers(1) == 12 * 2 * 2 * 256


def test_encoder_keeps_nothing() -> None:
    values: dict[str, Json] = {
        "architectures": ["BertModel"],
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
    }
    assert sequence_memory(Config("config.json", values)) is None


def _bytes(cache: KVCache) -> int:
    return sum(tensor.nbytes for tensor in cache.pages)
