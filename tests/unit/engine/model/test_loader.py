"""Loading: checkpoints of all formats load, defective ones are refused with file and cause."""

import json
import math
import pickle
import re
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    Cohere2MoeConfig,
    GlmMoeDsaConfig,
    MiMoV2FlashConfig,
    Mistral4Config,
    Zamba2Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.common.json_values import Json
from services.common.settings import StartupError
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.families import FAMILIES
from services.engine.model.checkpoint.generation import load_generation_defaults
from services.engine.model.checkpoint.vision_language import VISION_LANGUAGE
from services.engine.model.loader import load_model, load_spec, resolve_dtype
from services.engine.model.operators.rotation import frequencies
from services.engine.model_description import GenerationDefaults
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits

WEIGHTS = "model.safetensors"
ARCHITECTURES = {
    "llama, yarn rope": "LlamaForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3, long": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt-oss": "GptOssForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "cohere2 moe": "Cohere2MoeForCausalLM",
    "ernie moe": "Ernie4_5_MoeForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "deepseek v2, groups": "DeepseekV2ForCausalLM",
    "deepseek v3": "DeepseekV3ForCausalLM",
    "deepseek v3.2": "DeepseekV32ForCausalLM",
    "glm moe dsa": "GlmMoeDsaForCausalLM",
    "deepseek v4": "DeepseekV4ForCausalLM",
    "glm4 moe": "Glm4MoeForCausalLM",
    "minimax m2": "MiniMaxM2ForCausalLM",
    "longcat flash": "LongcatFlashForCausalLM",
    "mimo v2 flash": "MiMoV2FlashForCausalLM",
    "minimax m3": "MiniMaxM3VLForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "falcon": "FalconForCausalLM",
    "gpt-neo": "GPTNeoForCausalLM",
    "afmoe": "AfmoeForCausalLM",
    "laguna": "LagunaForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "bailing hybrid": "BailingHybridForCausalLM",
    "kimi linear": "KimiLinearForCausalLM",
    "lara mini": "LaraMiniForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "lfm2 moe": "Lfm2MoeForCausalLM",
    "granite hybrid": "GraniteMoeHybridForCausalLM",
    "bamba": "BambaForCausalLM",
    "nemotron h": "NemotronHForCausalLM",
    "falcon h1": "FalconH1ForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "mamba": "MambaForCausalLM",
    "falcon mamba": "FalconMambaForCausalLM",
    "jamba": "JambaForCausalLM",
    "recurrent gemma": "RecurrentGemmaForCausalLM",
    "inkling": "InklingForCausalLM",
    "zamba": "ZambaForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
    "minimax": "MiniMaxForCausalLM",
}
SHAPE_KEYS = {
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_local_experts"),
    *("max_position_embeddings", "num_experts_per_tok"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    make_checkpoint(path, CONFIGS["llama"])
    return path


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy for a test to modify."""
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
DEFECTS: list[tuple[str, Callable[[Path], object], list[str]]] = [
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
        lambda p: set_config(p, architectures=["RwkvForCausalLM"]),
        ["RwkvForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"],
    ),
    ("no architecture", lambda p: set_config(p, architectures=...), ["architectures"]),
    ("unknown dtype", lambda p: set_config(p, dtype="float8_e4m3fn"), ["float8_e4m3fn"]),
    (
        "quantized",
        lambda p: set_config(p, quantization_config={"quant_method": "aqlm"}),
        ["quantization_config", "aqlm"],
    ),
    ("no width", lambda p: set_config(p, hidden_size=...), ["config.json", "hidden_size"]),
    ("text for a number", lambda p: set_config(p, hidden_size="64"), ["hidden_size", '"64"']),
    ("heads", lambda p: set_config(p, num_key_value_heads=3), ["num_key_value_heads"]),
    ("activation", lambda p: set_config(p, hidden_act="mish"), ["hidden_act", "mish", "silu"]),
    (
        "rope",
        lambda p: set_config(p, rope_parameters={"rope_type": "xpos", "rope_theta": 1e4}),
        ["rope_type", "xpos", "yarn"],
    ),
    (
        "yarn without a base",
        lambda p: set_config(
            p, rope_parameters={"rope_type": "yarn", "rope_theta": 1, "factor": 4}
        ),
        ["config.json", "rope_theta must not be 1", "yarn"],
    ),
    (
        "MXFP4 without experts",
        lambda p: set_config(p, quantization_config={"quant_method": "mxfp4"}),
        ["quantization_config", "mxfp4"],
    ),
    ("only a header", lambda p: (p / WEIGHTS).write_bytes(b"\x08\0\0\0\0\0\0\0"), [WEIGHTS]),
    ("a false header length", lambda p: (p / WEIGHTS).write_bytes(b"\xff" * 64), [WEIGHTS]),
    ("empty", lambda p: (p / WEIGHTS).write_bytes(b""), [WEIGHTS]),
    (
        "no tensors",
        lambda p: save_file({}, p / WEIGHTS),
        ["checkpoint", "model.embed_tokens.weight"],
    ),
]


@pytest.mark.parametrize(
    ("damage", "named"), [case[1:] for case in DEFECTS], ids=[case[0] for case in DEFECTS]
)
def test_defective_checkpoint_is_refused(
    checkpoint: Path, damage: Callable[[Path], None], named: list[str]
) -> None:
    damage(checkpoint)
    assert_refused(checkpoint, *named)


def assert_refused(checkpoint: Path, *named: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        load_model(checkpoint, torch.float32)
    message = str(refusal.value)
    assert message.endswith(".")
    assert "\n" not in message
    for part in named:
        assert part in message


EXPERT = "model.layers.2.mlp.experts.3.down_proj.weight"
BLOCKS = "model.layers.0.mlp.experts.down_proj"
LAYERNORM = "transformer.h.2.ln_1.bias"
PHI = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7} | {
    "original_max_position_embeddings": 32
}
SHORTEST = {"long_factor": [1.0] * 8, "original_max_position_embeddings": 1}
FAMILY_DEFECTS: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("qwen3 moe", lambda p: set_tensor(p, EXPERT, None), [EXPERT]),
    (
        "qwen3 moe",
        lambda p: set_tensor(p, EXPERT, torch.ones(32, 64)),
        [WEIGHTS, EXPERT, "[32, 64]"],
    ),
    ("qwen3 moe", lambda p: set_config(p, num_local_experts=5), [WEIGHTS, "mlp.gate", "[6, 64]"]),
    ("qwen3 moe", lambda p: set_config(p, num_local_experts=7), [WEIGHTS, "mlp.gate", "[7, 64]"]),
    ("mixtral", lambda p: set_config(p, num_experts_per_tok=6), ["num_experts_per_tok", "6", "5"]),
    ("gpt2", lambda p: set_tensor(p, LAYERNORM, None), [LAYERNORM]),
    ("gpt2", lambda p: set_config(p, n_embd="64"), ["n_embd"]),
    ("gpt2", lambda p: set_config(p, scale_attn_by_inverse_layer_idx=True), ["inverse_layer"]),
    ("gemma2", lambda p: set_config(p, layer_types=["full_attention"]), ["layer_types", "3"]),
    ("gemma2", lambda p: set_config(p, layer_types=["linear"] * 3), ["linear"]),
    ("smollm3", lambda p: set_config(p, no_rope_layers=[1]), ["no_rope_layers", "3"]),
    ("phi3", lambda p: set_config(p, rope_parameters=PHI), ["long_factor", "8", "7"]),
    (
        "phi3",
        lambda p: set_config(p, rope_parameters=PHI | SHORTEST),
        ["config.json", "original_max_position_embeddings", "above 1"],
    ),
    ("olmoe", lambda p: set_config(p, clip_qkv=8.0), ["clip_qkv"]),
    ("phi", lambda p: set_config(p, qk_layernorm=True), ["qk_layernorm"]),
    ("phi", lambda p: set_tensor(p, "lm_head.bias", None), ["lm_head.bias"]),
    ("gpt-oss", lambda p: set_tensor(p, "model.layers.1.self_attn.sinks", None), ["1", "sinks"]),
    ("phimoe", lambda p: set_config(p, num_experts_per_tok=3), ["num_experts_per_tok", "2", "3"]),
    ("hunyuan moe", lambda p: set_config(p, moe_topk=[1, 2]), ["moe_topk", "3"]),
    ("hunyuan moe", lambda p: set_config(p, moe_topk=[1, 2, 6]), ["moe_topk", "6", "5"]),
    ("ernie moe", lambda p: set_config(p, moe_layer_end_index=1), ["layers.2.mlp.gate_proj"]),
    ("deepseek v2", lambda p: set_config(p, norm_topk_prob=True), ["norm_topk_prob"]),
    ("deepseek v2", lambda p: set_config(p, topk_method="noaux_tc"), ["topk_method", "noaux_tc"]),
    ("deepseek v3", lambda p: set_config(p, n_group=3), ["n_group", "3", "8 experts"]),
    ("deepseek v3", lambda p: set_config(p, scoring_func="softmax"), ["scoring_func"]),
    ("deepseek v3", lambda p: set_config(p, moe_layer_freq=2), ["moe_layer_freq", "2"]),
    ("deepseek v3", lambda p: set_config(p, num_key_value_heads=2), ["num_key_value_heads"]),
    ("deepseek v3", lambda p: set_config(p, qk_rope_head_dim=7), ["qk_rope_head_dim"]),
    ("deepseek v3", lambda p: set_config(p, topk_group=9), ["topk_group", "9", "at most", "4"]),
    ("deepseek v3", lambda p: set_config(p, topk_group=1), ["topk_group", "fewer", "3"]),
    ("deepseek v3", lambda p: set_config(p, num_nextn_predict_layers=-3), ["num_nextn", "-3"]),
    ("deepseek v3", lambda p: set_config(p, num_nextn_predict_layers=10**9), ["num_nextn"]),
    ("deepseek v3.2", lambda p: set_config(p, index_head_dim=4), ["index_head_dim", "4", "8"]),
    ("deepseek v3.2", lambda p: set_config(p, index_topk=0), ["index_topk"]),
    ("deepseek v3.2", lambda p: set_config(p, q_lora_rank=None), ["q_lora_rank", "indexers"]),
    ("glm moe dsa", lambda p: set_config(p, indexer_types=["shared"] * 4), ["first layer"]),
    ("glm moe dsa", lambda p: set_config(p, indexer_types=["full"] * 3), ["indexer_types", "3"]),
    ("glm moe dsa", lambda p: set_config(p, indexer_types=["full"] * 4), ["layers.2", "indexer"]),
    (
        "glm moe dsa",
        lambda p: set_config(p, indexer_types=None, index_topk_pattern="FSX"),
        ["index_topk_pattern", "FSX"],
    ),
    ("inkling", lambda p: set_config(p, conv_kernel_size=1), ["conv_kernel_size", "2", "1"]),
    ("inkling", lambda p: set_config(p, swa_num_key_value_heads=3), ["swa_num_attention_heads"]),
    ("inkling", lambda p: set_config(p, shared_expert_sink=False), ["shared_expert_sink"]),
    ("inkling", lambda p: set_config(p, layer_types=["rnn"] * 3), ["layer_types", "rnn"]),
    ("recurrent gemma", lambda p: set_config(p, block_types=["rnn"]), ["block_types", "rnn"]),
    ("recurrent gemma", lambda p: set_config(p, block_types=[]), ["block_types", "no layer"]),
    ("recurrent gemma", lambda p: set_config(p, hidden_activation="silu"), ["silu", "gelu"]),
    ("recurrent gemma", lambda p: set_config(p, lru_width=65), ["lru_width", "65", "2"]),
    ("recurrent gemma", lambda p: set_config(p, conv1d_width=1), ["conv1d_width", "2"]),
    ("longcat flash", lambda p: set_config(p, zero_expert_type="copy"), ["zero_expert_type copy"]),
    ("longcat flash", lambda p: set_config(p, zero_expert_num=-1), ["zero_expert_num", "-1"]),
    ("longcat flash", lambda p: set_config(p, zero_expert_num=10**12), ["zero_expert_num", "most"]),
    ("longcat flash", lambda p: set_config(p, moe_topk=9), ["moe_topk", "9", "8"]),
    ("longcat flash", lambda p: set_config(p, n_routed_experts=0), ["n_routed_experts", "0"]),
    ("longcat flash", lambda p: set_config(p, router_bias=True), ["router_bias"]),
    ("longcat flash", lambda p: set_config(p, num_layers=1), ["model.layers.1"]),
    ("mimo v2 flash", lambda p: set_config(p, swa_head_dim=64), ["swa_head_dim", "64", "96"]),
    ("mimo v2 flash", lambda p: set_config(p, swa_num_attention_heads=8), ["swa_num", "8", "4"]),
    ("mimo v2 flash", lambda p: set_config(p, swa_num_key_value_heads=3), ["swa_num", "3"]),
    ("mimo v2 flash", lambda p: set_config(p, n_shared_experts=1), ["n_shared_experts"]),
    ("mimo v2 flash", lambda p: set_config(p, num_hidden_layers=10**12), ["num_hidden_layers"]),
    ("mimo v2 flash", lambda p: set_config(p, hidden_size=10**12), ["hidden_size", "at most"]),
    ("mimo v2 flash", lambda p: set_config(p, head_dim=10**12), ["head_dim", "at most"]),
    ("mimo v2 flash", lambda p: set_config(p, v_head_dim=10**400), ["v_head_dim", "64 bits"]),
    ("mimo v2 flash", lambda p: set_config(p, attention_value_scale=0), ["attention_value_scale"]),
    (
        "mimo v2 flash",
        lambda p: set_config(p, layer_types=None, hybrid_layer_pattern=[0, 2, 1, 1]),
        ["hybrid_layer_pattern", "4"],
    ),
    ("minimax m3", lambda p: set_config(p, index_n_heads=4), ["index_n_heads", "4", "2"]),
    ("minimax m3", lambda p: set_config(p, index_head_dim=8), ["index_head_dim", "8", "16"]),
    ("minimax m3", lambda p: set_config(p, index_local_blocks=3), ["index_local_blocks", "3"]),
    ("deepseek v4", lambda p: set_config(p, hc_mult=0), ["hc_mult", "positive"]),
    ("deepseek v4", lambda p: set_config(p, o_groups=3), ["o_groups", "3", "4"]),
    ("deepseek v4", lambda p: set_config(p, num_key_value_heads=2), ["num_key_value_heads", "2"]),
    ("deepseek v4", lambda p: set_config(p, n_routed_experts=0), ["n_routed_experts", "positive"]),
    ("deepseek v4", lambda p: set_config(p, norm_topk_prob=False), ["norm_topk_prob"]),
    ("deepseek v4", lambda p: set_config(p, scoring_func="softmax"), ["scoring_func softmax"]),
    ("deepseek v4", lambda p: set_config(p, qk_rope_head_dim=7), ["qk_rope_head_dim", "7"]),
    ("deepseek v4", lambda p: set_config(p, index_head_dim=6), ["qk_rope_head_dim", "6"]),
    ("deepseek v4", lambda p: set_config(p, hidden_act="gelu"), ["hidden_act gelu", "silu"]),
    (
        "deepseek v4",
        lambda p: set_config(p, layer_types=["full_attention"] * 5),
        ["full_attention"],
    ),
    ("deepseek v4", lambda p: set_config(p, mlp_layer_types=["moe"] * 4), ["mlp_layer_types", "4"]),
    (
        "deepseek v4",
        lambda p: set_config(p, layer_types=None, compress_ratios=[0, 4, 64, 4, 0]),
        ["compress_ratios", "64", "128"],
    ),
    (
        "deepseek v4",
        lambda p: set_tensor(
            p, "model.layers.0.ffn.gate.tid2eid", torch.full((97, 3), 8, dtype=torch.int64)
        ),
        ["layers.0.ffn.gate.tid2eid", "0 to 7"],
    ),
    ("glm4 moe", lambda p: set_config(p, n_group=3), ["n_group", "3", "8 experts"]),
    ("llama4", lambda p: set_config(p, attention_chunk_size=48), ["attention_chunk_size", "48"]),
    ("llama4", lambda p: set_config(p, layer_types=["sliding_attention"] * 4), ["sliding_att"]),
    ("llama4", lambda p: set_config(p, floor_scale=0), ["floor_scale"]),
    ("opt", lambda p: set_config(p, do_layer_norm_before=False), ["do_layer_norm_before"]),
    ("opt", lambda p: set_config(p, word_embed_proj_dim=32, hidden_size=128), ["[97, 128]"]),
    ("falcon", lambda p: set_config(p, alibi=True), ["alibi"]),
    (
        "bloom",
        lambda p: set_config(p, apply_residual_connection_post_layernorm=True),
        ["apply_residual_connection_post_layernorm"],
    ),
    ("mpt", lambda p: set_config(p, attn_config={"alibi": False}), ["alibi", "false"]),
    ("mpt", lambda p: set_config(p, attn_config={"alibi_bias_max": 0}), ["alibi_bias_max"]),
    ("mpt", lambda p: set_config(p, attn_config={"attn_type": "multiquery"}), ["multiquery"]),
    ("mpt", lambda p: set_config(p, attn_config={"clip_qkv": -1}), ["clip_qkv", "positive"]),
    ("mpt", lambda p: set_config(p, attn_config={"qk_ln": True}), ["qk_ln"]),
    ("mpt", lambda p: set_config(p, attn_config=8), ["attn_config", "object"]),
    ("mpt", lambda p: set_config(p, attn_config={"sliding_window_size": 9}), ["window_size 9"]),
    ("mpt", lambda p: set_config(p, logit_scale="half"), ["logit_scale", "half"]),
    ("mpt", lambda p: set_config(p, no_bias=False), ["no_bias", "false"]),
    ("mpt", lambda p: set_config(p, norm_type="rmsnorm"), ["norm_type", "rmsnorm"]),
    (
        "dbrx",
        lambda p: set_config(p, ffn_config={"moe_normalize_expert_weights": 2}),
        ["moe_normalize_expert_weights", "2"],
    ),
    ("dbrx", lambda p: set_config(p, ffn_config={"moe_num_experts": 6}), ["ffn.router.layer"]),
    ("gpt-neo", lambda p: set_config(p, attention_layers=["near"] * 4), ["attention_layers"]),
    ("afmoe", lambda p: set_config(p, attention_bias=True), ["attention_bias"]),
    ("glm4 moe", lambda p: set_config(p, use_qk_norm=False), ["self_attn.k_norm"]),
    ("cohere2 moe", lambda p: set_config(p, expert_selection_fn="relu"), ["relu", "sigmoid"]),
    ("cohere2 moe", lambda p: set_config(p, use_parallel_block=False), ["use_parallel_block"]),
    ("cohere2 moe", lambda p: set_config(p, use_qk_norm=True), ["use_qk_norm"]),
    ("cohere2 moe", lambda p: set_config(p, sliding_window=None), ["sliding_window"]),
    (
        "cohere2 moe",
        lambda p: set_config(p, shared_expert_combination_strategy="max"),
        ["shared_expert_combination_strategy", "max", "average"],
    ),
    ("laguna", lambda p: set_config(p, gating="per-group"), ["gating", "per-group", "per-head"]),
    ("laguna", lambda p: set_config(p, gating=False), ["gating"]),
    ("laguna", lambda p: set_config(p, gating="per-element"), ["g_proj", "[128, 64]"]),
    ("laguna", lambda p: set_config(p, attention_bias=True), ["attention_bias"]),
    ("laguna", lambda p: set_config(p, norm_topk_prob=False), ["norm_topk_prob"]),
    ("laguna", lambda p: set_config(p, moe_router_logit_softcapping=30.0), ["softcapping"]),
    ("laguna", lambda p: set_config(p, swa_attention_sink_enabled=True), ["sink_enabled"]),
    ("laguna", lambda p: set_config(p, swa_rope_parameters={"rope_theta": 1e4}), ["swa_rope"]),
    (
        "laguna",
        lambda p: set_config(p, num_attention_heads_per_layer=[4, 3, 4, 4]),
        ["num_attention_heads_per_layer", "3", "num_key_value_heads", "2"],
    ),
    (
        "laguna",
        lambda p: set_config(p, num_attention_heads_per_layer=[4, 4]),
        ["num_attention_heads_per_layer", "4 of them"],
    ),
    ("deepseek v2", lambda p: set_config(p, num_hidden_layers=2), ["model.layers.2"]),
    ("minicpm3", lambda p: set_config(p, num_hidden_layers=2), ["model.layers.2"]),
    ("youtu", lambda p: set_config(p, num_hidden_layers=2), ["model.layers.2"]),
    ("kimi linear", lambda p: set_config(p, mla_use_nope=False), ["mla_use_nope"]),
    ("lfm3", lambda p: set_config(p, use_attention_gate=False), ["use_attention_gate"]),
    ("lfm3", lambda p: set_config(p, layer_types=...), ["layer_types"]),
    ("zamba", lambda p: set_config(p, attention_hidden_size=64), ["attention_hidden_size", "64"]),
    ("bailing hybrid", lambda p: set_config(p, kda_lower_bound=1.0), ["kda_lower_bound"]),
    ("lfm2", lambda p: set_config(p, conv_L_cache=1), ["conv_L_cache", "2"]),
    ("lfm2", lambda p: set_config(p, layer_types=["conv", "mamba", "conv"]), ["1", "mamba"]),
    ("lfm2, biases", lambda p: set_config(p, layer_types=None, full_attn_idxs=[3]), ["idxs", "2"]),
    ("lfm2 moe", lambda p: set_config(p, num_dense_layers=0), ["layers.0.feed_forward.gate"]),
    ("bamba", lambda p: set_config(p, attn_layer_indices=[3]), ["attn_layer_indices", "2"]),
    ("bamba", lambda p: set_config(p, mamba_n_groups=3), ["mamba_n_groups", "3", "8"]),
    ("bamba", lambda p: set_config(p, mamba_d_head=8), ["mamba_d_head", "8", "128"]),
    ("bamba", lambda p: set_config(p, mamba_d_conv=1), ["mamba_d_conv", "2"]),
    ("bamba", lambda p: set_config(p, hidden_act="gelu"), ["hidden_act", "gelu", "silu"]),
    ("bamba", lambda p: set_config(p, time_step_limit=[1.0, 0.1]), ["time_step_limit", "0.1"]),
    ("nemotron h", lambda p: set_config(p, moe_latent_size=16), ["moe_latent_size"]),
    (
        "nemotron h",
        lambda p: set_config(p, layers_block_type=None, hybrid_override_pattern="M*X"),
        ["hybrid_override_pattern", "X"],
    ),
    ("nemotron h", lambda p: set_config(p, layers_block_type=["mlp", "rwkv"]), ["1", "rwkv"]),
    ("falcon h1", lambda p: set_config(p, mlp_multipliers=[1.0]), ["mlp_multipliers", "2"]),
    ("falcon h1", lambda p: set_config(p, mamba_d_ssm=64), ["mamba_d_ssm", "64"]),
    ("mamba", lambda p: set_config(p, conv_kernel=1), ["conv_kernel", "2"]),
    ("mamba", lambda p: set_config(p, hidden_act="gelu"), ["hidden_act", "gelu", "silu"]),
    ("jamba", lambda p: set_config(p, mamba_dt_rank="auto"), ["mamba.x_proj", "[40, 128]"]),
    ("minimax", lambda p: set_config(p, mlp_beta_factor=1), ["mlp_beta_factor", "equal"]),
    ("minimax", lambda p: set_config(p, hidden_act="gelu"), ["hidden_act", "gelu", "silu"]),
    ("granite hybrid", lambda p: set_config(p, num_local_experts=-1), ["num_local_experts", "-1"]),
    ("gemma4, shared keys", lambda p: set_config(p, pad_token_id=-1), ["pad_token_id", "-1"]),
    (
        "gemma4, shared keys",
        lambda p: set_config(p, vocab_size_per_layer_input=None),
        ["vocab_size_per_layer_input"],
    ),
    (
        "gpt-oss",
        lambda p: set_config(p, quantization_config={"quant_method": "mxfp4"}),
        ["experts.gate_up_proj_blocks"],
    ),
]


@pytest.mark.parametrize(("family", "damage", "named"), FAMILY_DEFECTS)
def test_defective_checkpoint_of_another_family_is_refused(
    family: str, damage: Callable[[Path], None], named: list[str], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, CONFIGS[family])
    damage(tmp_path)
    assert_refused(tmp_path, *named)


@pytest.mark.parametrize(
    ("blocks", "named"),
    [
        (torch.zeros(5, 64, 3, 16), ["down_proj_blocks", "F32", "U8"]),
        (torch.zeros(5, 64, 3, 8, dtype=torch.uint8), ["down_proj_blocks", "[5, 64, 3, 8]"]),
        (torch.zeros(5, 64, 3, 16, dtype=torch.uint8), ["down_proj_scales"]),
    ],
    ids=["floats", "half as many", "no scales"],
)
def test_defective_mxfp4_experts_are_refused(
    blocks: torch.Tensor, named: list[str], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, CONFIGS["gpt-oss"])
    set_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    for layer in range(3):
        gate = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        for name, shape in (("blocks", (5, 192, 2, 16)), ("scales", (5, 192, 2))):
            set_tensor(tmp_path, f"{gate}_{name}", torch.zeros(shape, dtype=torch.uint8))
    set_tensor(tmp_path, f"{BLOCKS}_blocks", blocks)
    assert_refused(tmp_path, *named)


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize(
    "value", [0, -1, 1e999, math.nan, True, "x", [], ["x"], {}, {"factor": 0}], ids=str
)
def test_any_config_value_is_understood_or_refused(
    family: str, value: Json, tmp_path: Path
) -> None:
    """No value in config.json raises another exception than CheckpointError."""
    config = json.loads(CONFIGS[family].to_json_string(use_diff=False))
    config["architectures"] = [ARCHITECTURES[family]]
    refused = 0
    for key in config:
        try:
            ModelSpec.from_config({**config, key: value})
        except CheckpointError as error:
            assert key in str(error) or key == "architectures"  # noqa: PT017
            refused += 1
    rope = config.get("rope_parameters") or {}
    for key in rope:
        with suppress(CheckpointError):
            ModelSpec.from_config({**config, "rope_parameters": {**rope, key: value}})
    assert refused


def test_documentation_names_every_family() -> None:
    text = (Path(__file__).parents[4] / "docs" / "models.md").read_text(encoding="utf-8")
    names = (*FAMILIES, *VISION_LANGUAGE)
    assert [name for name in names if f"`{name}`" not in text] == []


def test_loading_runs_no_code_and_opens_no_connection(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pickles and modules in a checkpoint are ignored."""
    ran = checkpoint / "ran"
    (checkpoint / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w')")
    set_config(checkpoint, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})

    class Payload:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
            return open, (str(ran), "w")

    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))

    def refuse(*args: object) -> None:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    load_model(checkpoint, torch.float32)
    (checkpoint / WEIGHTS).unlink()
    assert_refused(checkpoint, WEIGHTS)
    assert not ran.exists()


