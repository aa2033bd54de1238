"""GGUF files: every family, every format of weights, and what is wrong with a file."""

import copy
import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    dequantize,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AfmoeConfig,
    Cohere2Config,
    Cohere2MoeConfig,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    FalconMambaConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    HunYuanMoEV1Config,
    HYV3Config,
    Jais2Config,
    KimiLinearConfig,
    LagunaConfig,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MiniMaxConfig,
    MiniMaxM3VLTextConfig,
    Ministral3Config,
    MixtralConfig,
    NemotronConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    YoutuConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from services.common.gguf.ggml_types import GgmlType
from services.common.gguf.gguf_config import config_of
from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.model_files.checkpoint import opened_checkpoint
from services.common.settings import StartupError
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.gguf_groups import read_groups
from services.engine.model.checkpoint.mxfp4 import Mxfp4Weight
from services.engine.model.loader import load_model, load_spec
from services.engine.model.model import Model
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits
from tests.unit.engine.checkpoints.shapes import (
    COHERE2_MOE,
    EXPERTS,
    GEMMA3N,
    INDEXED,
    LAGUNA,
    LATENT,
    MAMBA,
    MAMBA1,
    MINIMAX_M3,
    ROUTED,
    SHAPE,
    VOCABULARY,
    WIDE,
)
from tests.unit.engine.gguf_checkpoints import random_blocks, write_gguf

