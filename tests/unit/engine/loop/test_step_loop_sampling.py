"""Sampling in the step loop: independence from other sequences, resumption, and logprobs."""

from array import array
from dataclasses import replace

import pytest

from services.engine.checked_request import (
    DrySettings,
    LogitBias,
    MirostatSettings,
    Resume,
    SamplingSettings,
)
from services.engine.messages import Token
from services.engine.model.model import Model
from tests.unit.engine.loop.outputs import scores_of
from tests.unit.engine.tiny import (
    EOS,
    make_loop,
    make_request,
    mask_of,
    run,
    tokens_of,
    with_resume,
    with_sampling,
)

FREE = SamplingSettings(1.0, 1.0, 0, 0.0, 1)
GREEDY = replace(FREE, temperature=0.0)
BIAS = LogitBias(array("q", [4, 7, EOS]), array("f", [3.0, 2.0, -100.0]))
DRY = DrySettings(1.5, 1.75, 1, frozenset({9}))
SOME = mask_of({*range(4, 40)})
WORDS = ((5,), (7, 8), (8, 9, 5), *((i, i + 1) for i in range(10, 40, 2)))
FEATURES = {
    "logit_bias": replace(FREE, logit_bias=BIAS),
    "frequency and presence": replace(FREE, frequency_penalty=1.0, presence_penalty=0.5),
    "repetition": replace(FREE, repetition_penalty=1.4),
    "dry": replace(FREE, dry=DRY),
    "mirostat": replace(FREE, mirostat=MirostatSettings(4.0, 0.3)),
    "allowed ids": replace(FREE, allowed=SOME),
    "bad words": replace(FREE, bad_words=WORDS),
    "bad words of one token": replace(FREE, bad_words=((5,), (6,), (9,))),
    "suppressed ids": replace(FREE, suppressed=(5, 6, 9), suppressed_first=(7,)),
    "greedy with suppressed ids": replace(GREEDY, suppressed=(13, 43), suppressed_first=(35,)),
    "greedy with bad words": replace(GREEDY, bad_words=WORDS, allowed=SOME),
    "greedy": replace(GREEDY, repetition_penalty=1.4, dry=DRY, frequency_penalty=0.7),
    "greedy with a bias": replace(GREEDY, logit_bias=BIAS),
    "all": replace(
        FREE,
        logit_bias=BIAS,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        repetition_penalty=1.2,
        dry=DRY,
        mirostat=MirostatSettings(8.0, 0.2),
        allowed=SOME,
        bad_words=WORDS,
    ),
}
REPEATING = [7, 8, 9, 5, 7, 8, 9, 5, 7, 8]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("speculate", [False, True])
def test_sampling_does_not_depend_on_neighbours_preemption_and_speculation(
    decoder: Model, feature: str, speculate: bool
) -> None:
    sampling = FEATURES[feature]
    request = make_request(1, [REPEATING], n=2, max_tokens=30, sampling=sampling)
    alone = tokens_of(run(make_loop(decoder), [request]))
    others = [
        make_request(handle, [[handle, 5, 6, 7] * 3], max_tokens=30, sampling=other)
        for handle, other in enumerate((FREE, GREEDY, *FEATURES.values()), start=2)
    ]
    loop = make_loop(decoder, blocks=24, step_tokens=32, speculate=speculate)
    crowded = tokens_of(run(loop, [*others, replace(request, priority=-1)]))
    assert loop.take_output().load.preemptions > 0
    for i in range(2):
        assert crowded[1, i] == alone[1, i]
    plain = with_sampling(request, GREEDY if sampling.temperature == 0 else FREE)
    assert tokens_of(run(make_loop(decoder), [plain])) != alone


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("cut", [1, 5, 19])
def test_sampling_resumes_from_ids_and_mirostat_state(
    decoder: Model, feature: str, cut: int
) -> None:
    request = make_request(1, [REPEATING], n=2, max_tokens=20, sampling=FEATURES[feature])
    outputs = run(make_loop(decoder), [request])
    whole = {i: [o for o in outputs if isinstance(o, Token) and o.sequence == i] for i in range(2)}
    assert all((t.mirostat_mu is None) == (FEATURES[feature].mirostat is None) for t in whole[0])
    resume = [
        Resume(i, [t.id for t in tokens[:cut]], tokens[cut - 1].mirostat_mu)
        for i, tokens in whole.items()
    ]
    outputs = run(make_loop(decoder), [with_resume(request, *resume)])
    rest = [o for o in outputs if isinstance(o, Token)]
    for i, tokens in whole.items():
        mine = [t for t in rest if t.sequence == i]
        assert [t.id for t in mine] == [t.id for t in tokens[cut:]]
        assert [t.mirostat_mu for t in mine] == pytest.approx(
            [t.mirostat_mu for t in tokens[cut:]], abs=1e-3
        )


def test_sampling_settings_do_not_change_logprobs(decoder: Model) -> None:
    request = make_request(1, [REPEATING], max_tokens=20, sampling=FEATURES["all"], logprobs=0)
    tokens = [o for o in run(make_loop(decoder), [request]) if isinstance(o, Token)]
    whole = [*REPEATING, *(t.id for t in tokens)]
    scored = run(make_loop(decoder), [make_request(2, [whole], max_tokens=0, prompt_logprobs=0)])
    expected = scores_of(scored, 2)[len(REPEATING) - 1 :]
    assert [t.score.logprob for t in tokens if t.score] == pytest.approx(expected, abs=1e-4)
