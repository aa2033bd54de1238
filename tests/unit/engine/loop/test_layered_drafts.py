"""Drafts of several MTP layers: the output stays the same, and each layer drafts its own token."""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.execution import layered_drafts
from services.engine.execution.layered_drafts import LayeredDrafts
from services.engine.messages import GrantCredit, Token
from services.engine.model.layered_head import LayeredHead
from services.engine.scheduling.draft_plan import DraftPart, DraftResult
from tests.unit.engine.checkpoints.driver import Driver
from tests.unit.engine.loop.checked_graphs import CheckedGraphs
from tests.unit.engine.loop.test_step_loop import assert_same_up_to_ties
from tests.unit.engine.mtp import MtpPair, load_mtp_pair, make_tiny_mtp
from tests.unit.engine.tiny import (
    BLOCK,
    SAME_EXAMPLES,
    VOCABULARY,
    make_loop,
    make_request,
    run,
    tokens_of,
)

PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def useless(tmp_path_factory: pytest.TempPathFactory) -> dict[int, MtpPair]:
    """Models with layers of random weights, by the number of layers."""
    folder = tmp_path_factory.mktemp("useless")
    return {count: load_mtp_pair(make_tiny_mtp(folder / str(count), count)) for count in (1, 2, 3)}


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> dict[int, MtpPair]:
    """Models that count, and layers that each draft the right number, by the number of layers."""
    folder = tmp_path_factory.mktemp("counting")
    return {
        count: load_mtp_pair(make_tiny_mtp(folder / str(count), count, counts=True))
        for count in (1, 2, 3)
    }


class WatchedDrafts(LayeredDrafts):
    """Drafts that note the parts they compute."""

    parts: ClassVar[list[DraftPart]] = []

    def make(self, parts: Sequence[DraftPart]) -> DraftResult:
        self.parts.extend(parts)
        return super().make(parts)


@pytest.fixture
def parts() -> list[DraftPart]:
    """Parts that `WatchedDrafts` compute."""
    WatchedDrafts.parts.clear()
    return WatchedDrafts.parts


@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=6),
    blocks=st.integers(18, 60),
    temperature=st.sampled_from([0.0, 0.05, 0.3]),
    credit=st.sampled_from([None, 1, 5]),
    counts=st.booleans(),
    speculate=st.booleans(),
    padded=st.booleans(),
    overlaps=st.booleans(),
    most_kept=st.sampled_from([8, 4096]),
    n=st.integers(1, 3),
    layers=st.integers(1, 3),
)
@settings(SAME_EXAMPLES, max_examples=60)
def test_layers_never_change_output(
    useless: dict[int, MtpPair],
    counting: dict[int, MtpPair],
    prompts: list[list[int]],
    blocks: int,
    temperature: float,
    credit: int | None,
    counts: bool,
    speculate: bool,
    padded: bool,
    overlaps: bool,
    most_kept: int,
    n: int,
    layers: int,
) -> None:
    """Greedy or seeded, together with preemption, shared prefixes, n-grams, choices and credit."""
    pair = (counting if counts else useless)[layers]
    requests = [
        make_request(
            i, [prompt], max_tokens=30, temperature=temperature, credit=credit, logprobs=2, n=n
        )
        for i, prompt in enumerate(prompts)
    ]
    more = [GrantCredit(i, 100) for i in range(len(prompts))]
    plain = run(make_loop(pair.decoder, blocks=blocks), [*requests, *more])
    drafting = make_loop(
        pair.decoder,
        draft=pair.head,
        blocks=blocks,
        speculate=speculate,
        padded=padded,
        overlaps=overlaps,
        most_kept=most_kept,
    )
    drafted = run(drafting, [*requests, *more])
    for place, ids in tokens_of(plain).items():
        if temperature:
            assert tokens_of(drafted)[place] == ids
            continue
        alone = [o for o in plain if isinstance(o, Token) and (o.handle, o.sequence) == place]
        assert_same_up_to_ties(tokens_of(drafted)[place], alone)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("layers", [2, 3])
