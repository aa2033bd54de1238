"""Bad words and excluded ids are never generated; a request that allows no id fails."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.checked_request import SamplingSettings
from services.engine.messages import Finished, Refused, Token
from services.engine.model.model import Model
from services.engine.sampling.bad_words import BadWords, intersect_masks
from services.engine.sampling.row import Row
from services.engine.sampling.sampler import sample
from tests.unit.engine.loop.test_constrained import generate
from tests.unit.engine.tiny import (
    EOS,
    SAME_EXAMPLES,
    VOCABULARY,
    load_tiny,
    make_loop,
    make_request,
    mask_of,
    run,
    tokens_of,
    with_sampling,
)

WORDS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), max_size=8)
FREE = SamplingSettings(1.0, 1.0, 0, 0.0, 1)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


@given(words=WORDS, generated=st.lists(st.integers(1, 5), max_size=12))
def test_last_id_of_a_word_is_forbidden_after_its_beginning(
    words: list[list[int]], generated: list[int]
) -> None:
    expected = {
        word[-1]
        for word in words
        if len(word) <= len(generated) + 1 and [*generated, word[-1]][-len(word) :] == word
    }
    bad_words = BadWords(words)
    assert {*bad_words.forbidden_after(np.array(generated, dtype=np.int32))} == expected
    assert bad_words.looks_back == any(len(word) > 1 for word in words)


@given(
    grammar=st.none() | st.sets(st.integers(0, VOCABULARY - 1)),
    allowed=st.sets(st.integers(0, VOCABULARY - 1)),
    forbidden=st.lists(st.integers(0, VOCABULARY - 1), max_size=5),
)
def test_intersection_holds_the_ids_that_all_masks_allow(
    grammar: set[int] | None, allowed: set[int], forbidden: list[int]
) -> None:
    mask = None if grammar is None else mask_of(grammar).rstrip(b"\0")
    expected = allowed.difference(forbidden) & (allowed if grammar is None else grammar)
    assert intersect_masks(mask, mask_of(allowed), forbidden) == mask_of(expected).rstrip(b"\0")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_ids_are_not_drawn_where_min_tokens_bans_the_others(
    temperature: float,
) -> None:
    logits = torch.arange(10.0).repeat(200, 1)
    sampling = replace(FREE, temperature=temperature)
    banned = tuple(range(8))
    rows = [Row(sampling, 0, i, banned, forbidden=(8, 9)) for i in range(200)]
    assert {*sample(logits, rows)} <= {*range(8)}


@given(
    words=st.lists(st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=3), max_size=40),
    allowed=st.none() | st.sets(st.integers(0, VOCABULARY - 1), min_size=4),
    temperature=st.sampled_from([0.0, 1.0]),
    speculate=st.booleans(),
)
@settings(max_examples=40)
def test_bad_words_and_excluded_ids_are_never_generated(
    decoder: Model,
    words: list[list[int]],
    allowed: set[int] | None,
    temperature: float,
    speculate: bool,
) -> None:
    limited = replace(
        FREE,
        temperature=temperature,
        bad_words=tuple(map(tuple, words)),
        allowed=None if allowed is None else mask_of(allowed),
    )
    request = make_request(1, [[7, 8, 9, 5] * 3], n=2, max_tokens=40, sampling=limited)
    outputs = run(make_loop(decoder, speculate=speculate), [request])
    for tokens in tokens_of(outputs).values():
        assert allowed is None or {*tokens} <= allowed
        assert not any(has_run(tokens, word) for word in words)
    ended = [o for o in outputs if isinstance(o, Refused | Finished)]
    assert all(isinstance(o, Finished) for o in ended) or allowed is not None


def has_run(tokens: Sequence[int], word: Sequence[int]) -> bool:
    places = range(len(tokens) - len(word) + 1)
    return any([*tokens[place : place + len(word)]] == [*word] for place in places)


def test_prompt_is_no_beginning_of_a_bad_word(decoder: Model) -> None:
    greedy = make_request(1, [[3, 1, 4]], max_tokens=1)
    [first] = tokens_of(run(make_loop(decoder), [greedy]))[1, 0]
    words = ((4, first),)
    limited = with_sampling(greedy, replace(greedy.checked.sampling, bad_words=words))
    assert tokens_of(run(make_loop(decoder), [limited]))[1, 0] == [first]


def test_eos_is_drawn_only_where_it_is_allowed(decoder: Model) -> None:
    bits = {EOS, 5, 6}
    requests = [
        make_request(
            handle, [[1, 2]], max_tokens=60, ignore_eos=False, sampling=replace(FREE, allowed=ids)
        )
        for handle, ids in enumerate((mask_of(bits), mask_of({5, 6})))
    ]
    outputs = run(make_loop(decoder), requests)
    with_end, without = tokens_of(outputs)[0, 0], tokens_of(outputs)[1, 0]
    assert with_end[-1] == EOS
    assert len(without) == 60
    assert {*without} == {5, 6}


ALLOWED = st.lists(st.sets(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=16).map(
    lambda allowed: 3 * allowed
)


@given(
    grammar=ALLOWED,
    limit=st.sets(st.integers(1, 9), min_size=5),
    words=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple), max_size=3),
    jumps=st.booleans(),
    speculate=st.booleans(),
    lateness=st.lists(st.integers(0, 3), min_size=1, max_size=3),
)
@settings(SAME_EXAMPLES, max_examples=60)
def test_output_satisfies_grammar_and_limits_or_the_request_fails(
    decoder: Model,
    grammar: list[set[int]],
    limit: set[int],
    words: list[tuple[int, ...]],
    jumps: bool,
    speculate: bool,
    lateness: list[int],
) -> None:
    sampling = replace(FREE, allowed=mask_of(limit), bad_words=tuple(words))
    request = make_request(
        1, [[5, 6, 7] * 4], max_tokens=60, ignore_eos=False, constrained=True, sampling=sampling
    )
    one_by_one = generate(decoder, request, grammar, jumps=False)
    at_once = generate(
        decoder, request, grammar, jumps=jumps, speculate=speculate, lateness=lateness
    )
    tokens = [o.id for o in at_once if isinstance(o, Token)]
    assert tokens == [o.id for o in one_by_one if isinstance(o, Token)]
    assert type(at_once[-1]) is type(one_by_one[-1])
    assert {*tokens} <= limit
    assert not any(has_run(tokens, word) for word in words)
    if isinstance(at_once[-1], Refused):
        place = len(tokens)
        forbidden = BadWords(words).forbidden_after(np.array(tokens, dtype=np.int32))
        assert not (grammar[place] & limit).difference(forbidden)
        assert at_once[-1].code == "INVALID_ARGUMENT"
        assert at_once[-1].field == "sampling.allowed_token_ids"
    else:
        assert len(tokens) == len(grammar)
