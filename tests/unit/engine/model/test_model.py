"""The forward pass equals that of transformers for any chunking and batching."""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    ApertusConfig,
    DeepseekV3Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    MptConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.models.mpt import modeling_mpt

import services.engine.model.attention
import services.engine.model.loader
from services.common.model_files.checkpoint import opened_checkpoint
from services.engine.kernels.library import InstructionSet, instruction_set, limit_instruction_set
from services.engine.model.architecture.tiling import runs_in_tiles
from services.engine.model.attention.native_backend import TiledAttention
from services.engine.model.decoder import Decoder
from services.engine.model.loader import load_model, load_spec
from services.engine.model.mixers import native_latent_attention
from services.engine.model.mixers.attention import AttentionMixer
from services.engine.model.model import Model
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, keep_last, random_tokens
from tests.unit.engine.checkpoints.files import (
    make_checkpoint,
    make_packed_checkpoint,
    reference_logits,
)
from tests.unit.engine.checkpoints.shapes import (
    GEMMA3N,
    GEMMA4,
    LATENT,
    MPT,
    ROUTED,
    SHAPE,
    VOCABULARY,
    WIDE,
)
from tests.unit.engine.gguf_checkpoints import write_gguf
from tests.unit.engine.machines import TILED, needs_tiles, restrict_kernels

TOKENS = 75


class Reference:
    """A checkpoint, its decoders, and the logits that transformers computes with it, each once."""

    def __init__(self, path: Path, model: PreTrainedModel) -> None:
        self._path = path
        self._model = model
        self._decoders: dict[str, Model] = {}
        self._logits: dict[bytes, Tensor] = {}

    def decoder(self, backend: str) -> Model:
        """Return the decoder of a `backend` that the fixture has set."""
        if backend not in self._decoders:
            self._decoders[backend] = load_model(self._path, torch.float32)
        return self._decoders[backend]

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [tokens, vocabulary] of a sequence."""
        key = tokens.numpy().tobytes()
        if key not in self._logits:
            self._logits[key] = reference_logits(self._model, tokens)
        return self._logits[key]


@pytest.fixture(scope="module", params=CONFIGS)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    path = tmp_path_factory.mktemp("checkpoint")
    return Reference(path, make_checkpoint(path, CONFIGS[request.param]))


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test without the kernels and with them. Return which of both."""
    name = cast(str, request.param)
    if name == "torch":
        monkeypatch.setattr(services.engine.model.loader, "native", None)
        monkeypatch.setattr(services.engine.model.attention, "native", None)
        monkeypatch.setattr(native_latent_attention, "native", None)
    elif instruction_set() is None:
        pytest.skip("the kernels were not built")
    return name


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_logits_equal_those_of_transformers(reference: Reference, backend: str) -> None:
    """Prefill at once, in odd chunks, by token, and after a cached prefix, in mixed batches."""
    sequences = [random_tokens(TOKENS, seed) for seed in range(4)]
    sequences.append(torch.cat((sequences[0][:40], sequences[1][40:])))
    expected = [reference.logits(tokens) for tokens in sequences]
    driver = Driver(reference.decoder(backend), sequences, block_size=16)
    driver.step([(0, TOKENS)])  # at once
    driver.share(4, 0, 40)
    driver.step([(1, 40), (2, 1)])  # a prompt chunk of one token comes last
    driver.step([(2, 1), (1, 22), (3, 23)])
    for _ in range(4):  # decodes beside a prompt chunk, of sequence 1 over its 64th token
        driver.step([(1, 1), (2, 1), (3, 1), (4, 5)])
    driver.step([(2, 1), (1, 9), (3, 48), (4, 23)])
    driver.step([(2, 22)])
    for _ in range(5):  # decodes alone, over the 32nd token
        driver.step([(2, 1)])
    driver.step([(2, TOKENS - len(driver.logits[2]))])
    for ours, theirs in zip(driver.logits, expected, strict=True):
        assert_equal(ours, theirs)