def test_kimi_linear_has_the_layers_of_its_published_keys() -> None:
    """transformers writes other keys than Moonshot's own file has."""
    ours: dict[str, Json] = json.loads(CONFIGS["kimi linear"].to_json_string(use_diff=False))
    ours["architectures"] = ["KimiLinearForCausalLM"]
    expected = ModelSpec.from_config(ours)
    for key in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads"):
        del ours[key]
    layers: dict[str, Json] = {"kda_layers": [1, 3], "full_attn_layers": [2, 4]}
    ours["linear_attn_config"] = layers | {
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    }
    assert ModelSpec.from_config(ours | {"first_k_dense_replace": 1}) == expected


@pytest.mark.parametrize(
    "lists",
    [
        {"kda_layers": [1, 3, 5]},
        {"kda_layers": [0, 3]},
        {"kda_layers": [1, 3], "full_attn_layers": [2, 3, 4]},
        {"kda_layers": [1, 3], "full_attn_layers": [2]},
    ],
)
def test_kimi_linear_lists_must_name_each_layer_once(lists: dict[str, Json]) -> None:
    values: dict[str, Json] = json.loads(CONFIGS["kimi linear"].to_json_string(use_diff=False))
    del values["layer_types"]
    values |= {"architectures": ["KimiLinearForCausalLM"], "linear_attn_config": lists}
    with pytest.raises(CheckpointError, match="each layer from 1 to 4 once"):
        ModelSpec.from_config(values)


