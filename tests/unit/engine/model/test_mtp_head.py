"""MTP layers compute the paper's formulas with the layers that transformers computes."""

from dataclasses import replace
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
from services.engine.model.layered_head import LayeredHead
from services.engine.model.loader import load_model, load_spec, open_tensors
from services.engine.model.mtp_format import find_format, mtp_spec
from services.engine.model.mtp_head import load_mtp
from tests.unit.engine.checkpoints.driver import Driver
from tests.unit.engine.checkpoints.shapes import YARN
from tests.unit.engine.fp8_checkpoints import LAYOUTS, LEFT_OUT
from tests.unit.engine.mtp import FORMATS, MtpParts, make_mtp, quantize_mtp, write_mtp_gguf
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
    reference = Reference(parts)
    states = reference.states(ids[:LENGTH])
    embedded = reference.embedding[ids[1:]]
    for count in range(LENGTH, LENGTH + FOLLOWING):
        out, normed = reference.layer(0, embedded[:count], states)
        following = normed if reference.norms_states else out
        states = torch.cat((states, following[-1:]))
    return normed @ reference.output.T


@torch.no_grad()
def expected_logits_of_layers(parts: MtpParts, ids: Tensor, *, is_chained: bool) -> list[Tensor]:
    """Return the logits [LENGTH, vocabulary] of each layer.

    Row i of layer k has the embedding of token i + k. is_chained: layer k reads the output of layer
    k - 1; else hidden states of the model.
    """
    reference = Reference(parts)
    states, logits = reference.states(ids[:LENGTH]), []
    for depth in range(len(parts.layers)):
        embedded = reference.embedding[ids[depth + 1 : depth + 1 + LENGTH]]
        _, normed = reference.layer(depth, embedded, states)
        logits.append(normed @ reference.output.T)
        if is_chained:
            states = normed
    return logits


