"""DeepSeek V4: published files, entries in blocks of any size, and what its cache takes."""

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config

from services.common.json_values import Json
from services.engine.model import hyper_connections
from services.engine.model.architecture.cache_groups import layer_groups
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint import mxfp4
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.stored_weights import StoredWeights
from services.engine.model.loader import load_model
from services.engine.model.mixers import compressed_attention, compressed_mixer
from services.engine.model.mixers.latent_pages import PIECE
from tests.unit.engine import fp8_checkpoints
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits
from tests.unit.engine.checkpoints.shapes import COMPRESSED

TOKENS = 75
WEIGHTS = "model.safetensors"
RENAMED = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
)
"""Names that transformers writes otherwise than they are published"""
PUBLISHED: dict[str, Any] = {
    "compress_ratios": [0, 4, 128, 4, 128, 0],
    "num_hash_layers": 2,
    "qk_rope_head_dim": 8,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}
"""Keys of the published files"""
WRITTEN = ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor")
"""Keys in their place that transformers writes"""
BLOCK = (32, 48)
QUANTIZED = {
    "quantization_config": {
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [*BLOCK],
    },
    "expert_dtype": "fp4",
}
ROUNDED = r"experts\.\d+\.|attn\.w|indexer\.wq_b|shared_experts"
"""Names of weights that the published files round"""
SHAPE: dict[str, Json] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 129_280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}


def test_published_names_and_keys_are_read(tmp_path: Path) -> None:
    """transformers writes other names of tensors and other keys than the published files have."""
    config = DeepseekV4Config(**COMPRESSED | dict.fromkeys(WRITTEN) | PUBLISHED)
    model, tokens = make_checkpoint(tmp_path, config), random_tokens(200, 1)
    keys = json.loads((tmp_path / "config.json").read_text())
    keys = {key: keys[key] for key in keys if key not in (*WRITTEN, "rope_parameters")}
    (tmp_path / "config.json").write_text(json.dumps(keys | PUBLISHED))
    tensors = load_file(tmp_path / WEIGHTS)
    for old, new in RENAMED:
        tensors = {re.sub(old, new, name): tensors[name] for name in tensors}
    tensors = {
        name: tensor.int() if name.endswith("tid2eid") else tensor
        for name, tensor in tensors.items()
    }
    save_file(tensors | {"mtp.0.norm.weight": torch.ones(64)}, tmp_path / WEIGHTS)
    driver = Driver(load_model(tmp_path, torch.float32), [tokens])
    driver.step([(0, 130)])
    driver.step([(0, 70)])
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)


def test_published_numbers_of_eight_and_four_bits_are_read(tmp_path: Path) -> None:
    """FP8 with a power of two for each block, experts in MXFP4, and compressors in neither."""
    make_checkpoint(tmp_path / "decoded", CONFIGS["deepseek v4"])
    shutil.copytree(tmp_path / "decoded", tmp_path / "published")
    published = load_file(tmp_path / "decoded" / WEIGHTS)
    numbers = dict(published)
    generator = torch.Generator().manual_seed(5)
    for name in [each for each in published if re.search(ROUNDED, each)]:
        weight, scale_name = published.pop(name), f"{name.removesuffix('weight')}scale"
        if ".experts." in name:
            shape = (len(weight), weight.shape[1] // 2)
            codes = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 126, (len(weight), shape[1] // 16), dtype=torch.uint8)
            numbers[name] = mxfp4.decode(codes.view(*scales.shape, 16), scales).float()
            published |= {name: codes.view(torch.int8)}
        else:
            scales = fp8_checkpoints.of_blocks(weight, BLOCK).log2().ceil()
            spread = fp8_checkpoints.spread(scales.exp2(), BLOCK, weight.shape)
            published[name] = (weight / spread).to(fp8_checkpoints.FP8)
            numbers[name] = published[name].float() * spread
            scales = (scales + 127).to(torch.uint8)
        published[scale_name] = scales.view(torch.float8_e8m0fnu)
    save_file(numbers, tmp_path / "decoded" / WEIGHTS)
    save_file(published, tmp_path / "published" / WEIGHTS)
    file = tmp_path / "published" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | QUANTIZED))
    tokens, logits = random_tokens(TOKENS, 1), []
    for path, weights in (("decoded", "full"), ("published", "decoded"), ("published", "full")):
        driver = Driver(load_model(tmp_path / path, torch.float32, weights=weights), [tokens])
        driver.step([(0, TOKENS)])
        logits.append(driver.logits[0])
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)
    # some kernels round the rows that experts in MXFP4 read
    assert (logits[2] - logits[0]).abs().median() < 0.1 * logits[0].std()


@pytest.mark.parametrize("block_size", [1, 5, 8, 32])
def test_blocks_may_end_within_an_entry(block_size: int, tmp_path: Path) -> None:
    model, tokens = make_checkpoint(tmp_path, CONFIGS["deepseek v4"]), random_tokens(TOKENS, 1)
    driver = Driver(load_model(tmp_path, torch.float32), [tokens], block_size)
    for count in (31, 1, 1, 20, 22):
        driver.step([(0, count)])
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)