def test_omitted_rows_leave_the_other_logits_unchanged(reference: Reference, backend: str) -> None:
    """A prompt's last logits and all later ones don't need the logits of its other tokens."""
    sequences = [random_tokens(TOKENS, seed) for seed in range(4)]
    driver = Driver(reference.decoder(backend), sequences, block_size=16)
    driver.step([(0, TOKENS)], kept=[1])
    driver.step([(1, 30), (2, 1)], kept=[3, 1])
    driver.step([(2, 1), (1, 20), (3, 40)], kept=[1, 1, 40])
    driver.step([(1, 1), (2, 1), (3, 20)], kept=[1, 1, 2])
    for _ in range(3):
        driver.step([(1, 1), (2, 1), (3, 1)])
    driver.step([(1, 20), (2, 66), (3, 11)], kept=[2, 1, 11])
    while len(driver.logits[2]) < TOKENS:
        driver.step([(i, 1) for i in (1, 2, 3) if len(driver.logits[i]) < TOKENS])
    for ours, tokens, count in zip(driver.logits, sequences, (1, 11, 10, 57), strict=True):
        computed = ~ours.isnan().any(dim=1)
        assert computed.sum() == count
        assert_equal(ours[computed], reference.logits(tokens)[computed])


@pytest.mark.parametrize("name", ["deepseek v3.2", "deepseek v4", "glm moe dsa"])
def test_sparse_attention_of_short_texts_reads_all_tokens(name: str, tmp_path: Path) -> None:
    """Up to index_topk tokens, the published models are dense."""
    config = copy.deepcopy(CONFIGS[name])
    config.update({"index_topk": TOKENS})
    model, tokens = make_checkpoint(tmp_path, config), random_tokens(TOKENS, 1)
    logits = []
    for weight in (1.0, -1.0):  # the other sign chooses the other tokens
        for site, tensor in model.named_parameters():
            if "weights_proj" in site:
                tensor.data.mul_(weight)
        model.save_pretrained(tmp_path)
        driver = Driver(load_model(tmp_path, torch.float32), [tokens])
        driver.step([(0, TOKENS - 1)])
        driver.step([(0, 1)])
        assert_equal(driver.logits[0], reference_logits(model, tokens))
        logits.append(driver.logits[0])
    assert torch.equal(*logits)


def test_mxfp4_experts_equal_transformers(tmp_path: Path) -> None:
    """gpt-oss's published format: MXFP4 blocks and scales."""
    model = make_packed_checkpoint(tmp_path)
    tokens = random_tokens(TOKENS, 1)
    driver = Driver(load_model(tmp_path, torch.float32, weights="decoded"), [tokens])
    driver.step([(0, TOKENS)])
    assert_equal(driver.logits[0], reference_logits(model, tokens))


