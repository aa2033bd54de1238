"""A model on transformers' modules computes what it computes in transformers, in any batch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BloomConfig,
    DbrxConfig,
    HeliumConfig,
    LlamaConfig,
    LongcatFlashConfig,
    MptConfig,
    OpenAIGPTConfig,
    PreTrainedModel,
    Qwen3Config,
    RoFormerConfig,
    XGLMConfig,
)

from services.engine.engine import Engine
from services.engine.execution.model_loader import load_any_model
from services.engine.messages import RequestDone, Token
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.model_code import ModelCode
from services.engine.model.transformers_code.paged_model import TransformersModel
from services.engine.settings import EngineSettings
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits
from tests.unit.engine.checkpoints.shapes import SHAPE
from tests.unit.engine.machines import needs_tiles
from tests.unit.engine.quantized_checkpoints import FORMATS, quantize

TOKENS = 60
HELIUM = HeliumConfig(**SHAPE, head_dim=16)
"""No family of ours"""
BART = BartConfig(
    vocab_size=SHAPE["vocab_size"],
    d_model=64,
    decoder_layers=2,
    decoder_attention_heads=4,
    decoder_ffn_dim=96,
    max_position_embeddings=256,
    is_encoder_decoder=False,
)
DBRX = DbrxConfig(
    vocab_size=SHAPE["vocab_size"],
    d_model=64,
    n_heads=4,
    n_layers=2,
    max_seq_len=256,
    attn_config={"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10_000.0},
    ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
)
LONGCAT = LongcatFlashConfig(
    vocab_size=SHAPE["vocab_size"],
    hidden_size=64,
    num_layers=2,
    num_attention_heads=4,
    ffn_hidden_size=96,
    expert_ffn_hidden_size=32,
    n_routed_experts=4,
    zero_expert_num=2,
    moe_topk=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    head_dim=16,
    max_position_embeddings=256,
)
BLOOM = BloomConfig(  # type: ignore[call-arg]
    vocab_size=SHAPE["vocab_size"], hidden_size=96, n_head=6, n_layer=2, seq_length=256
)
MPT = MptConfig(vocab_size=SHAPE["vocab_size"], d_model=96, n_heads=6, n_layers=2, max_seq_len=256)
GPT = OpenAIGPTConfig(
    vocab_size=SHAPE["vocab_size"], n_embd=64, n_head=4, n_layer=2, n_positions=256
)
ROFORMER = RoFormerConfig(
    vocab_size=SHAPE["vocab_size"],
    embedding_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=256,
    rotary_value=True,
    is_decoder=True,
)
XGLM = XGLMConfig(
    vocab_size=SHAPE["vocab_size"],
    d_model=64,
    num_layers=2,
    attention_heads=4,
    ffn_dim=96,
    max_position_embeddings=256,
)
FAMILIES = {
    "helium": HELIUM,
    "llama": CONFIGS["llama"],
    "qwen3, tied": CONFIGS["qwen3, tied"],
    "gemma2, with caps and windows": CONFIGS["gemma2"],
    "gpt2, with transposed weights": CONFIGS["gpt2"],
    "mixtral, with experts": CONFIGS["mixtral"],
    "gpt-oss, with sinks": CONFIGS["gpt-oss"],
    "deepseek v3, with narrow values": CONFIGS["deepseek v3"],
    "bart, whose layers count positions": BART,
    "dbrx, whose experts are a loop": DBRX,
    "bloom, with linear biases": BLOOM,
    "mpt, with linear biases": MPT,
    "gpt, whose attention is its own": GPT,
    "roformer, whose attention is its own": ROFORMER,
    "xglm, whose attention is its own": XGLM,
    "longcat, whose router multiplies a weight": LONGCAT,
}
_WIDE = SHAPE | {"intermediate_size": 128, "head_dim": 32}
WIDE = {"llama": LlamaConfig(**_WIDE, attention_bias=True), "qwen3": Qwen3Config(**_WIDE)}
"""Models whose widths are multiples of 32"""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("checkpoint")
    return path, make_checkpoint(path, FAMILIES[request.param])


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_logits_equal_those_of_transformers(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    """Prompts at once, in chunks, behind a cached prefix, and decodes beside each other."""
    path, model = checkpoint
    decoder = load_any_model(path, torch.float32, code="transformers")
    assert decoder.code is ModelCode.TRANSFORMERS
    sequences = [random_tokens(TOKENS, seed) for seed in range(3)]
    sequences.append(torch.cat((sequences[0][:40], sequences[1][40:])))
    driver = Driver(decoder, sequences, block_size=16)
    driver.step([(0, TOKENS)])
    driver.share(3, 0, 40)
    driver.step([(1, 30), (2, 7)])
    driver.step([(2, 11), (1, 5), (3, 9)])
    for _ in range(8):
        driver.step([(1, 1), (2, 1), (3, 2)])
    for ours, tokens in zip(driver.logits, sequences, strict=True):
        assert_equal(ours, reference_logits(model, tokens)[: len(ours)])


@needs_tiles
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("packed", [None, "awq"])
def test_packed_products_give_the_logits_of_native_code(
    name: str, packed: str | None, tmp_path: Path
) -> None:
    """Steps of prompts, chunks and decodes, of which the later ones replay the first."""
    model = make_checkpoint(tmp_path, WIDE[name])
    if packed is not None:
        quantize(tmp_path, model, FORMATS[packed])
    computed = []
    for code in ("transformers", "native"):
        sequences = [random_tokens(TOKENS, seed) for seed in range(3)]
        driver = Driver(load_any_model(tmp_path, torch.bfloat16, code=code), sequences)
        driver.step([(0, TOKENS - 9), (1, 20)])
        driver.step([(1, 10), (2, 40)], kept=[1, 5])
        for _ in range(9):
            driver.step([(0, 1), (1, 1), (2, 1)])
        computed.append([each[~each.isnan().any(dim=1)] for each in driver.logits])
    for ours, theirs in zip(*computed, strict=True):
        assert (ours - theirs).abs().mean() < 0.05 * theirs.std()


@pytest.mark.parametrize(
    ("name", "count"),
    [("llama", 3), ("qwen3", 3), ("qwen2, tied", 3), ("mistral, window", 3), ("olmo2", 0)],
)
def test_layers_with_code_of_llama_or_qwen3_run_on_our_operators(
    name: str, count: int, tmp_path: Path
) -> None:
    """They would run at half the speed; others, whose norms lie elsewhere, stay as they are."""
    make_checkpoint(tmp_path, CONFIGS[name])
    model = load_any_model(tmp_path, torch.float32, code="transformers")
    assert isinstance(model, TransformersModel)
    assert model.num_fused == count


def test_only_output_rows_get_logits(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    path, model = checkpoint
    sequences = [random_tokens(TOKENS, seed) for seed in range(2)]
    driver = Driver(load_any_model(path, torch.float32, code="transformers"), sequences)
    driver.step([(0, 20), (1, 30)], kept=[1, 3])
    for ours, tokens, count in zip(driver.logits, sequences, (1, 3), strict=True):
        computed = ~ours.isnan().any(dim=1)
        assert computed.sum() == count
        assert_equal(ours[computed], reference_logits(model, tokens)[: len(ours)][computed])


@pytest.fixture(scope="module")
def helium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("helium")
    make_checkpoint(path, HELIUM)
    return path


def test_preempted_sequences_generate_what_each_generates_alone(helium: Path) -> None:
    """A cache for 96 tokens, and three sequences of 50: some are computed twice."""
    settings = EngineSettings(dtype="float32", device="cpu", kv_memory="72KiB")
    prompts = [random_tokens(20, seed).tolist() for seed in range(3)]
    with Engine(helium, settings) as engine:
        assert engine.model.model_code == "transformers"
        alone = [
            engine.generate(each, max_tokens=30, temperature=0, ignore_eos=True).token_ids
            for each in prompts
        ]
        handles = [
            engine.submit(each, max_tokens=30, temperature=0, ignore_eos=True) for each in prompts
        ]
        together: dict[int, list[int]] = {handle: [] for handle in handles}
        running = set(handles)
        while running:
            for output in engine.step():
                if isinstance(output, Token):
                    together[output.handle].append(output.id)
                elif isinstance(output, RequestDone):
                    running.discard(output.handle)
    assert list(together.values()) == alone


@pytest.mark.parametrize(
    ("code", "runs_on"), [("auto", ModelCode.NATIVE), ("transformers", ModelCode.TRANSFORMERS)]
)
def test_flag_chooses_the_code_of_a_family_of_ours(
    code: str, runs_on: ModelCode, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama"])
    assert load_any_model(tmp_path, torch.float32, code=code).code is runs_on


def test_native_code_alone_refuses_other_architectures(helium: Path) -> None:
    assert load_any_model(helium, torch.float32).code is ModelCode.TRANSFORMERS
    with pytest.raises(CheckpointError, match="architecture HeliumForCausalLM is not supported"):
        load_any_model(helium, torch.float32, code="native")