def test_each_layer_drafts_the_token_that_it_was_made_for(
    counting: dict[int, MtpPair], layers: int, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that read other tokens or states would draft other numbers.

    Padded passes run as graphs of all layers, at the addresses of a capture.
    """
    monkeypatch.setattr(layered_drafts, "StepGraphs", CheckedGraphs)
    CheckedGraphs.runs = 0
    pair = counting[layers]
    loop = make_loop(pair.decoder, draft=pair.head, padded=padded)
    requests = [make_request(i, [[9, 4, 7, 5 + i]], max_tokens=60) for i in range(3)]
    outputs = run(loop, requests)
    for i in range(3):
        assert tokens_of(outputs)[i, 0] == [(6 + i + j) % VOCABULARY for j in range(60)]
    load = loop.take_output().load
    [total] = load.drafts
    assert total.accepted == total.drafted > 90
    assert load.steps < 180 / (layers + 0.5)
    assert (CheckedGraphs.runs > load.steps / 2) is padded


def test_more_layers_take_fewer_steps_than_one_that_reads_its_own_output(
    counting: dict[int, MtpPair],
) -> None:
    """A single layer drafts one right number: its output lacks the part of states that it reads."""
    steps = []
    for layers in (1, 2, 3):
        loop = make_loop(counting[layers].decoder, draft=counting[layers].head)
        run(loop, [make_request(1, [[9, 4, 7, 5]], max_tokens=80)])
        steps.append(loop.take_output().load.steps)
    assert steps[0] > 1.3 * steps[1] > 1.5 * steps[2]


def test_last_rows_of_a_pass_are_computed_again_once_their_tokens_are_known(
    counting: dict[int, MtpPair], parts: list[DraftPart]
) -> None:
    """Pages behind rejected draft tokens would mislead the deeper layers from then on."""
    rows: list[tuple[int, int]] = []

    class CheckedDrafts(WatchedDrafts):
        def make(self, parts: Sequence[DraftPart]) -> DraftResult:
            rows.extend((part.start - 1, part.end - 2) for part in parts)
            return super().make(parts)

    decoder, head = counting[3]
    loop = make_loop(decoder, draft=head, head_drafts=CheckedDrafts)
    run(loop, [make_request(1, [[9, 4, 7, 5, 8, 2]], max_tokens=60)])
    assert len(rows) > 5
    for (_, last), (first, _) in pairwise(rows):
        assert first == last - 1
    assert all(part.length <= 3 for part in parts)


def test_prefix_that_sequences_share_is_computed_once(
    counting: dict[int, MtpPair], parts: list[DraftPart]
) -> None:
    decoder, head = counting[3]
    loop = make_loop(decoder, draft=head, head_drafts=WatchedDrafts)
    prompt = [3, 9, 4, 7, 1, 8] * 8
    run(loop, [make_request(1, [[*prompt, 5]], max_tokens=20)])
    assert parts[0].start == 1
    parts.clear()
    outputs = run(loop, [make_request(2, [[*prompt[:40], 2, 5]], max_tokens=20)])
    assert (parts[0].start, parts[0].first_block) == (41, 0)
    assert tokens_of(outputs)[2, 0] == [*range(6, 26)]


def test_layers_go_on_behind_hidden_states_that_are_gone(
    counting: dict[int, MtpPair], parts: list[DraftPart]
) -> None:
    """The layers' context begins at a later block, and tokens have the same positions."""
    decoder, head = counting[3]
    loop = make_loop(decoder, draft=head, head_drafts=WatchedDrafts, most_kept=32)
    outputs = run(loop, [make_request(1, [[*[3, 9, 4, 7] * 12, 5]], max_tokens=40)])
    assert (parts[0].first_block, parts[0].start) == (5, 21)
    [total] = loop.take_output().load.drafts
    assert total.accepted == total.drafted > 10
    assert tokens_of(outputs)[1, 0] == [*range(6, 46)]


@pytest.mark.parametrize("layers", [2, 3])
def test_drafts_are_those_of_one_pass_over_all_known_tokens(
    useless: dict[int, MtpPair], layers: int
) -> None:
    """Keys and values of rejected draft tokens would change later drafts."""
    made: list[tuple[list[int], Sequence[int]]] = []

    class FreeDrafts(LayeredDrafts):
        """Drafts whose passes take no time, so that rejected ones do not end them."""

        def make(self, parts: Sequence[DraftPart]) -> DraftResult:
            self._clock = lambda: 0.0
            result = super().make(parts)
            for part, draft in zip(parts, result.tokens, strict=True):
                if draft and not part.first_block:
                    made.append((part.sequence.tokens[: part.end].tolist(), draft))
            return result

    pair = useless[layers]
    loop = make_loop(pair.decoder, draft=pair.head, head_drafts=FreeDrafts)
    run(loop, [make_request(i, [[5 + i, 9, 3, 8, 2]], max_tokens=60) for i in range(3)])
    assert len(made) > 10
    assert max(len(draft) for _, draft in made) > 1
    for tokens, draft in made:
        assert list(draft) == drafts_of_one_pass(pair, tokens, len(draft))


def drafts_of_one_pass(pair: MtpPair, tokens: Sequence[int], count: int) -> list[int]:
    """Return the draft tokens that layers make behind tokens of which they know none yet."""
    decoder, head = pair
    assert isinstance(head, LayeredHead)
    rows = len(tokens) - 1
    decoder.taps_paused = False  # the last step of a loop may have paused them
    feeder = Driver(decoder, [torch.tensor(tokens[:rows])], BLOCK)
    decoder.forward(feeder.batch([(0, rows)]), feeder.cache)
    [tapped] = decoder.tapped(rows)
    states, known = tapped.clone(), list(tokens)
    for number in range(count):
        shifted = torch.tensor(known[number + 1 :])
        follower = Driver(head, [shifted], BLOCK)
        batch = follower.batch([(0, rows)])
        hidden, states = head.run_layer(number, batch, follower.cache, states)
        known.append(int(head.logits(hidden[-1:]).argmax()))
    return known[len(tokens) :]