@pytest.mark.parametrize("instructions", list(InstructionSet)[1:], ids=lambda each: each.name)
def test_mxfp4_experts_stay_packed_on_cpus(instructions: InstructionSet, tmp_path: Path) -> None:
    """Decoded to 16 bits, gpt-oss 120B takes 230 GB in place of 61."""
    model = make_packed_checkpoint(tmp_path)
    tokens = random_tokens(TOKENS, 1)
    expected = reference_logits(model, tokens)
    with restrict_kernels(instructions) as native:
        dtype = torch.bfloat16 if instructions in TILED else torch.float32
        sizes = []
        for weights in ("decoded", "full"):
            decoder = load_model(tmp_path, dtype, weights=weights)
            sizes.append(decoder.weight_bytes)
        driver = Driver(decoder, [tokens])
        driver.step([(0, TOKENS - 1)])
        driver.step([(0, 1)])
        native.use_pool(0)
    experts = sum(each.numel() for each in model.parameters() if each.ndim == 3)
    assert sizes[0] - sizes[1] > 0.9 * experts  # a byte for each weight, or more
    assert (driver.logits[0].float() - expected).abs().mean() < 0.05 * expected.std()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A model with heads of 32, which the tiled kernels support."""
    path = tmp_path_factory.mktemp("wide")
    return path, make_checkpoint(path, CONFIGS["qwen3"])


@pytest.mark.parametrize(
    ("dtype", "highest"),
    [
        (torch.bfloat16, InstructionSet.AVX2),
        (torch.bfloat16, InstructionSet.AVX512_BF16),
        (torch.bfloat16, InstructionSet.AMX),
        (torch.float16, InstructionSet.AMX),
    ],
)
def test_half_precision_stays_close_to_float32(
    wide: tuple[Path, PreTrainedModel], dtype: torch.dtype, highest: InstructionSet
) -> None:
    """The kernels round no worse than transformers does in the same dtype."""
    path, model = wide
    tokens = random_tokens(TOKENS, 1)
    exact = reference_logits(model, tokens)
    rounded = reference_logits(copy.deepcopy(model).to(dtype), tokens).float()  # type: ignore[arg-type]
    with limit_instruction_set(highest):
        driver = Driver(load_model(path, dtype), [tokens])
        driver.step([(0, 41)])
        driver.step([(0, 20)], kept=[12])
        for _ in range(TOKENS - 61):
            driver.step([(0, 1)])
    logits = driver.logits[0]
    computed = ~logits.isnan().any(dim=1)
    assert computed.sum() == TOKENS - 8
    assert (logits - exact)[computed].std() < 1.2 * (rounded - exact)[computed].std()


@needs_tiles
@pytest.mark.parametrize(
    "family",
    [
        *("gemma2", "gemma3", "olmo2", "starcoder2", "gpt2", "mixtral", "qwen3 moe", "gpt-oss"),
        *("cohere, norms", "glm4", "gpt-neox", "nemotron", "apertus", "hunyuan", "seed oss"),
        *("glm4 moe lite", "lfm2", "lfm3", "bamba", "mamba", "minimax", "zamba", "zamba2"),
        *("deepseek v4", "minimax m3", "recurrent gemma", "mimo v2 flash", "cohere2 moe"),
        *("laguna", "longcat flash, wide", "bloom", "mpt", "dbrx", "inkling"),
    ],
)
def test_families_beyond_the_kernels_run_in_tiles(family: str, tmp_path: Path) -> None:
    """torch computes norms, activations and experts that the kernels lack, on tiled rows."""
    model = make_checkpoint(tmp_path, CONFIGS[family])
    tokens = random_tokens(TOKENS, 1)
    exact = reference_logits(model, tokens)
    rounded = reference_logits(model.to(torch.bfloat16), tokens).float()  # type: ignore[arg-type]
    driver = Driver(load_model(tmp_path, torch.bfloat16), [tokens, tokens])
    driver.step([(0, 41)])
    driver.step([(0, 20), (1, 9)])
    for _ in range(TOKENS - 61):
        driver.step([(0, 1), (1, 1)])
    # The median, because rounding may send a token to another expert in either model.
    error, usual = (driver.logits[0] - exact).abs(), (rounded - exact).abs()
    assert error.median() < 1.2 * usual.median()


def test_depths_of_a_shared_block_have_one_copy_of_its_weights(tmp_path: Path) -> None:
    """Zamba2 7B would take half as much memory again."""
    make_checkpoint(tmp_path, CONFIGS["zamba2, shared twice"])
    decoder = load_model(tmp_path, torch.float32)
    assert isinstance(decoder, Decoder)
    attention = [
        layer.mixer._weights for layer in decoder._layers if isinstance(layer.mixer, AttentionMixer)
    ]
    first, second, third = (id(weights.output) for weights in attention)
    assert first == third != second


def test_apertus_without_learned_activation_equals_transformers(tmp_path: Path) -> None:
    """Its file then has no constants of an activation."""
    config = ApertusConfig(**SHAPE | {"num_attention_heads": 2, "hidden_act": "silu"})
    model, tokens = make_checkpoint(tmp_path, config), random_tokens(TOKENS, 1)
    driver = Driver(load_model(tmp_path, torch.float32), [tokens])
    driver.step([(0, TOKENS)])
    assert_equal(driver.logits[0], reference_logits(model, tokens))


def test_mpt_has_the_slopes_and_the_scale_of_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPT 7B StoryWriter's slopes are less steep; transformers ignores these keys."""
    attention = {"alibi_bias_max": 16, "attn_impl": "triton"}
    config = MptConfig(**MPT, n_heads=2, attn_config=attention, logit_scale="inv_sqrt_d_model")
    model, tokens = make_checkpoint(tmp_path, config), random_tokens(TOKENS, 1)
    biases = partial(modeling_mpt.build_mpt_alibi_tensor, alibi_bias_max=16)
    monkeypatch.setattr(model.transformer, "build_mpt_alibi_tensor", biases)
    model.config.architectures = ["MPTForCausalLM"]  # as in published files
    model.config.save_pretrained(tmp_path)
    driver = Driver(load_model(tmp_path, torch.float32), [tokens])
    driver.step([(0, TOKENS)])
    assert_equal(driver.logits[0], reference_logits(model, tokens) / MPT["d_model"] ** 0.5)