@pytest.mark.parametrize("value", [3, [1, "3"], [1, 3.0], [True], {"1": 3}])
@pytest.mark.parametrize("key", ["kda_layers", "full_attn_layers"])
def test_kimi_linear_lists_must_be_of_integers(key: str, value: Json) -> None:
    values: dict[str, Json] = json.loads(CONFIGS["kimi linear"].to_json_string(use_diff=False))
    del values["layer_types"]
    lists = {"kda_layers": [1, 3], "full_attn_layers": [2, 4]} | {key: value}
    values |= {"architectures": ["KimiLinearForCausalLM"], "linear_attn_config": lists}
    with pytest.raises(CheckpointError, match=rf": {key} must be a list of integers, not "):
        ModelSpec.from_config(values)


@pytest.mark.parametrize("first", [0, 2])
def test_windows_of_cohere2_moe_begin_anew_behind_the_dense_layers(first: int) -> None:
    """config.json may leave the lists of layers out."""
    kinds: dict[str, Any] = {
        "first_k_dense_replace": first,
        "num_hidden_layers": 7,
        "prefix_dense_sliding_window_pattern": 2,
        "sliding_window_pattern": 3,
    }
    theirs = Cohere2MoeConfig(**kinds)
    written = json.loads(theirs.to_json_string(use_diff=False))
    written |= kinds | {"architectures": ["Cohere2MoeForCausalLM"]}
    listed = ModelSpec.from_config(written)
    unlisted = ModelSpec.from_config(written | {"layer_types": None, "mlp_layer_types": None})
    assert unlisted == listed
    windows = ["sliding" in kind for kind in theirs.layer_types or []]
    assert [bool(layer.window) for layer in listed.attention_layers.values()] == windows


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    """DeepSeek V3's published files hold one behind the layers of config.json."""
    model = make_checkpoint(tmp_path, CONFIGS["deepseek v3"])
    tensors = load_file(tmp_path / WEIGHTS)
    of_last = [name for name in tensors if name.startswith("model.layers.2.")]
    drafts = {name.replace(".2.", ".3."): tensors[name] + 1 for name in of_last}
    save_file(
        tensors | drafts | {"model.layers.3.eh_proj.weight": torch.ones(64, 128)},
        tmp_path / WEIGHTS,
    )
    tokens = random_tokens(20, 1)
    driver = Driver(load_model(tmp_path, torch.float32), [tokens])
    driver.step([(0, 20)])
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)
    set_tensor(tmp_path, "model.layers.4.eh_proj.weight", torch.ones(64, 128))
    assert_refused(tmp_path, "model.layers.4.eh_proj.weight")


