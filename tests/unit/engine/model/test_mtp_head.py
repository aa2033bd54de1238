"""MTP layers compute the paper's formulas with the layer that transformers computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from services.common.model_files.checkpoint import opened_checkpoint
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.decoder import Decoder
from services.engine.model.loader import load_model
from services.engine.model.mtp_head import load_mtp
from tests.unit.engine.checkpoints.driver import Driver
from tests.unit.engine.checkpoints.shapes import YARN
from tests.unit.engine.mtp import FORMATS, MtpParts, make_mtp, write_mtp_gguf
from tests.unit.engine.tiny import make_checkpoint

LENGTH, FOLLOWING = 23, 4


def load_tapped(model: Path) -> Decoder:
    decoder = load_model(model, torch.float32)
    assert isinstance(decoder, Decoder)
    decoder.tap([decoder.spec.num_layers])
    return decoder


@torch.no_grad()
def expected_logits(parts: MtpParts, ids: Tensor) -> Tensor:
    """Return the logits of LENGTH - 1 + FOLLOWING rows, of which the last ones read own states."""
    model, epsilon = parts.whole.model, parts.whole.config.rms_norm_eps
    layers, norm = model.layers, model.norm

    def normed(rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, rows.shape[-1:], weight, epsilon)

    model.layers = layers[:-1]
    states = model(ids[None, :LENGTH], use_cache=False).last_hidden_state[0]
    model.layers, model.norm = layers[-1:], nn.Identity()
    embedded = normed(model.embed_tokens(ids[1:]), parts.embedding_norm)
    for count in range(LENGTH, LENGTH + FOLLOWING):
        joined = torch.cat((embedded[:count], normed(states, parts.states_norm)), dim=1)
        inputs = joined @ parts.projection.T
        out = model(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0]
        out = normed(out, parts.final_norm)
        states = torch.cat((states, out[-1:]))
    model.layers, model.norm = layers, norm
    logits: Tensor = parts.whole.lm_head(out)
    return logits


def computed_logits(path: Path, ids: Tensor) -> Tensor:
    """Return the rows of `expected_logits` as our layer computes them."""
    decoder = load_tapped(path)
    model = load_mtp(path, decoder, "model")
    size = decoder.block_size
    feeder, follower = Driver(decoder, [ids], size), Driver(model, [ids[1:]], size)
    logits = []
    for count in (7, 1, 1, LENGTH - 9):
        hidden = decoder.forward(feeder.batch([(0, count)]), feeder.cache)
        feeder.advance([(0, count)])
        [states] = decoder.tapped(count)
        hidden = model.run(follower.batch([(0, count)]), follower.cache, states, is_own=False)
        follower.advance([(0, count)])
        own = model.following_states(hidden[-1:])
        logits.append(model.logits(hidden).clone())
    for _ in range(FOLLOWING - 1):
        hidden = model.run(follower.batch([(0, 1)]), follower.cache, own, is_own=True)
        follower.advance([(0, 1)])
        own = model.following_states(hidden)
        logits.append(model.logits(hidden).clone())
    return torch.cat(logits)


@pytest.mark.parametrize("family", FORMATS)
def test_logits_are_those_of_the_published_formulas(family: str, tmp_path: Path) -> None:
    parts = make_mtp(tmp_path, family)
    torch.manual_seed(3)
    ids = torch.randint(parts.whole.config.vocab_size, (LENGTH + FOLLOWING,))
    expected = expected_logits(parts, ids)
    logits = computed_logits(tmp_path, ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["deepseek v3", "glm4 moe", "qwen3 next", "qwen3.5"])
def test_layer_of_a_gguf_file_computes_the_same(family: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {}
    if family == "deepseek v3":  # files have no further factors of YaRN
        changes["rope_parameters"] = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    parts = make_mtp(tmp_path, family, **changes)
    write_mtp_gguf(tmp_path / "model.gguf", parts)
    torch.manual_seed(3)
    ids = torch.randint(parts.whole.config.vocab_size, (LENGTH + FOLLOWING,))
    with opened_checkpoint(tmp_path / "model.gguf") as directory:
        logits = computed_logits(directory, ids)
    torch.testing.assert_close(logits, expected_logits(parts, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FORMATS)
def test_model_whose_last_states_are_copied_returns_the_same_rows(
    family: str, padded: bool, tmp_path: Path
) -> None:
    """A prompt needs one row of logits, but the MTP layer reads the states of all tokens."""
    make_mtp(tmp_path, family)
    plain, decoder = load_model(tmp_path, torch.float32), load_tapped(tmp_path)
    ids = torch.randint(64, (17,), generator=torch.Generator().manual_seed(2))
    rows = []
    for model in (plain, decoder):
        driver = Driver(model, [ids], model.block_size, padded=padded)
        driver.step([(0, 17)], kept=[2])
        rows.append(driver.logits[0][-2:])
    torch.testing.assert_close(rows[1], rows[0], atol=1e-5, rtol=1e-5)


def test_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no file holds an MTP layer"):
        load_mtp(model, load_tapped(model), "model")


def test_layer_with_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    make_mtp(tmp_path, "glm4 moe")
    decoder = load_tapped(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    [name] = [each for each in tensors if each.endswith("eh_proj.weight")]
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"no file holds the tensor {name}"):
        load_mtp(tmp_path, decoder, "model")
