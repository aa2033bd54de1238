"""EAGLE-3 heads compute the paper's formulas, and heads of other models are refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.eagle_config import eagle_depths, is_eagle
from services.engine.model.eagle_head import load_eagle
from tests.unit.engine.checkpoints.driver import Driver
from tests.unit.engine.eagle import DIM, HEADS, KV_HEADS, load_tapped, make_eagle
from tests.unit.engine.tiny import VOCABULARY, make_checkpoint

LENGTH, FOLLOWING = 23, 4


def rotated(heads: Tensor) -> Tensor:
    """Rotate heads [heads, n, dim] at the positions 0 to n - 1."""
    count, half = heads.shape[1], heads.shape[2] // 2
    angles = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def reference(tensors: Mapping[str, Tensor], embedded: Tensor, residual: Tensor) -> Tensor:
    """Return the head's output [n, hidden] before its norm, of all rows at once."""

    def of(name: str) -> Tensor:
        return tensors[f"midlayer.{name}.weight"]

    def normed(rows: Tensor, name: str) -> Tensor:
        return rms_norm(rows, rows.shape[-1:], of(name), 1e-5)

    joined = torch.cat(
        (normed(embedded, "input_layernorm"), normed(residual, "hidden_norm")), dim=-1
    )
    queries, keys, values = (
        (joined @ of(f"self_attn.{name}_proj").T).view(len(joined), -1, DIM).transpose(0, 1)
        for name in "qkv"
    )
    keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (keys, values))
    attended = scaled_dot_product_attention(
        rotated(queries), rotated(keys), values, is_causal=True
    ).transpose(0, 1)
    residual = residual + attended.flatten(1) @ of("self_attn.o_proj").T
    rows = normed(residual, "post_attention_layernorm")
    inner = silu(rows @ of("mlp.gate_proj").T) * (rows @ of("mlp.up_proj").T)
    return residual + inner @ of("mlp.down_proj").T


@pytest.mark.parametrize(
    ("layer", "more"),
    [
        ("midlayer.", {"eagle_config": {}}),
        ("layers.0.", {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "eagle_config": None}),
        ("midlayer.", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}),
    ],
)
def test_logits_are_those_of_the_published_formulas(
    layer: str, more: Mapping[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    target = transformers.LlamaForCausalLM(config)
    target.save_pretrained(tmp_path / "model")
    head_path = make_eagle(tmp_path / "head", tmp_path / "model", layer=layer, more=more)
    read = (2, 3, 3) if more == {"eagle_config": {}} else (1, 3, 5)
    ids = torch.randint(VOCABULARY, (LENGTH + FOLLOWING,))
    with torch.no_grad():
        states = target(ids[None, :LENGTH], output_hidden_states=True).hidden_states
    tensors = {
        name.replace(layer, "midlayer."): tensor
        for name, tensor in load_file(head_path / "model.safetensors").items()
    }
    embedded = target.model.embed_tokens.weight.detach()[ids[1:]]
    joined = torch.cat([states[depth][0] for depth in read], dim=-1)
    residual = joined @ tensors["fc.weight"].T
    for count in range(LENGTH, LENGTH + FOLLOWING):
        out = reference(tensors, embedded[:count], residual)
        residual = torch.cat((residual, out[-1:]))
    expected = rms_norm(out, out.shape[-1:], tensors["norm.weight"], 1e-5)
    expected = expected @ tensors["lm_head.weight"].T

    decoder = load_tapped(tmp_path / "model", head_path)
    model = load_eagle(head_path, decoder, "model").model
    feeder, follower = Driver(decoder, [ids], 4), Driver(model, [ids[1:]], 4)
    logits = []
    for count in (7, 1, 1, LENGTH - 9):
        decoder.forward(feeder.batch([(0, count)]), feeder.cache)
        feeder.advance([(0, count)])
        tapped = torch.cat(list(decoder.tapped(count)), dim=1)
        hidden = model.run(follower.batch([(0, count)]), follower.cache, tapped, is_own=False)
        follower.advance([(0, count)])
        own = model.following_states(hidden[-1:])
        logits.append(model.logits(hidden).clone())
    for _ in range(FOLLOWING - 1):
        hidden = model.run(follower.batch([(0, 1)]), follower.cache, own, is_own=True)
        follower.advance([(0, 1)])
        own = model.following_states(hidden)
        logits.append(model.logits(hidden).clone())
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=1e-4)


def test_head_drafts_the_ids_of_its_table(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    path = make_eagle(tmp_path / "head", model)
    head = load_eagle(path, load_tapped(model, path), "model")
    known = load_file(path / "model.safetensors")["t2d"]
    assert list(head.targets) == torch.arange(VOCABULARY)[known].tolist()


def test_head_without_a_vocabulary_of_its_own_shares_the_models(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    path = make_eagle(
        tmp_path / "head",
        model,
        without=("lm_head.weight", "d2t", "t2d"),
        more={"draft_vocab_size": VOCABULARY},
    )
    decoder = load_tapped(model, path)
    head = load_eagle(path, decoder, "model")
    assert not head.targets
    assert head.model.output is decoder.output
    assert head.model.embedding is decoder.embedding


@pytest.mark.parametrize(
    ("without", "more", "reason"),
    [
        (("fc.weight",), {}, "no file holds the tensor fc.weight"),
        (("lm_head.weight",), {}, "no file holds the tensor lm_head.weight"),
        (("d2t",), {}, "no file holds the tensor d2t"),
        ((), {"num_hidden_layers": 2}, "heads of one layer"),
        ((), {"hidden_size": 64}, "a width of 64 and no embeddings, and the model's have a width"),
    ],
)
def test_head_that_does_not_fit_is_refused(
    without: tuple[str, ...], more: Mapping[str, Any], reason: str, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "model")
    path = make_eagle(tmp_path / "head", model, without=without, more=more)
    with pytest.raises(CheckpointError, match=reason):
        load_eagle(path, load_tapped(model, path), "model")


def test_layers_that_the_model_lacks_are_refused() -> None:
    config = Config("config.json", {"eagle_aux_hidden_state_layer_ids": [2, 9, 12]})
    assert eagle_depths(config, 13) == (2, 9, 12)
    with pytest.raises(CheckpointError, match="the model has 12 layers"):
        eagle_depths(config, 12)
    assert eagle_depths(Config("config.json", {}), 32) == (2, 16, 29)


def test_heads_are_known_by_their_architecture() -> None:
    assert is_eagle(Config("", {"architectures": ["LlamaForCausalLMEagle3"]}))
    assert is_eagle(Config("", {"architectures": ["Eagle3LlamaForCausalLM"]}))
    assert not is_eagle(Config("", {"architectures": ["LlamaForCausalLM"]}))