def test_tensor_names_without_prefix_are_read(tmp_path: Path) -> None:
    """GPT-2's published checkpoint has no prefix and stores masks."""
    model = make_checkpoint(tmp_path, CONFIGS["gpt2"])
    tensors = load_file(tmp_path / WEIGHTS)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 256, 256)}, tmp_path / WEIGHTS)
    tokens = random_tokens(20, 1)
    driver = Driver(load_model(tmp_path, torch.float32), [tokens])
    driver.step([(0, 20)])
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)


OLD_CONFIGS: list[tuple[str, dict[str, object]]] = [
    ("gemma3", {"rope_theta": 500.0, "rope_local_base_freq": 100.0, "sliding_window_pattern": 2}),
    ("smollm3", {"rope_theta": 5e6}),
    ("gpt-oss", {"rope_theta": 1.5e5}),
]


DEFAULTED = [
    *("olmo3", "glm", "glm4", "cohere", "cohere2", "exaone4", "gpt-neox", "phi", "stablelm"),
    *("nemotron", "arcee", "hunyuan", "apertus", "ernie", "ministral3", "seed oss"),
    *("qwen2 moe", "olmoe", "phimoe", "granite moe", "ernie moe", "hunyuan moe"),
    *("deepseek v3", "solar open", "minimax m2", "hy v3", "glm4 moe lite", "llama4", "afmoe"),
    "k-exaone",
    *("youtu", "minicpm3", "mistral4", "opt", "falcon", "deepseek v3.2", "glm moe dsa"),
    *("deepseek v4", "minimax m3", "mimo v2 flash", "longcat flash", "cohere2 moe", "laguna"),
    *("lfm2", "lfm2 moe", "granite hybrid", "bamba", "falcon h1"),
    *("bailing hybrid", "zamba"),
    *("gemma", "recurrent gemma", "cwm", "jais2", "flex olmo", "mellum"),
    "granite moe, none shared",
]
LEAST_KEYS = {
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "max_position_embeddings", "bos_token_id", "eos_token_id"),
}


