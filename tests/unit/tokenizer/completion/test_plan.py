"""Plan of a completion: ids in the engine's request in place of a client's text."""

import json
from pathlib import Path

import pytest

from services.tokenizer.completion.plan import plan_prompts
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.infill import InfillOrder, InfillTemplate
from services.tokenizer.text.vocabulary import Vocabulary
from tests.unit.tokenizer.checkpoints import byte_level, write_checkpoint
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.types.v1 import types_pb2 as types


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(write_checkpoint(tmp_path_factory.mktemp("plain"), byte_level()))


def _breaker_ids(
    vocabulary: Vocabulary, ids: list[int], breakers: list[str], *, none: bool = False
) -> list[int]:
    request = completion.GenerateRequest(
        prompts=completion.Prompts(items=[completion.Prompt(text="a")]),
        sampling=types.SamplingParams(dry=types.DryParams(multiplier=1, breaker_ids=ids)),
        dry_sequence_breakers=breakers,
        no_dry_sequence_breakers=none,
    )
    limits = ModelLimits(
        "m", "fp_0", 64, vocabulary.size, frozenset(), frozenset(), 5, 20, 128, 16, True
    )
    plan = plan_prompts(request, vocabulary, None, limits)
    return list(plan.engine_request.sampling.dry.breaker_ids)


@pytest.mark.parametrize(
    ("ids", "breakers", "expected"),
    [
        ([], [], {"\n", ":", '"', "*"}),
        ([], ["z"], {"z"}),
        ([5], [], set()),
        ([5], ["z"], {"z"}),
    ],
)
def test_breakers_are_added_to_the_ids_of_the_request(
    vocabulary: Vocabulary, ids: list[int], breakers: list[str], expected: set[str]
) -> None:
    """llama.cpp's breakers are the default."""
    containing = {
        token
        for token in range(vocabulary.size)
        if any(breaker in vocabulary.decode([token])[0] for breaker in expected)
    }
    assert _breaker_ids(vocabulary, ids, breakers) == sorted({*ids, *containing})
    assert bool(containing) == bool(expected)


def test_request_can_disable_all_breakers(vocabulary: Vocabulary) -> None:
    """The default ones would end repetitions that the client wants to penalize."""
    assert _breaker_ids(vocabulary, [], [], none=True) == []


def test_breakers_are_ids_below_the_embedding_size(tmp_path: Path) -> None:
    """Gemma 3's text models have no logit for the image token, so the engine would refuse it."""
    tokenizer = byte_level(plain=("<image_soft_token>",))
    write_checkpoint(tmp_path, tokenizer)
    size = tokenizer.get_vocab_size() - 1
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size}))
    vocabulary = Vocabulary(tmp_path)
    assert vocabulary.ids["<image_soft_token>"] == size
    assert 0 < max(vocabulary.ids_containing(("\n", "a"))) < size


@pytest.mark.parametrize(
    ("suffix", "ignore_eos", "stop_ids"),
    [("b", False, [5, 7, 9]), ("b", True, [7]), (None, False, [7])],
)
def test_infill_stops_at_the_tokens_that_begin_another_file(
    vocabulary: Vocabulary, suffix: str | None, ignore_eos: bool, stop_ids: list[int]
) -> None:
    """Models trained on repositories would continue with the next file."""
    request = completion.GenerateRequest(
        prompts=completion.Prompts(items=[completion.Prompt(text="a")], suffix=suffix),
        stopping=types.StoppingParams(stop_token_ids=[7], ignore_eos=ignore_eos),
    )
    limits = ModelLimits(
        "m", "fp_0", 64, vocabulary.size, frozenset(), frozenset(), 5, 20, 128, 16, True
    )
    infill = InfillTemplate("x", InfillOrder.PREFIX_SUFFIX_MIDDLE, 1, 2, 3, None, (5, 9))
    plan = plan_prompts(request, vocabulary, infill, limits)
    assert list(plan.engine_request.stopping.stop_token_ids) == stop_ids
