"""Assistants of Gemma 4 compute what transformers computes, and others are refused."""

from pathlib import Path

import pytest
import torch

from services.engine.execution.assistant_drafts import AssistantDrafts
from services.engine.model.architecture.cache_groups import layer_groups
from services.engine.model.assistant_head import load_assistant
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.decoder import Decoder
from services.engine.model.loader import load_model
from tests.unit.engine.assistant import (
    UNIFIED,
    VOCABULARY,
    expected_logits,
    make_assistant,
    make_target,
)
from tests.unit.engine.checkpoints.driver import Driver
from tests.unit.engine.tiny import make_checkpoint

LENGTH, DRAFTED = 23, 4
"""Tokens before the newest one, more than the window; and draft tokens that are made"""


def load_target(path: Path) -> Decoder:
    decoder = load_model(path, torch.float32)
    assert isinstance(decoder, Decoder)
    decoder.tap([decoder.spec.num_layers])
    return decoder


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("family", ["gemma4, shared keys", "gemma4, experts", UNIFIED])
def test_logits_are_those_of_transformers(family: str, ordered: bool, tmp_path: Path) -> None:
    target = make_target(tmp_path / "model", family)
    assistant = make_assistant(tmp_path / "assistant", family, ordered=ordered)
    ids = torch.randint(VOCABULARY, (LENGTH + DRAFTED,), generator=torch.Generator().manual_seed(3))
    expected = expected_logits(target, assistant, ids[:LENGTH], ids[LENGTH:])
    decoder = load_target(tmp_path / "model")
    head = load_assistant(tmp_path / "assistant", decoder, "model")
    feeder = Driver(decoder, [ids[:LENGTH]], decoder.block_size)
    for count in (7, LENGTH - 7):
        decoder.forward(feeder.batch([(0, count)]), feeder.cache)
        feeder.advance([(0, count)])
    states = decoder.tapped(LENGTH - 7)[0][-1:].clone()
    drafts = AssistantDrafts(head, feeder.cache, decoder.spec.vocab_size, 64)
    drafts.warm_up()
    tables = [feeder.batch([(0, 0)]).block_tables[0].tolist()] * len(layer_groups(decoder.spec))
    logits, pages = [], head.pages_of(feeder.cache)
    for number, token in enumerate(ids[LENGTH:]):
        batch = drafts._batch([token[None].int().numpy()], [LENGTH], tables)
        hidden = head.run(batch, pages, states, is_own=number > 0)
        states = head.following_states(hidden)
        logits.append(head.logits(hidden)[0].clone())
        assert not head.has_argmax or head.argmax(hidden)[0] == logits[-1].argmax()
    got = torch.stack(logits)
    computed = got > -torch.inf
    assert computed.sum() == DRAFTED * VOCABULARY * (3 / 8 if ordered else 1)
    torch.testing.assert_close(got[computed], expected[computed], atol=1e-4, rtol=1e-4)
    assert not ordered or torch.equal(computed, expected > expected.min(1, keepdim=True).values)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backbone": 48}, "hidden states of a width of 48, and the model's have 64"),
        ({"vocabulary": 72}, "it has 72 ids, and the model 96"),
        ({"head_dim": 8}, "its layer 0 reads 2 keys of a width of 8 and a window of 9"),
    ],
)
def test_assistant_of_another_model_is_refused(
    changes: dict[str, int], reason: str, tmp_path: Path
) -> None:
    make_target(tmp_path / "model")
    make_assistant(tmp_path / "assistant", **changes)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=reason):
        load_assistant(tmp_path / "assistant", load_target(tmp_path / "model"), "model")


def test_assistant_of_another_family_is_refused(tmp_path: Path) -> None:
    make_assistant(tmp_path / "assistant")
    target = load_target(make_checkpoint(tmp_path / "model"))
    with pytest.raises(CheckpointError, match="it drafts for Gemma 4, and the model is Llama"):
        load_assistant(tmp_path / "assistant", target, "model")