@pytest.mark.parametrize(("family", "old"), OLD_CONFIGS, ids=[case[0] for case in OLD_CONFIGS])
def test_defaults_of_absent_keys_are_those_of_transformers(
    family: str, old: dict[str, object], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, CONFIGS[family])
    config = json.loads((tmp_path / "config.json").read_text())
    shape = {key: config[key] for key in config if key in SHAPE_KEYS}
    (tmp_path / "config.json").write_text(json.dumps(shape | old))
    ours = load_spec(tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path)
    local = [kind == "sliding_attention" for kind in getattr(theirs, "layer_types", [])]
    assert [bool(layer.window) for layer in ours.attention_layers.values()] == local
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.norm_epsilon == theirs.rms_norm_eps
    bases = {
        rope["rope_theta"]
        for rope in (
            theirs.rope_parameters.values()
            if "full_attention" in theirs.rope_parameters
            else [theirs.rope_parameters]
        )
    }
    rotaries = [layer.rotary for layer in ours.attention_layers.values()]
    kinds = {rotary for rotary in rotaries if rotary is not None}
    assert len(kinds) == len(bases)
    rotates = getattr(theirs, "no_rope_layers", [1] * ours.num_layers)
    assert [rotary is not None for rotary in rotaries] == [bool(does) for does in rotates]