def test_pieces_of_any_size_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long contexts are computed in pieces of a few rows, down to one that sees few entries."""
    model, tokens = make_checkpoint(tmp_path, CONFIGS["deepseek v4"]), random_tokens(TOKENS, 1)
    decoder, expected = load_model(tmp_path, torch.float32), reference_logits(model, tokens)
    monkeypatch.setattr(hyper_connections, "HYPER_ROWS", 5)
    for rows, piece in ((7, PIECE), (7, 1)):
        for module in (compressed_attention, compressed_mixer):
            monkeypatch.setattr(module, "QUERY_ROWS", rows)
            monkeypatch.setattr(module, "PIECE", piece)
        driver = Driver(decoder, [tokens])
        for count in (50, 25):
            driver.step([(0, count)])
        torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["sliding", "compressed_sparse", "heavily_compressed"])
def test_layers_may_all_be_of_one_kind(kind: str, tmp_path: Path) -> None:
    """Layers with windows alone keep no entries, and their only group of blocks has a window."""
    config = copy.deepcopy(CONFIGS["deepseek v4"])
    config.update({"layer_types": [f"{kind}_attention"] * 5})
    model, tokens = make_checkpoint(tmp_path, config), random_tokens(TOKENS, 1)
    driver = Driver(load_model(tmp_path, torch.float32), [tokens])
    for count in (40, 1, 34):
        driver.step([(0, count)])
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)


def test_copied_blocks_have_the_entries_of_their_tokens(tmp_path: Path) -> None:
    """Beams copy blocks of each group, whose numbers differ."""
    make_checkpoint(tmp_path, CONFIGS["deepseek v4"])
    decoder = load_model(tmp_path, torch.float32)
    cache = decoder.allocate_cache([6, 4], 32)
    for pages in cache.pages:
        pages.copy_(torch.rand_like(pages))
    before = copy.deepcopy(cache)
    decoder.copy_blocks(cache, [(0, 5, 1), (1, 3, 1)])
    for now, old, source in (
        *((cache.entries[each], before.entries[each], 5) for each in cache.entries),
        *((cache.latents[each], before.latents[each], 3) for each in cache.latents),
    ):
        assert torch.equal(now[1], old[source])
        now[1] = old[1]
        assert torch.equal(now, old)


def test_cache_of_long_texts_is_that_of_their_entries() -> None:
    """DeepSeek V4 Flash: docs/models.md states these numbers."""
    entries, tokens = layer_groups(ModelSpec.from_config(SHAPE))
    assert entries.block_width(128) == 21 * 32 * (512 + 128) + 20 * 512
    assert entries.block_width(32) == 21 * 8 * (512 + 128) + 20 * 512
    assert tokens.window == 128
    assert tokens.block_width(1) == 43 * 512 + 21 * (2048 + 512) + 20 * 1024


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"compress_rates": {"compressed_sparse_attention": 4}}, "heavily_compressed_attention"),
        ({"partial_rotary_factor": 0.125, "qk_rope_head_dim": 32}, "qk_rope_head_dim"),
        ({"rope_parameters": {"main": {"rope_theta": 1e4}}}, "rope_parameters.compress"),
        (
            {
                "rope_parameters": {
                    "main": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                    "compress": {"rope_theta": 1.6e5},
                }
            },
            "rope_parameters.main",
        ),
    ],
)
def test_contradicting_keys_are_refused(keys: dict[str, Json], named: str) -> None:
    """The model would answer at another rotation or another rate than it was trained for."""
    ModelSpec.from_config(SHAPE)
    with pytest.raises(CheckpointError, match=re.escape(named)):
        ModelSpec.from_config(SHAPE | keys)


def test_published_token_table_takes_no_memory(tmp_path: Path) -> None:
    """The table stays in the mapped file, so that the KV cache may have its memory."""
    weights = {"embed.weight": torch.ones(8, 4), "head.weight": torch.ones(8, 4)}
    save_file(weights, tmp_path / WEIGHTS)
    assert StoredWeights.of_directory(tmp_path).floats == 8 * 4


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    """Rounding is no worse than transformers' in the same dtype."""
    model, tokens = make_checkpoint(tmp_path, CONFIGS["deepseek v4"]), random_tokens(TOKENS, 1)
    exact = reference_logits(model, tokens)
    rounded = reference_logits(model.to(torch.bfloat16), tokens).float()  # type: ignore[arg-type]
    driver = Driver(load_model(tmp_path, torch.bfloat16), [tokens])
    driver.step([(0, 41)])
    driver.step([(0, 20)])
    for _ in range(TOKENS - 61):
        driver.step([(0, 1)])
    # The median, because rounding may send a token to another expert in either model.
    error, usual = (driver.logits[0] - exact).abs(), (rounded - exact).abs()
    assert error.median() < 1.2 * usual.median()