def test_mpt_with_few_key_heads_equals_one_that_repeats_them(tmp_path: Path) -> None:
    """Replit Code 1.5, whose files transformers can't load."""
    model, tokens = make_checkpoint(tmp_path, MptConfig(**MPT, n_heads=4)), random_tokens(TOKENS, 1)
    file = tmp_path / "model.safetensors"
    tensors, decoder = load_file(file), cast(Any, model.transformer)
    for layer, block in enumerate(decoder.blocks):
        parts = block.attn.Wqkv.weight.data.view(3, 2, 2, -1, MPT["d_model"])
        parts[1:, :, 1] = parts[1:, :, 0]
        few = [parts[0].flatten(0, 2), *parts[1:, :, 0].flatten(1, 2)]
        tensors[f"transformer.blocks.{layer}.attn.Wqkv.weight"] = torch.cat(few)
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    config["attn_config"] |= {"attn_type": "grouped_query_attention", "kv_n_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    driver = Driver(load_model(tmp_path, torch.float32), [tokens])
    driver.step([(0, TOKENS)])
    assert_equal(driver.logits[0], reference_logits(model, tokens))


@needs_tiles
def test_streams_in_tiles_stay_close_to_float32(tmp_path: Path) -> None:
    """Gemma 3n's streams are fewer than the rows and columns of a tile."""
    widths = {"head_dim": 32, "hidden_size_per_layer_input": 32, "laurel_rank": 32}
    config = Gemma3nTextConfig(
        **GEMMA3N | widths,
        num_kv_shared_layers=2,
        intermediate_size=128,
        activation_sparsity_pattern=[0.9, 0.5, 0.0, 0.0, 0.0],
    )
    model = make_checkpoint(tmp_path, config)
    assert runs_in_tiles(load_spec(tmp_path), torch.bfloat16, torch.device("cpu"))
    tokens = random_tokens(TOKENS, 1)
    exact = reference_logits(model, tokens)
    rounded = reference_logits(model.to(torch.bfloat16), tokens).float()  # type: ignore[arg-type]
    driver = Driver(load_model(tmp_path, torch.bfloat16), [tokens])
    driver.step([(0, 40)])
    driver.step([(0, 1)])
    driver.step([(0, TOKENS - 41)])
    error, usual = (driver.logits[0] - exact).abs(), (rounded - exact).abs()
    assert error.median() < 1.2 * usual.median()


TILED_CONFIGS = CONFIGS | {
    "gemma4, layer inputs": Gemma4TextConfig(
        **GEMMA4 | {"head_dim": 32, "global_head_dim": 64},
        num_kv_shared_layers=3,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCABULARY,
    ),
}


Step: TypeAlias = tuple[list[tuple[int, int]], tuple[int, ...] | None]
"""Chunks of sequences, and how many rows of each are kept"""
MIXED_STEPS: Sequence[Step] = (
    ([(0, 1)], None),
    ([(0, 20), (1, 20)], None),
    ([(0, 1), (1, 4)], (1, 1)),
    # Needs larger buffers.
    ([(0, 1), (1, 40), (2, 40)], (1, 2, 1)),
    ([(0, 1), (1, 1), (2, 1)], None),
    ([(0, 1), (1, 1), (2, 30)], (1, 1, 4)),
    ([(0, 1), (2, 2), (1, 3)], None),
)


@needs_tiles
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "qwen3.5", "bamba", "qwen3 moe", "qwen3.5 moe", "gpt-oss", "phimoe, wide heads"),
        *("gemma2", "gemma3", "gemma4, experts", "gemma4, layer inputs", "olmo2", "glm4"),
        *("mimo v2 flash", "cohere2 moe", "laguna", "laguna, gates of outputs"),
        *("bloom", "mpt", "dbrx"),
    ],
)
def test_replayed_pass_equals_single_kernels(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise output would be wrong from the second step on, or when the batch changes."""
    make_checkpoint(tmp_path, TILED_CONFIGS[name])
    assert_replayed(tmp_path, monkeypatch)


DEEPSEEK_V3 = DeepseekV3Config(
    **LATENT
    | ROUTED
    | {"q_lora_rank": 32, "v_head_dim": 24, "moe_intermediate_size": 32}
    | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
)


@needs_tiles
@pytest.mark.parametrize(
    "config", [DEEPSEEK_V3, CONFIGS["longcat flash, wide"]], ids=lambda config: config.model_type
)
def test_replayed_decodes_of_latents_equal_single_kernels(
    config: PreTrainedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch attends for their prompt chunks, so only steps of decodes are recorded."""
    make_checkpoint(tmp_path, config)
    steps: Sequence[Step] = (
        ([(0, 20), (1, 33), (2, 1)], None),
        ([(0, 1), (1, 1)], None),
        ([(0, 1), (1, 1), (2, 1)], None),
        ([(0, 1), (2, 1), (1, 4)], (1, 1, 1)),
        ([(2, 1)], None),
    )
    assert_replayed(tmp_path, monkeypatch, steps, replayed=2)


def assert_replayed(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: Sequence[Step] = MIXED_STEPS,
    replayed: int = 5,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Compare steps, so many of which are replayed, with the same ones run kernel by kernel."""
    passes = {"replayed": 0, "one by one": 0}
    logits: dict[str, list[Tensor]] = {}
    for kind in passes:
        decoder = load_model(directory, dtype)
        assert isinstance(decoder, Decoder)
        run_layers, recording = decoder._run_layers, decoder._recording
        assert recording is not None

        def counted(*args: Any, kind: str = kind, run: Any = run_layers) -> None:
            passes[kind] += 1
            run(*args)

        monkeypatch.setattr(decoder, "_run_layers", counted)
        driver = Driver(decoder, [random_tokens(TOKENS, seed) for seed in range(3)])
        for chunks, kept in steps:
            if kind == "one by one":
                recording.discard()
            driver.step(chunks, kept)
        logits[kind] = driver.logits
    assert passes == {"replayed": len(steps) - replayed, "one by one": len(steps)}
    for ours, single in zip(logits["replayed"], logits["one by one"], strict=True):
        torch.testing.assert_close(ours, single, atol=0, rtol=0, equal_nan=True)


@needs_tiles
def test_quantized_layer_inputs_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a step of Gemma 4 E2B in a GGUF file is one call for each kernel."""
    model = make_checkpoint(tmp_path / "checkpoint", TILED_CONFIGS["gemma4, layer inputs"])
    write_gguf(tmp_path / "model.gguf", model, GGMLQuantizationType.Q8_0)
    with opened_checkpoint(tmp_path / "model.gguf") as directory:
        assert_replayed(directory, monkeypatch)


def test_quantized_prompts_are_replayed_without_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else prompts on a CPU with AVX2 wait for Python between all kernels."""
    model = make_checkpoint(tmp_path / "checkpoint", TILED_CONFIGS["llama"])
    write_gguf(tmp_path / "model.gguf", model, GGMLQuantizationType.Q8_0)
    with (
        restrict_kernels(InstructionSet.AVX2),
        opened_checkpoint(tmp_path / "model.gguf") as directory,
    ):
        assert_replayed(directory, monkeypatch, dtype=torch.float32)


@needs_tiles
def test_replayed_pass_shows_images_only_in_some_groups(tmp_path: Path) -> None:
    """In Gemma 4's layers without a window, a token of an image sees none after itself."""
    make_checkpoint(
        tmp_path,
        Qwen3Config(**WIDE, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    )
    decoder = load_model(tmp_path, torch.bfloat16)
    assert isinstance(decoder, Decoder)
    recording = decoder._recording
    assert recording is not None
    driver = Driver(decoder, [random_tokens(40, 1)])
    batch = replace(driver.batch([(0, 40)]), output_rows=keep_last([40], [25]))
    batch = batch.with_groups([batch.slots], [batch.block_tables])
    ends = torch.arange(1, 41, dtype=torch.int32)
    ends[10:30] = 30  # an image
    decoder.forward(batch, driver.cache)
    assert recording._operations is not None
    results = []
    for groups in ((False, False), (False, True), (True, False), (True, True)):
        own = batch.with_ends(ends, groups)
        decoder._recording = recording
        replayed = decoder.forward(own, driver.cache).clone()
        decoder._recording = None
        single = decoder.forward(own, driver.cache).clone()
        torch.testing.assert_close(replayed, single, atol=0, rtol=0)
        results.append(single)
    assert len({result.view(torch.int16).numpy().tobytes() for result in results}) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_sequence_are_independent_of_the_batch(
    wide: tuple[Path, PreTrainedModel], dtype: torch.dtype
) -> None:
    """Otherwise greedy output would change with the load."""
    path, _ = wide
    decoder = load_model(path, dtype)
    sequences = [random_tokens(TOKENS, seed) for seed in range(9)]
    alone = Driver(decoder, sequences[:1])
    alone.step([(0, 30)])
    crowd = Driver(decoder, sequences)
    crowd.step([(0, 30), (1, 50)])
    for step in range(20):
        alone.step([(0, 1)])
        others = [(index, 3) for index in range(2, 9)]
        crowd.step([(0, 1), (1, 1), *others] if step % 2 else [(0, 1), (1, 1)])
    if isinstance(decoder._attention, TiledAttention):  # the order of its sums is fixed
        assert torch.equal(alone.logits[0], crowd.logits[0])
    assert_equal(alone.logits[0], crowd.logits[0])