@pytest.mark.parametrize("family", DEFAULTED)
def test_a_family_has_the_defaults_of_transformers(family: str) -> None:
    """config.json may leave out what transformers would write."""
    kind = type(CONFIGS[family])
    written = json.loads(kind().to_json_string(use_diff=False))
    name = (
        "Mistral4ForCausalLM"
        if kind is Mistral4Config
        else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind.model_type]
    )
    written["architectures"] = [name]
    least = {key: value for key, value in written.items() if key in LEAST_KEYS}
    assert ModelSpec.from_config(least) == ModelSpec.from_config(written)


def test_zamba2_without_a_list_of_blocks_has_those_of_the_first_release() -> None:
    """Files of Zamba2 2.7B leave the list out."""
    values: dict[str, Json] = json.loads(Zamba2Config().to_json_string(use_diff=False))
    values["architectures"] = ["Zamba2ForCausalLM"]
    unlisted = values | {"layers_block_type": None}
    assert ModelSpec.from_config(unlisted) == ModelSpec.from_config(values)


def test_gelu_of_the_first_gemma_is_its_approximation() -> None:
    """Its published files say gelu, with which they were not trained."""
    values: dict[str, Json] = json.loads(CONFIGS["gemma"].to_json_string(use_diff=False))
    values["architectures"] = ["GemmaForCausalLM"]
    assert values["hidden_act"] == "gelu_pytorch_tanh"
    assert ModelSpec.from_config(values | {"hidden_act": "gelu"}) == ModelSpec.from_config(values)