class Reference:
    """The formulas of MTP layers around the layers of a model of transformers."""

    def __init__(self, parts: MtpParts) -> None:
        self._parts = parts
        model = parts.whole.model
        self._model = getattr(model, "language_model", model)
        self._config = self._model.config
        self._layers, self._norm = self._model.layers, self._model.norm
        self._types = getattr(self._config, "layer_types", None)
        self.norms_states = self._config.model_type != "mimo_v2_flash"
        self.embedding: Tensor = self._model.embed_tokens.weight.detach()
        self.output: Tensor = parts.whole.lm_head.weight.detach()

    def states(self, ids: Tensor) -> Tensor:
        """Return the final hidden states that the first layer reads."""
        count = len(self._layers) - len(self._parts.layers)
        norm = self._norm if self.norms_states else nn.Identity()
        return self._run(slice(count), norm, input_ids=ids[None])

    def layer(self, depth: int, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of a layer, in front of its norm and behind it."""
        weights = self._parts.layers[depth]
        parts = (
            self._normed(embedded, weights.embedding_norm),
            self._normed(states, weights.states_norm),
        )
        inputs = torch.cat(parts, dim=1) @ weights.projection.T
        place = len(self._layers) - len(self._parts.layers) + depth
        out = self._run(slice(place, place + 1), nn.Identity(), inputs_embeds=inputs[None])
        return out, self._normed(out, weights.final_norm)

    def _run(self, layers: slice, norm: nn.Module, **inputs: Tensor) -> Tensor:
        """Run some layers of the model, each with the attention of its own kind."""
        config = self._config
        self._model.layers, self._model.norm = self._layers[layers], norm
        if self._types is not None:
            config.layer_types = self._types[layers]
        hidden: Tensor = self._model(**inputs, use_cache=False).last_hidden_state[0]
        self._model.layers, self._model.norm = self._layers, self._norm
        config.layer_types = self._types
        return hidden

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        epsilon = self._config.rms_norm_eps
        return rms_norm(rows, rows.shape[-1:], weight, epsilon)


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


def computed_logits_of_layers(path: Path, ids: Tensor) -> list[Tensor]:
    """Return the rows of `expected_logits_of_layers` as our layers compute them."""
    decoder = load_tapped(path)
    model = load_mtp(path, decoder, "model")
    assert isinstance(model, LayeredHead)
    depth, size = model.draft_layers, decoder.block_size
    feeder, follower = Driver(decoder, [ids], size), Driver(model, [ids], size)
    logits: list[list[Tensor]] = [[] for _ in range(depth)]
    for first, count in ((0, 7), (7, 1), (8, LENGTH - 8)):
        decoder.forward(feeder.batch([(0, count)]), feeder.cache)
        feeder.advance([(0, count)])
        [states] = decoder.tapped(count)
        batch, states = follower.batch([(0, count)]), states.clone()
        for number in range(depth):
            start = first + 1 + number
            shifted = replace(batch, token_ids=ids[start : start + count])
            hidden, states = model.run_layer(number, shifted, follower.cache, states)
            logits[number].append(model.logits(hidden).clone())
        follower.advance([(0, count)])
    return [torch.cat(rows) for rows in logits]


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("family", ["deepseek v3", "glm4 moe", "mimo", "mimo v2 flash"])
def test_each_of_several_layers_computes_the_published_formulas(
    family: str, layers: int, tmp_path: Path
) -> None:
    parts = make_mtp(tmp_path, family, layers)
    ids = random_ids(parts, LENGTH + layers)
    expected = expected_logits_of_layers(parts, ids, is_chained=family != "mimo v2 flash")
    computed = computed_logits_of_layers(tmp_path, ids)
    for mine, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_layers_of_a_gguf_file_compute_the_same(tmp_path: Path) -> None:
    parts = make_mtp(tmp_path, "glm4 moe", 3)
    write_mtp_gguf(tmp_path / "model.gguf", parts)
    ids = random_ids(parts, LENGTH + 3)
    expected = expected_logits_of_layers(parts, ids, is_chained=True)
    with opened_checkpoint(tmp_path / "model.gguf") as directory:
        computed = computed_logits_of_layers(directory, ids)
    for mine, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_layer_of_a_gguf_file_reads_an_output_projection_of_its_own(tmp_path: Path) -> None:
    """Embeddings that repeat the model's with other rounding are not read."""
    parts = make_mtp(tmp_path, "glm4 moe", 2)
    own = Reference(parts).output.flip(0).contiguous()
    write_mtp_gguf(tmp_path / "model.gguf", parts, output=own)
    ids = random_ids(parts, LENGTH + 2)
    first, second = expected_logits_of_layers(parts, ids, is_chained=True)
    with opened_checkpoint(tmp_path / "model.gguf") as directory:
        computed = computed_logits_of_layers(directory, ids)
    torch.testing.assert_close(computed[0], first.flip(1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(computed[1], second, atol=1e-4, rtol=1e-4)


def test_layer_reads_tables_of_its_own_unless_they_repeat_those_of_the_model(
    tmp_path: Path,
) -> None:
    """DeepSeek's files repeat the model's tables; copies in memory would take gigabytes."""
    parts = make_mtp(tmp_path, "deepseek v3", 2, own_tables=True)
    ids = random_ids(parts, LENGTH + 2)
    reference = Reference(parts)
    with torch.no_grad():
        embedded = reference.embedding.flip(0)[ids[1 : LENGTH + 1]]
        _, first = reference.layer(0, embedded, reference.states(ids[:LENGTH]))
        _, second = reference.layer(1, reference.embedding[ids[2 : LENGTH + 2]], first)
    expected = [first @ reference.output.flip(0).T, second @ reference.output.T]
    for mine, theirs in zip(computed_logits_of_layers(tmp_path, ids), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    decoder = load_tapped(tmp_path)
    head = load_mtp(tmp_path, decoder, "model")
    assert isinstance(head, LayeredHead)
    assert [each.output is decoder.output for each in head.layers] == [False, True]
    assert [each.embedding is decoder.embedding for each in head.layers] == [False, True]


def random_ids(parts: MtpParts, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    config = parts.whole.config.get_text_config()
    return torch.randint(config.vocab_size, (count,), generator=generator)


@pytest.mark.parametrize("family", FORMATS)
def test_logits_are_those_of_the_published_formulas(family: str, tmp_path: Path) -> None:
    parts = make_mtp(tmp_path, family)
    ids = random_ids(parts, LENGTH + FOLLOWING)
    expected = expected_logits(parts, ids)
    logits = computed_logits(tmp_path, ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


FP8_FILES = [
    *((family, "blocks", "") for family in FORMATS),
    ("deepseek v3", "blocks", "eh_proj"),
    ("glm4 moe", "channels", "eh_proj"),
    ("glm4 moe", "tensors", ""),
    ("qwen3 next", "blocks", "mtp.fc"),
    ("qwen3 next", "blocks", "mtp."),
    ("qwen3.5 moe", "blocks", "mtp."),
]
"""Families, layouts of scales, and the parts of an MTP layer that stay in bfloat16"""


def test_layer_has_the_window_that_the_file_states(tmp_path: Path) -> None:
    """Queries and keys of K-EXAONE rotate in layers with a window alone."""
    parts = make_mtp(tmp_path, "k-exaone", mtp_layer_types=["sliding_attention"])
    ids = random_ids(parts, LENGTH + FOLLOWING)
    logits = computed_logits(tmp_path, ids)
    torch.testing.assert_close(logits, expected_logits(parts, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "layout", "left_out"), FP8_FILES)
def test_layer_of_an_fp8_checkpoint_has_the_stored_numbers_times_their_scales(
    family: str, layout: str, left_out: str, tmp_path: Path
) -> None:
    parts = make_mtp(tmp_path, family)
    kept = (*LEFT_OUT, "visual", "mlp.shared_expert_gate", *filter(None, [left_out]))
    quantize_mtp(tmp_path, family, parts, LAYOUTS[layout], kept)
    ids = random_ids(parts, LENGTH + FOLLOWING)
    logits = computed_logits(tmp_path, ids)
    torch.testing.assert_close(logits, expected_logits(parts, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["deepseek v3", "glm4 moe", "qwen3 next", "qwen3.5", "k-exaone"])
def test_layer_of_a_gguf_file_computes_the_same(family: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {}
    if family == "deepseek v3":  # files have no further factors of YaRN
        changes["rope_parameters"] = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    parts = make_mtp(tmp_path, family, **changes)
    write_mtp_gguf(tmp_path / "model.gguf", parts)
    ids = random_ids(parts, LENGTH + FOLLOWING)
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
    with pytest.raises(CheckpointError, match="no file of the model holds an MTP layer"):
        load_mtp(model, load_tapped(model), "model")


def test_model_without_the_shape_of_its_layers_is_refused(tmp_path: Path) -> None:
    """MTP layers of MiMo V2 Flash have windows and dense feed-forward layers."""
    make_mtp(tmp_path, "mimo v2 flash")
    spec = load_spec(tmp_path)
    first, second, *_ = spec.layers
    with open_tensors(tmp_path, spec, drafts=True) as files:
        found = find_format(files, spec)
        assert found is not None
        with pytest.raises(CheckpointError, match="no layer with a window"):
            mtp_spec(files, replace(spec, layers=(first,)), found)
        with pytest.raises(CheckpointError, match="no layer with such a feed-forward layer"):
            mtp_spec(files, replace(spec, layers=(second,)), found)


def test_layer_with_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    make_mtp(tmp_path, "glm4 moe")
    decoder = load_tapped(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    [name] = [each for each in tensors if each.endswith("eh_proj.weight")]
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"no file holds the tensor {name}"):
        load_mtp(tmp_path, decoder, "model")