TOKENS = 60
TIED = SHAPE | {"tie_word_embeddings": True}
WIDE_TIED = WIDE | {"tie_word_embeddings": True}
QUANTIZED = (
    *("phimoe", "ernie moe", "hunyuan moe", "ministral3"),
    *("glm", "glm4", "exaone4", "seed oss", "hunyuan", "apertus", "nemotron", "gpt-neox", "phi"),
    "k-exaone",
    *("stablelm", "stablelm, norms", "internlm3", "olmo3", "glm4 moe", "minimax m2", "afmoe"),
    *("minimax", "minimax m3", "mimo v2 flash"),
    *("mistral4", "llama4", "falcon", "falcon, two norms", "gpt bigcode"),
    *("cohere2 moe", "cohere2 moe, rms norms", "laguna", "laguna, gates of outputs"),
    *("bloom, six heads", "mpt, clipped", "dbrx"),
    *("lfm2", "granite hybrid", "nemotron h", "falcon h1", "mamba2, biases"),
    *("mamba", "falcon mamba", "jamba", "glm moe dsa", "kimi linear"),
)
"""Families that are tried with codes too; the first four have other shapes than in CONFIGS"""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
EQUAL_FACTORS = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.8,
    "mscale_all_dim": 0.8,
}
FAMILIES = {
    name: CONFIGS[name]
    for name in (
        *("llama", "llama, tied", "llama, biases", "llama, multi-head attention"),
        *("llama, wide heads", "llama, llama3 rope", "llama, linear rope", "llama, yarn rope"),
        *("mistral", "qwen2, tied", "phi3", "phi3, long", "phi3, short", "olmo2", "granite"),
        *(
            "gemma4, shared keys",
            "gemma4, experts",
            "gemma4 unified",
            "gpt2",
            "qwen3",
            "qwen3, tied",
        ),
        *("qwen3.5", "qwen3.5 moe", "qwen3 next"),
        *("falcon h1, gated norms", "granite moe, shared"),
        *(
            "olmoe",
            "arcee",
            "ernie",
            "granite moe",
            "granite moe, shared",
            "deepseek v2",
            "glm4 moe lite",
        ),
        *("glm4 moe, groups", "solar open"),
        *QUANTIZED[4:],
        "exaone4, no windows",
    )
} | {  # what llama.cpp has in its code, and no file can change
    "falcon mamba": FalconMambaConfig(**MAMBA1, mixer_rms_eps=1e-5),
    "ministral3": Ministral3Config(**SHAPE, rope_parameters=YARN | {"llama_4_scaling_beta": 0.4}),
    "phimoe": PhimoeConfig(
        **SHAPE, attention_bias=True, lm_head_bias=True, num_local_experts=5, sliding_window=30
    ),
    "ernie moe": Ernie4_5_MoeConfig(
        **SHAPE, moe_num_experts=5, moe_k=2, moe_intermediate_size=24, moe_layer_interval=2
    ),
    "hunyuan moe": HunYuanMoEV1Config(**WIDE, num_experts=5, moe_topk=2),
    "gemma": GemmaConfig(**WIDE_TIED),
    "jais2": Jais2Config(**WIDE),
    "gemma2": Gemma2Config(**WIDE_TIED, query_pre_attn_scalar=32, sliding_window=9),
    "gemma3": Gemma3TextConfig(
        **WIDE_TIED | {"sliding_window_pattern": 6, "num_hidden_layers": 7},
        query_pre_attn_scalar=32,
        sliding_window=9,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma3n": Gemma3nTextConfig(
        **GEMMA3N | {"vocab_size_per_layer_input": VOCABULARY},
        num_kv_shared_layers=2,
        intermediate_size=[96, 96, 96, 64, 64],
        activation_sparsity_pattern=[0.9, 0.5, 0.0, 0.0, 0.0],
    ),
    "smollm3": SmolLM3Config(**SHAPE | {"num_hidden_layers": 5}, no_rope_layer_interval=4),
    "starcoder2": Starcoder2Config(
        **TIED | {"num_attention_heads": 2, "num_key_value_heads": 1}, sliding_window=None
    ),
    "gpt-oss": GptOssConfig(
        **WIDE,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=9,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        },
    ),
    "deepseek v2, groups": DeepseekV2Config(
        **LATENT | ROUTED,
        first_k_dense_replace=1,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
    ),
    "deepseek v3": DeepseekV3Config(
        **LATENT | ROUTED,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        rope_parameters=EQUAL_FACTORS,
    ),
    "deepseek v3.2": DeepseekV32Config(
        **LATENT | ROUTED | INDEXED,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        rope_parameters=EQUAL_FACTORS,
    ),
    "kimi linear": KimiLinearConfig(
        **LATENT | {"initializer_range": 0.12, "q_lora_rank": None, "num_hidden_layers": 4},
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_head_dim=16,
        linear_num_heads=4,
        num_local_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
    ),
    "lfm2 moe": Lfm2MoeConfig(
        **TIED | EXPERTS, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1
    ),
    "granite hybrid, dense": GraniteMoeHybridConfig(
        **TIED | MAMBA | {"intermediate_size": 72},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        shared_intermediate_size=72,
        num_local_experts=0,
        position_embedding_type="rope",
    ),
    "youtu": YoutuConfig(**LATENT),
    "minicpm3": MiniCPM3Config(**LATENT | {"v_head_dim": 16}),
    "minimax": MiniMaxConfig(
        **SHAPE | {"num_hidden_layers": 8, "initializer_range": 0.12},
        layer_types=[*["linear_attention"] * 7, "full_attention"],
        num_local_experts=5,
        linear_attn_alpha_factor=1.7,
        full_attn_alpha_factor=1.7,
        mlp_alpha_factor=1.7,
        block_size=16,
    ),
    "minimax m3": MiniMaxM3VLTextConfig(
        **MINIMAX_M3 | {"swiglu_limit": 7.0}, index_topk_blocks=2, index_block_size=7
    ),
    "mimo v2 flash": MiMoV2FlashConfig(
        **WIDE | ROUTED | {"n_shared_experts": None, "routed_scaling_factor": 1.0},
        v_head_dim=64,
        sliding_window=9,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "hy v3": HYV3Config(**WIDE | {"num_shared_experts": 2}, **EXPERTS),
    "dots1": Dots1Config(**SHAPE | ROUTED, norm_topk_prob=True, sliding_window=None),
    "afmoe": AfmoeConfig(
        **SHAPE | {"head_dim": 32, "num_hidden_layers": 5},
        **EXPERTS,
        sliding_window=9,
        mup_enabled=True,
    ),
    "cohere2 moe": Cohere2MoeConfig(  # type: ignore[call-arg]
        **COHERE2_MOE,
        first_k_dense_replace=2,
        prefix_dense_intermediate_size=96,
        num_shared_experts=2,
        expert_selection_fn="sigmoid",
    ),
    "laguna": LagunaConfig(
        **LAGUNA | {"num_hidden_layers": 5},
        num_attention_heads_per_layer=[4, 6, 6, 2, 4],
        layer_types=["full_attention", *["sliding_attention"] * 3, "full_attention"],
        sliding_window=9,
        moe_routed_scaling_factor=2.5,
        rope_parameters={
            "full_attention": {
                **YARN,
                "attention_factor": 1.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "laguna, gates of outputs": LagunaConfig(
        **LAGUNA,
        gating="per-element",
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
        sliding_window=0,
    ),
    "llama4": Llama4TextConfig(
        **SHAPE
        | {
            "num_hidden_layers": 5,
            "head_dim": 16,
        },
        intermediate_size_mlp=80,
        interleave_moe_layer_step=2,
        num_local_experts=5,
    ),
    "qwen2 moe": Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=40),
    "cohere, norms": CohereConfig(**TIED | {"num_attention_heads": 2}, use_qk_norm=True),
    "cohere2": Cohere2Config(  # type: ignore[call-arg]
        **SHAPE | {"num_hidden_layers": 5, "tie_word_embeddings": True},
        sliding_window=9,
        sliding_window_pattern=4,
    ),
    "mixtral": MixtralConfig(
        **WIDE, num_local_experts=5, num_experts_per_tok=2, sliding_window=None
    ),
    "mellum": MellumConfig(
        **WIDE,
        **EXPERTS,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "qwen3 moe": Qwen3MoeConfig(
        **WIDE,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
}
K = GGMLQuantizationType
DECODED = [
    *(K.IQ3_S, K.IQ3_XXS, K.IQ2_S, K.IQ2_XS, K.IQ2_XXS, K.IQ1_M, K.IQ1_S, K.TQ1_0),
]
"""Formats without codes in memory"""
KINDS = [
    *(K.F16, K.BF16, K.Q8_0, K.Q4_0, K.Q4_1, K.Q5_0, K.Q5_1, K.Q2_K, K.Q3_K, K.Q4_K, K.Q5_K),
    *(K.Q6_K, K.IQ4_NL, K.IQ4_XS, K.MXFP4, K.NVFP4, K.TQ2_0),
]
ROOMY = SHAPE | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
"""A shape whose rows all formats divide"""


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", FAMILIES[name])
    write_gguf(tmp_path / "model.gguf", model)
    tokens = random_tokens(TOKENS, 1)
    ours = logits_of(loaded(tmp_path / "model.gguf"), tokens)
    torch.testing.assert_close(ours, reference_logits(model, tokens), atol=1e-4, rtol=0)


RENAMED = {
    "llama": MODEL_ARCH.INTERNLM2,
    "qwen2, tied": MODEL_ARCH.QWEN2VL,
    "qwen3": MODEL_ARCH.QWEN3VL,
    "qwen3 moe": MODEL_ARCH.QWEN3VLMOE,
    "mistral": MODEL_ARCH.MISTRAL3,
    "mistral4": MODEL_ARCH.DEEPSEEK2,
}
"""Architectures that equal a family for text"""


@pytest.mark.parametrize("name", RENAMED)
def test_architecture_of_another_name_computes_the_family(tmp_path: Path, name: str) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", FAMILIES[name])
    write_gguf(tmp_path / "model.gguf", model, architecture=RENAMED[name])
    tokens = random_tokens(TOKENS, 1)
    ours = logits_of(loaded(tmp_path / "model.gguf"), tokens)
    torch.testing.assert_close(ours, reference_logits(model, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["glm", "phi"])
def test_queries_keys_and_values_may_be_one_tensor(tmp_path: Path, name: str) -> None:
    """Files of the first converters have them so."""
    model = make_checkpoint(tmp_path / "checkpoint", FAMILIES[name])
    write_gguf(tmp_path / "model.gguf", model, fuses_qkv=True)
    tokens = random_tokens(TOKENS, 1)
    ours = logits_of(loaded(tmp_path / "model.gguf"), tokens)
    torch.testing.assert_close(ours, reference_logits(model, tokens), atol=1e-4, rtol=0)


def test_factor_of_values_is_the_one_that_the_file_states(tmp_path: Path) -> None:
    """MiMo's; without the key of later converters, it is that of the first models."""
    config = copy.deepcopy(FAMILIES["mimo v2 flash"])
    config.attention_value_scale = 0.25
    model = make_checkpoint(tmp_path / "checkpoint", config)
    key = "mimo2.attention.value_scale"
    write_gguf(tmp_path / "model.gguf", model, further=lambda w: w.add_float32(key, 0.25))
    tokens = random_tokens(TOKENS, 1)
    ours = logits_of(loaded(tmp_path / "model.gguf"), tokens)
    torch.testing.assert_close(ours, reference_logits(model, tokens), atol=1e-4, rtol=0)


def test_values_with_a_factor_must_have_a_tensor_of_their_own(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", FAMILIES["mimo v2 flash"])
    write_gguf(tmp_path / "model.gguf", model, fuses_qkv=True)
    with pytest.raises(CheckpointError, match=r"model\.gguf: .* in one tensor"):
        loaded(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "granite", "qwen3 next", "deepseek v3", "gemma3n", "gemma4, experts"),
        *("glm moe dsa", "mimo v2 flash", "cohere2 moe", "laguna", "minimax"),
        *("bloom, six heads", "mpt, clipped", "dbrx"),
    ],
)
def test_wrong_values_name_the_file_and_its_key(family: str, tmp_path: Path) -> None:
    """The config.json that is made of a file lies in a directory which nobody knows."""
    path = tmp_path / "model.gguf"
    write_gguf(path, make_checkpoint(tmp_path / "checkpoint", FAMILIES[family]))
    metadata = GgufFile(path).metadata
    own = [key for key in metadata if key.startswith(f"{metadata['general.architecture']}.")]
    values: tuple[int | float | str, ...] = (-1, 0, 0.5, 2**31 - 1, "many")
    for key, wrong in itertools.product(own, values):
        file = GgufFile(path)
        file.metadata = {**metadata, key: wrong}
        try:
            (tmp_path / "config.json").write_text(json.dumps(config_of(file)))
            load_spec(tmp_path)
        except (GgufError, CheckpointError) as error:
            message = str(error)
            assert message.startswith(str(path))
            if wrong in (-1, "many") and "scaling.type" not in key:
                assert key in message


def test_window_of_zero_is_none(tmp_path: Path) -> None:
    """Phi 4's files have it, although every layer attends to all tokens."""
    model = make_checkpoint(tmp_path / "checkpoint", Phi3Config(**SHAPE, sliding_window=None))
    write_gguf(tmp_path / "model.gguf", model, further=lambda w: w.add_sliding_window(0))
    tokens = random_tokens(TOKENS, 1)
    ours = logits_of(loaded(tmp_path / "model.gguf"), tokens)
    torch.testing.assert_close(ours, reference_logits(model, tokens), atol=1e-4, rtol=0)


def test_model_takes_no_adapters(tmp_path: Path) -> None:
    """PEFT's adapters have the names of safetensors: each would be refused as unknown."""
    write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "checkpoint", CONFIGS["llama"]))
    assert loaded(tmp_path / "model.gguf").adapters is None


@pytest.mark.parametrize("kind", [*KINDS, *DECODED], ids=lambda kind: kind.name)
def test_each_format_is_decoded_as_its_own_library_decodes_it(tmp_path: Path, kind: K) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", LlamaConfig(**ROOMY))
    assert set(assert_decoded(tmp_path, model, kind).values()) == {K.F32, kind}


def test_keys_and_values_of_latents_are_decoded(tmp_path: Path) -> None:
    """Their tensors have three dimensions, and heads multiply them one by one."""
    wide = LATENT | {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    model = make_checkpoint(tmp_path / "checkpoint", YoutuConfig(**wide))
    kinds = assert_decoded(tmp_path, model, K.Q8_0)
    assert {kinds[f"blk.1.attn_{part}_b.weight"] for part in "kv"} == {K.Q8_0}


def test_factors_of_nvfp4_multiply_their_weights(tmp_path: Path) -> None:
    """A tensor has one, and each expert of a stack; without them the model would be another."""
    factors = {"blk.0.attn_q": [0.5], "blk.1.ffn_up_exps": [0.25, 2.0, 3.0, 0.125, 1.0, 4.0]}

    def add(writer: GGUFWriter) -> None:
        for name, numbers in factors.items():
            writer.add_tensor(f"{name}.scale", np.array(numbers, np.float32))
            writer.add_tensor(f"{name}.input_scale", np.ones(len(numbers), np.float32))

    model = make_checkpoint(tmp_path / "checkpoint", FAMILIES["qwen3 moe"])
    write_gguf(tmp_path / "model.gguf", model, K.NVFP4, further=add)
    content = decoded_tensors(tmp_path / "model.gguf")
    for name, numbers in factors.items():
        shape = (-1, *[1] * (content[f"{name}.weight"].ndim - 1))
        content[f"{name}.weight"] *= torch.tensor(numbers).view(shape)
    write_gguf(tmp_path / "decoded.gguf", model, content=content)
    tokens = random_tokens(TOKENS, 1)
    expected = logits_of(loaded(tmp_path / "decoded.gguf"), tokens)
    ours = logits_of(loaded(tmp_path / "model.gguf"), tokens)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def decoded_tensors(path: Path) -> dict[str, Tensor]:
    """Return the numbers of a file's tensors."""
    return {
        each.name: torch.from_numpy(np.array(dequantize(each.data, each.tensor_type)))
        for each in GGUFReader(path).tensors
    }


def assert_decoded(folder: Path, model: PreTrainedModel, kind: K) -> dict[str, K]:
    """Compare a file with one of its decoded numbers. Return the formats of its tensors."""
    path = folder / "model.gguf"
    write_gguf(path, model, kind)
    write_gguf(folder / "decoded.gguf", model, content=decoded_tensors(path))
    tokens = random_tokens(TOKENS, 1)
    expected = logits_of(loaded(folder / "decoded.gguf"), tokens)
    torch.testing.assert_close(logits_of(loaded(path), tokens), expected, atol=1e-4, rtol=0)
    kept = logits_of(loaded(path, "full"), tokens)  # in codes where there are kernels
    assert (kept - expected).abs().mean() < 0.03 * expected.std()
    return {each.name: each.tensor_type for each in GGUFReader(path).tensors}


def test_types_without_codes_are_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model takes several times the file's size in memory."""
    model = make_checkpoint(tmp_path / "checkpoint", LlamaConfig(**ROOMY))
    write_gguf(tmp_path / "model.gguf", model, K.IQ2_XS)
    loaded(tmp_path / "model.gguf", "full")
    assert "in IQ2_XS to float32" in caplog.text


@pytest.mark.parametrize("kind", [each for each in KINDS if each not in (K.F16, K.BF16)])
def test_parts_of_a_weight_are_those_of_its_numbers(kind: K) -> None:
    """Ranks and rotated heads take some of a weight's rows or columns, unread."""
    block, _ = GGML_QUANT_SIZES[kind]
    blocks = random_blocks((40, 4 * block), kind)
    whole = torch.from_numpy(dequantize(blocks, kind))
    weight = read_groups(blocks, GgmlType(kind))
    assert weight is not None
    assert weight.shape == tuple(whole.shape)
    order = torch.randperm(40)
    again = weight.rows(order).rows(torch.tensor([7, 3]))
    last, part = weight.rows(slice(32, 40)), weight.columns(1, 2)
    assert part is not None
    for ours, theirs in (
        *((weight, whole), (weight.rows(order), whole[order]), (again, whole[order[[7, 3]]])),
        *((last, whole[32:]), (part, whole[:, 2 * block :])),
    ):
        assert torch.equal(ours.decode(), theirs)
    assert weight.columns(0, 8) is None  # would cut a block


def test_rearranged_mxfp4_has_the_numbers_of_the_file() -> None:
    """A GPU reads experts in the order of safetensors; ranks take some rows or columns."""
    random = np.random.default_rng(7)
    blocks = random.integers(0, 256, (40, 8, 17), dtype=np.uint8)
    blocks[:, :, 0] = random.integers(0, 253, (40, 8))  # above it numbers are infinite
    rows = blocks.reshape(40, -1)
    whole = torch.from_numpy(dequantize(rows, K.MXFP4))
    weight = Mxfp4Weight.from_gguf(torch.from_numpy(rows))
    assert weight.shape == tuple(whole.shape)
    part = weight.columns(1, 4)
    assert part is not None
    for ours, theirs in (
        *((weight, whole), (weight.rows(slice(1, None, 2)), whole[1::2])),
        (part, whole[:, 64:128]),
    ):
        assert torch.equal(ours.decode().float(), theirs)
    assert weight.columns(0, 16) is None  # would cut a group


def assert_decodes_alike(folder: Path, model: PreTrainedModel, kind: K) -> Tensor:
    """Assert that codes of `kind` in model.gguf give the logits of what they decode to.

    Returns these logits.
    """
    write_gguf(folder / "model.gguf", model, kind)
    write_gguf(folder / "decoded.gguf", model, content=decoded_tensors(folder / "model.gguf"))
    tokens = random_tokens(TOKENS, 1)
    expected = logits_of(loaded(folder / "decoded.gguf"), tokens)
    ours = logits_of(loaded(folder / "model.gguf"), tokens)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    return expected


def test_experts_stay_apart_in_mxfp4(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", FAMILIES["gpt-oss"])
    assert_decodes_alike(tmp_path, model, K.MXFP4)


@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_of_a_family_stay_with_their_rows(tmp_path: Path, name: str) -> None:
    """Families differ in the order of rows and in what they leave out."""
    assert_decodes_alike(tmp_path, make_checkpoint(tmp_path / "checkpoint", FAMILIES[name]), K.Q8_0)


def test_quantized_value_heads_keep_their_keys(tmp_path: Path) -> None:
    """Value heads are stored in another order, and their weights may be codes."""
    model = make_checkpoint(tmp_path / "checkpoint", FAMILIES["qwen3.5"])
    expected = assert_decodes_alike(tmp_path, model, K.Q8_0)
    tokens = random_tokens(TOKENS, 1)
    kept = logits_of(loaded(tmp_path / "model.gguf", "full"), tokens)
    # the kernels round inputs to 8 bits; heads in another order differ by about 1
    assert (kept - expected).abs().mean() < 0.2 * expected.std()


def test_bamba_is_refused(tmp_path: Path) -> None:
    """The converter reorders heads of which half rotates as if the whole did."""
    model = make_checkpoint(tmp_path / "checkpoint", CONFIGS["bamba"])
    write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(StartupError, match="dimension_count is less than a head"):
        loaded(tmp_path / "model.gguf")


def test_layers_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    def add_layer(writer: GGUFWriter) -> None:
        writer.add_uint32("qwen35.block_count", 5)
        writer.add_uint32("qwen35.nextn_predict_layers", 1)
        for name in ("attn_norm", "nextn.eh_proj"):
            writer.add_tensor(f"blk.4.{name}.weight", np.zeros(64, np.float32))

    model = make_checkpoint(tmp_path / "checkpoint", FAMILIES["qwen3.5"])
    write_gguf(tmp_path / "model.gguf", model, further=add_layer)
    tokens = random_tokens(TOKENS, 1)
    ours = logits_of(loaded(tmp_path / "model.gguf"), tokens)
    torch.testing.assert_close(ours, reference_logits(model, tokens), atol=1e-4, rtol=0)


def test_split_file_is_read_from_any_of_its_parts(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", FAMILIES["llama"])
    write_gguf(tmp_path / "model.gguf", model, split_max_tensors=10)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    tokens = random_tokens(TOKENS, 1)
    for part in (parts[0], parts[-1], tmp_path):
        ours = logits_of(loaded(part), tokens)
        torch.testing.assert_close(ours, reference_logits(model, tokens), atol=1e-4, rtol=0)
    parts[1].unlink()
    with pytest.raises(StartupError, match=f"{parts[1].name} is missing"):
        loaded(parts[0])


@pytest.mark.parametrize("size", [0, 3, 20, 200, 3000, 40_000])
def test_truncated_file_is_refused_in_one_sentence(tmp_path: Path, size: int) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", FAMILIES["llama"])
    write_gguf(tmp_path / "model.gguf", model)
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content[:size])
    with pytest.raises((StartupError, CheckpointError)) as refused:
        loaded(tmp_path / "model.gguf")
    assert "truncated" in str(refused.value) or "not a GGUF file" in str(refused.value)
    assert "\n" not in str(refused.value)


@settings(max_examples=150)
@given(data=st.data())
def test_damage_anywhere_is_refused_or_harmless(
    data: st.DataObject, damaged: tuple[Path, bytes]
) -> None:
    path, content = damaged
    place = data.draw(st.integers(0, 6000))
    path.write_bytes(content[:place] + data.draw(st.binary(max_size=9)) + content[place + 9 :])
    with suppress(StartupError, CheckpointError):
        loaded(path)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A small file and its content, to be damaged."""
    folder = tmp_path_factory.mktemp("damaged")
    write_gguf(folder / "model.gguf", make_checkpoint(folder / "c", LlamaConfig(**SHAPE)))
    return folder / "model.gguf", (folder / "model.gguf").read_bytes()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.add_string("general.architecture", "rwkv7"), "architecture rwkv7 is not"),
        (lambda w: w.add_string("tokenizer.ggml.model", "rwkv"), "tokenizer rwkv is not supported"),
        (lambda w: w.add_string("tokenizer.ggml.pre", "whitespace"), "pre-tokenizer whitespace is"),
        (lambda w: w.add_string("llama.block_count", "3"), "block_count must be a whole number"),
        (lambda w: w.add_token_merges(["ab"]), "merge 'ab' does not have two parts"),
        (lambda w: w.add_token_types([1]), "97 tokens, but 1 types"),
        (lambda w: w.add_token_list(["a"] * 97), "the token 'a' twice"),
        (lambda w: w.add_uint32("general.alignment", 0), "alignment must be a positive"),
        (lambda w: w.add_uint32("llama.embedding_length", 128), "but config.json asks for"),
        (lambda w: w.add_tensor("x.weight", np.zeros(3, np.float64)), "stored as F64, which is"),
        (lambda w: w.add_tensor("x.weight", np.zeros((1, 18), np.uint8), raw_dtype=K.Q1_0), "Q1_0"),
        (lambda w: w.add_tensor("x.weight", np.zeros(3, np.float32)), "x.weight is not part of"),
    ],
)
def test_wrong_content_is_refused_with_its_key(
    tmp_path: Path, change: Callable[[GGUFWriter], None], reason: str
) -> None:
    model = make_checkpoint(tmp_path / "checkpoint", FAMILIES["llama"])
    write_gguf(tmp_path / "model.gguf", model, further=change)
    with pytest.raises((StartupError, CheckpointError), match=reason):
        loaded(tmp_path / "model.gguf")


PLAIN = {name: FAMILIES[name] for name in ("llama", "mistral", "qwen2, tied")} | {
    "nemotron": NemotronConfig(**SHAPE),
    "stablelm": StableLmConfig(**SHAPE),
}
"""Checkpoints of which transformers reads all metadata"""


@pytest.mark.parametrize("name", PLAIN)
def test_transformers_reads_the_same_file_alike(tmp_path: Path, name: str) -> None:
    """The tests' own writer would not notice a convention that it shares with the reader."""
    model = make_checkpoint(tmp_path / "checkpoint", PLAIN[name])
    write_gguf(tmp_path / "model.gguf", model, K.F16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    tokens = random_tokens(TOKENS, 1)
    ours = logits_of(loaded(tmp_path / "model.gguf"), tokens)
    torch.testing.assert_close(ours, reference_logits(theirs, tokens), atol=1e-4, rtol=0)


def loaded(path: Path, weights: str = "decoded") -> Model:
    with opened_checkpoint(path) as directory:
        return load_model(directory, torch.float32, weights=weights)


def logits_of(decoder: Model, tokens: Tensor) -> Tensor:
    driver = Driver(decoder, [tokens], block_size=16)
    driver.step([(0, len(tokens) - 5)])
    for _ in range(5):
        driver.step([(0, 1)])
    return driver.logits[0]