def test_kinds_of_layers_that_predict_further_tokens_are_left_out() -> None:
    """Published files of DeepSeek V4 list those behind the layers of config.json, too."""
    values: dict[str, Json] = json.loads(CONFIGS["deepseek v4"].to_json_string(use_diff=False))
    values["architectures"] = ["DeepseekV4ForCausalLM"]
    longer: dict[str, Json] = {
        key: [*values[key], values[key][-1]]  # type: ignore[misc, index]
        for key in ("layer_types", "mlp_layer_types")
    }
    assert ModelSpec.from_config(values | longer) == ModelSpec.from_config(values)


def test_published_keys_of_minimax_m3_say_the_same_as_those_of_transformers() -> None:
    values: dict[str, Json] = json.loads(CONFIGS["minimax m3"].to_json_string(use_diff=False))
    values["architectures"] = ["MiniMaxM3VLForCausalLM"]
    changed = ("index_block_size", "index_topk_blocks", "layer_types", "mlp_layer_types")
    published = {key: value for key, value in values.items() if key not in changed} | {
        "index_n_heads": 8,
        "moe_layer_freq": [0, 1, 1],
        "sparse_attention_config": {
            "sparse_attention_freq": [0, 1, 1],
            "sparse_num_index_heads": 2,
            "sparse_block_size": 7,
            "sparse_topk_blocks": 2,
        },
    }
    assert ModelSpec.from_config(published) == ModelSpec.from_config(values)


def test_published_keys_of_mimo_say_the_same_as_those_of_transformers() -> None:
    config = MiMoV2FlashConfig(num_hidden_layers=12)
    values: dict[str, Json] = json.loads(config.to_json_string(use_diff=False))
    values["architectures"] = ["MiMoV2FlashForCausalLM"]
    changed = (
        "layer_types",
        "mlp_layer_types",
        "rope_parameters",
        "rms_norm_eps",
        "sliding_window",
    )
    published = {key: value for key, value in values.items() if key not in changed} | {
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0],
        "layernorm_epsilon": 1e-5,
        "moe_layer_freq": [0] + [1] * 11,
        "n_shared_experts": None,
        "partial_rotary_factor": 0.334,
        "rope_theta": 5_000_000,
        "routed_scaling_factor": None,
        "scoring_func": "sigmoid",
        "sliding_window": 128,
        "sliding_window_size": 128,
        "swa_head_dim": 192,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "swa_rope_theta": 10000,
        "swa_v_head_dim": 128,
        "topk_method": "noaux_tc",
    }
    assert ModelSpec.from_config(published) == ModelSpec.from_config(values)


@pytest.mark.parametrize("family", ["mimo v2 flash", "longcat flash"])
def test_layers_of_mtp_that_draft_tokens_are_left_out(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS[family])
    tensors = load_file(tmp_path / WEIGHTS)
    drafts = {f"model.mtp.layers.0.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm")}
    save_file(tensors | drafts, tmp_path / WEIGHTS)
    load_model(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers_block_type": None}, "num_hidden_layers must be 54, got 6"),
        ({"n_mamba_heads": 7}, "n_mamba_heads (7) times"),
    ],
)
def test_errors_of_zamba2_name_the_keys_of_its_file(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, CONFIGS["zamba2"])
    set_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=re.escape(named)):
        load_spec(tmp_path)


@pytest.mark.parametrize(
    "keys",
    [
        {"index_topk_pattern": "FFSSFSSS"},
        {"index_topk_freq": 4, "index_skip_topk_offset": 2},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        {},
    ],
)
def test_layers_with_indexers_are_those_of_transformers(keys: dict[str, Any]) -> None:
    """A layer without an indexer attends to the tokens that an earlier layer chose."""
    theirs = GlmMoeDsaConfig(num_hidden_layers=8, **keys)
    written = json.loads(theirs.to_json_string(use_diff=False))
    written |= {"architectures": ["GlmMoeDsaForCausalLM"], "indexer_types": None} | keys
    latent = ModelSpec.from_config(written).latent_layers.values()
    kinds = ["shared" if layer.index is None else "full" for layer in latent]
    assert kinds == theirs.indexer_types


