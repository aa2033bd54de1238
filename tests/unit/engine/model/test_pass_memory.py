"""Memory that passes take beside a decoder's buffers, which the KV cache must leave free."""

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from transformers import (
    DeepseekV3Config,
    DeepseekV4Config,
    InklingTextConfig,
    MiniMaxM3VLTextConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Zamba2Config,
)

from services.engine.execution import loaded_model
from services.engine.execution.loaded_model import load
from services.engine.settings import EngineSettings
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.checkpoints.shapes import COMPRESSED, INKLING, MINIMAX_M3, SHAPE, ZAMBA2
from tests.unit.engine.model.pass_memory import MIB, memory_of_pass

LARGE: Mapping[str, PreTrainedConfig] = {
    "experts": Qwen3MoeConfig(
        **SHAPE
        | {"hidden_size": 256, "num_hidden_layers": 1, "max_position_embeddings": 8192}
        | {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 4},
        moe_intermediate_size=256,
    ),
    "latent attention": DeepseekV3Config(
        **SHAPE  # the last layer computes one row alone, so there are two
        | {"num_hidden_layers": 2, "num_key_value_heads": 4, "max_position_embeddings": 8192},
        first_k_dense_replace=2,
        q_lora_rank=24,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
    ),
    "compressed attention": DeepseekV4Config(
        **COMPRESSED
        | {"num_hidden_layers": 1, "max_position_embeddings": 8192, "head_dim": 96}
        | {"layer_types": ["compressed_sparse_attention"], "mlp_layer_types": ["hash_moe"]}
        | {"index_head_dim": 32, "index_topk": 256, "sliding_window": 128},
    ),
    "chosen blocks": MiniMaxM3VLTextConfig(
        **MINIMAX_M3
        | {"num_hidden_layers": 2, "max_position_embeddings": 8192}
        | {"layer_types": ["minimax_m3_sparse"] * 2, "mlp_layer_types": ["dense"] * 2},
    ),
    "addends by distance": InklingTextConfig(
        **INKLING | {"num_hidden_layers": 1, "max_position_embeddings": 8192},
        layer_types=["hybrid"],
        mlp_layer_types=["dense"],
    ),
    "streams": DeepseekV4Config(
        **COMPRESSED
        | {"num_hidden_layers": 2, "max_position_embeddings": 8192, "hidden_size": 1024}
        | {"layer_types": ["sliding_attention"] * 2, "mlp_layer_types": ["hash_moe"] * 2},
    ),
    "shared block": Zamba2Config(
        **ZAMBA2
        | {"num_hidden_layers": 2, "layers_block_type": ["hybrid", "linear_attention"]}
        | {"intermediate_size": 4096, "max_position_embeddings": 8192},
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_pass_takes_no_more_than_it_states(name: str, tmp_path: Path) -> None:
    """An engine whose KV cache takes this memory is killed at a long prompt."""
    make_checkpoint(tmp_path, LARGE[name])
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # no freed memory hides a growth
        taken, stated = fresh.submit(memory_of_pass, tmp_path).result()
    assert 4 * MIB < taken < stated < 8 * taken


@pytest.mark.parametrize("family", ["deepseek v3", "qwen3 moe"])
def test_cache_leaves_room_for_passes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, CONFIGS[family])
    settings = EngineSettings(model=tmp_path, max_step_tokens=512, max_running=8)
    decoder = load(settings).decoder
    tokens = loaded_model.largest_step_tokens(settings, decoder)
    needed = decoder.pass_bytes(tokens, 256, decoder.spec.context_length)
    monkeypatch.setattr(loaded_model, "available_memory", lambda _: needed + 400_000)
    assert load(settings).kv_bytes <= 200_000