def test_published_keys_of_internlm3_are_read(tmp_path: Path) -> None:
    """transformers writes this family as a Llama; the published files have keys of their own."""
    model = make_checkpoint(tmp_path, CONFIGS["internlm3"])
    biases = {"attention_bias": ..., "mlp_bias": ..., "qkv_bias": True, "bias": True}
    set_config(tmp_path, architectures=["InternLM3ForCausalLM"], **biases)
    tokens = random_tokens(20, 1)
    driver = Driver(load_model(tmp_path, torch.float32), [tokens])
    driver.step([(0, 20)])
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)


def test_minimax_m1_has_keys_of_its_own(tmp_path: Path) -> None:
    """transformers converts the published files, which most people have."""
    model = make_checkpoint(tmp_path, CONFIGS["minimax"])
    config = json.loads((tmp_path / "config.json").read_text())
    published = {
        f"layernorm_{name}_{factor}": config[f"{part}_{factor}_factor"]
        for part, name in (
            ("linear_attn", "linear_attention"),
            ("full_attn", "full_attention"),
            ("mlp", "mlp"),
        )
        for factor in ("alpha", "beta")
    }
    dropped = {key: ... for key in (*config, "layer_types") if key.endswith(("_factor", "_types"))}
    set_config(
        tmp_path,
        architectures=["MiniMaxM1ForCausalLM"],
        attn_type_list=[1, 0, 1, 0],
        rotary_dim=32,
        postnorm=True,
        shared_intermediate_size=0,
        **dropped | published,
    )
    tokens = random_tokens(20, 1)
    driver = Driver(load_model(tmp_path, torch.float32), [tokens])
    driver.step([(0, 20)])
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)


def test_sharded_checkpoint_loads(tmp_path: Path) -> None:
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


def test_index_that_points_outside_is_refused(checkpoint: Path) -> None:
    index = {"weight_map": {Q: "../elsewhere.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside"):
        load_model(checkpoint, torch.float32)


def test_keys_of_older_releases_are_read(checkpoint: Path) -> None:
    """Before transformers 5: rope_theta, rope_scaling and torch_dtype."""
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
    old_rotary, new_rotary = old.attention(0).rotary, new.attention(0).rotary
    assert old_rotary is not None
    assert new_rotary is not None
    assert torch.equal(frequencies(old_rotary), frequencies(new_rotary) / 2)


def test_generation_config_gives_eos_ids_and_sampling_defaults(checkpoint: Path) -> None:
    """A chat model may end turns with an id that config.json lacks."""
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


def test_eos_ids_outside_the_vocabulary_are_ignored(checkpoint: Path) -> None:
    """A tokenizer may have more tokens than its model; such ids would index other rows' logits."""
    size = load_spec(checkpoint).vocab_size
    ends = {"eos_token_id": [2, size, -1]}
    (checkpoint / "generation_config.json").write_text(json.dumps(ends))
    assert load_spec(checkpoint).eos_token_ids == (2,)


def test_weights_convert_to_the_requested_dtype(checkpoint: Path) -> None:
    """The benchmarks' roofline is based on weight_bytes."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        decoder = load_model(checkpoint, dtype)
        assert decoder.dtype == dtype
        numel = sum(t.numel() for t in load_file(checkpoint / WEIGHTS).values())
        embedding = decoder.spec.vocab_size * decoder.spec.hidden_size
        assert decoder.weight_bytes == (numel - embedding) * dtype.itemsize


def test_long_load_is_logged_without_a_terminal(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level("INFO"):
        load_model(checkpoint, torch.float32, progress=True)
        monkeypatch.setattr("services.engine.model.checkpoint.progress._LINE_SECONDS", 0)
        load_model(checkpoint, torch.float32, progress=True)
        shown = len(caplog.messages)
        load_model(checkpoint, torch.float32)
    assert 1 <= shown == len(caplog.messages)


def test_dtypes_resolve_by_name() -> None:
    assert resolve_dtype("float16", torch.device("cuda")) == torch.float16
    assert resolve_dtype("auto") in (torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match="int4"):
        resolve_dtype("int4")


def test_float16_is_refused_where_a_processor_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engine.model.loader._multiplies_float16", lambda device: False)
    with pytest.raises(StartupError, match="computes in float32 and bfloat16"):
        resolve_dtype("float16")


def test_float16_is_refused_where_torch_lacks_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    with pytest.raises(StartupError, match="computes in float32 and bfloat16"):
        resolve_dtype("float16")


def test_experts_are_read_stacked_as_apart(tmp_path: Path) -> None:
    """Qwen publishes both: the experts of Qwen 3.5 in stacks, those of its FP8 files apart."""
    make_checkpoint(tmp_path, CONFIGS["qwen3.5 moe"])
    tokens = random_tokens(20, 1)
    apart = Driver(load_model(tmp_path, torch.float32), [tokens])
    apart.step([(0, 20)])
    tensors = load_file(tmp_path / WEIGHTS)
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts: dict[str, list[Tensor]] = {}
        for part in ("gate_proj", "up_proj", "down_proj"):
            names = [f"{prefix}.{number}.{part}.weight" for number in range(5)]
            parts[part] = [tensors.pop(name) for name in names]
        gates = map(torch.cat, zip(parts["gate_proj"], parts["up_proj"], strict=True))
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(list(gates))
        tensors[f"{prefix}.down_proj"] = torch.stack(parts["down_proj"])
    save_file(tensors, tmp_path / WEIGHTS)
    stacked = Driver(load_model(tmp_path, torch.float32), [tokens])
    stacked.step([(0, 20)])
    assert torch.equal(stacked.logits[0], apart.logits[0])
