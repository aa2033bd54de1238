"""Forced tokens, draft tokens and late masks never change the output under a grammar."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.checked_request import MirostatSettings, Resume, SamplingSettings
from services.engine.messages import (
    AddRequest,
    Command,
    Finished,
    GrantCredit,
    Output,
    RequestDone,
    StepOutput,
    Token,
)
from services.engine.model.decoder import Decoder
from services.engine.model.eagle_head import EagleHead
from services.engine.model.model import Model
from tests.unit.engine.eagle import load_with_head, make_eagle, make_repeater
from tests.unit.engine.loop.grammar import Grammar
from tests.unit.engine.mtp import MtpPair, load_mtp_pair, make_tiny_mtp
from tests.unit.engine.tiny import (
    SAME_EXAMPLES,
    VOCABULARY,
    make_checkpoint,
    make_loop,
    make_request,
    with_resume,
)

ALLOWED = st.lists(
    st.one_of(
        st.sets(st.integers(1, VOCABULARY - 1), min_size=1, max_size=1),
        st.sets(st.integers(1, VOCABULARY - 1), min_size=2, max_size=6),
    ),
    min_size=1,
    max_size=24,
)
"""Ids that each position of an output allows; the output ends after the last position"""
REPEATED = st.one_of(ALLOWED, ALLOWED.map(lambda allowed: 6 * allowed[:4]))
"""The same with repetitions, so that many draft tokens are right"""


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, EagleHead]:
    """A model that repeats the newest token, and a head that drafts that."""
    directory = tmp_path_factory.mktemp("headed")
    model = make_repeater(directory / "model", make_checkpoint(directory / "random"))
    return load_with_head(model, make_eagle(directory / "head", model, repeats=True))


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> MtpPair:
    """A model that counts, and MTP layers that draft the next numbers."""
    return load_mtp_pair(make_tiny_mtp(tmp_path_factory.mktemp("layered"), 3, counts=True))


def generate(
    decoder: Model,
    request: AddRequest,
    allowed: Sequence[set[int]],
    *,
    jumps: bool = True,
    lateness: Sequence[int] = (0,),
    blocks: int = 256,
    neighbours: int = 0,
    speculate: bool = False,
    overlaps: bool = False,
    draft: Model | None = None,
    targets: Sequence[int] = (),
) -> list[Output]:
    """Return the outputs of the request (handle 1), which runs beside unconstrained ones."""
    loop = make_loop(
        decoder,
        blocks=blocks,
        step_tokens=32,
        speculate=speculate,
        overlaps=overlaps,
        draft=draft,
        targets=targets,
    )
    grammar = Grammar(allowed, jumps, cycle(lateness))
    free = [make_request(2 + i, [[7 + i, 9]], max_tokens=20) for i in range(neighbours)]
    commands: list[Command] = [*free, request]
    grammar.open(request)
    outputs: list[Output] = []

    def receive() -> list[Command]:
        taken = [*commands, *grammar.masks()]
        commands.clear()
        return taken

    def take(step: StepOutput) -> None:
        outputs.extend(o for o in step.outputs if o.handle == 1)  # type: ignore[union-attr]
        grammar.feed(step.outputs)

    for turn in range(2000):
        take(loop.step(receive))
        loop.check()
        if request.credit is not None and turn % 5 == 4:
            commands.append(GrantCredit(1, 2))
        if loop.is_idle:
            return outputs
    raise AssertionError("the loop never came to rest")


Seen: TypeAlias = dict[int, list[tuple[object, ...]]]


def visible(outputs: Sequence[Output]) -> tuple[Seen, list[float]]:
    """Return what a client sees: tokens and end of each choice, and all floating-point numbers."""
    seen: Seen = {}
    numbers: dict[tuple[int, int], list[float]] = {}
    for output in outputs:
        if isinstance(output, Token):
            score, mu = output.score, output.mirostat_mu
            mine = (output.position, output.id, score and tuple(score.top_ids))
            seen.setdefault(output.sequence, []).append(mine)
            numbers[output.sequence, output.position] = [
                *([score.logprob] if score is not None else ()),
                *([mu] if mu is not None else ()),
            ]
        elif isinstance(output, Finished):
            end = (output.cause, output.token_id, output.completion_tokens)
            seen.setdefault(output.sequence, []).append(end)
    return seen, [number for place in sorted(numbers) for number in numbers[place]]


PLAIN = SamplingSettings(1.0, 1.0, 0, 0.0, 5)
KINDS: dict[str, Callable[..., AddRequest]] = {
    "greedy": lambda **more: make_request(1, [[1, 2, 3]], **more),
    "seeded": lambda **more: make_request(1, [[1, 2, 3]], sampling=PLAIN, **more),
    "choices": lambda **more: make_request(1, [[1, 2, 3], [4]], n=3, sampling=PLAIN, **more),
    "penalised": lambda **more: make_request(
        1, [[1, 2, 3]], sampling=replace(PLAIN, frequency_penalty=1.5), **more
    ),
    "mirostat": lambda **more: make_request(
        1, [[1, 2, 3]], sampling=replace(PLAIN, mirostat=MirostatSettings(3.0, 0.4)), **more
    ),
    "scored": lambda **more: make_request(1, [[1, 2, 3]], sampling=PLAIN, logprobs=2, **more),
    "scored prompt": lambda **more: make_request(
        1, [[1, 2, 3] * 20], prompt_logprobs=0, sampling=PLAIN, **more
    ),
    "stopped": lambda **more: make_request(
        1, [[1, 2, 3]], sampling=PLAIN, stop=frozenset(range(1, 4)), min_tokens=2, **more
    ),
    "on credit": lambda **more: make_request(1, [[1, 2, 3]], sampling=PLAIN, credit=3, **more),
}


@pytest.mark.parametrize("kind", KINDS)
@given(
    allowed=REPEATED,
    jumps=st.booleans(),
    mode=st.sampled_from(["plain", "speculate", "draft model", "head", "layers"]),
    overlaps=st.booleans(),
    max_tokens=st.integers(2, 24),
    lateness=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    neighbours=st.integers(0, 2),
)
@settings(SAME_EXAMPLES, max_examples=18)
def test_forced_and_draft_tokens_and_late_masks_do_not_change_the_output(
    decoder: Model,
    headed: tuple[Decoder, EagleHead],
    layered: MtpPair,
    kind: str,
    allowed: list[set[int]],
    jumps: bool,
    mode: str,
    overlaps: bool,
    max_tokens: int,
    lateness: list[int],
    neighbours: int,
) -> None:
    model, head = headed
    drafts = {"draft model": decoder, "head": head.model, "layers": layered.head}
    decoder = {"head": model, "layers": layered.decoder}.get(mode, decoder)
    request = KINDS[kind](max_tokens=max_tokens, ignore_eos=False, constrained=True)
    one_by_one = generate(decoder, request, allowed, jumps=False)
    at_once = generate(
        decoder,
        request,
        allowed,
        jumps=jumps,
        lateness=lateness,
        blocks=26,
        neighbours=neighbours,
        speculate=mode == "speculate",
        overlaps=overlaps,
        draft=drafts.get(mode),
        targets=head.targets if mode == "head" else (),
    )
    (seen, numbers), (expected, their_numbers) = visible(at_once), visible(one_by_one)
    assert seen == expected
    assert numbers == pytest.approx(their_numbers, abs=1e-3)
    done = next(o for o in at_once if isinstance(o, RequestDone))
    assert done.completion_tokens == sum(isinstance(o, Token) for o in one_by_one)


@given(allowed=ALLOWED, data=st.data())
@settings(SAME_EXAMPLES, max_examples=25)
def test_sequence_resumes_in_the_middle_of_forced_tokens(
    decoder: Model, allowed: list[set[int]], data: st.DataObject
) -> None:
    request = KINDS["seeded"](max_tokens=24, ignore_eos=False, constrained=True)
    whole = visible(generate(decoder, request, allowed))[0][0]
    at = data.draw(st.integers(0, len(allowed) - 1))
    generated = [int(token) for _, token, *_ in whole[:at]]  # type: ignore[call-overload]
    rest = generate(decoder, with_resume(request, Resume(0, generated)), allowed)
    assert visible(rest)[0][0] == whole[at:]


def num_steps(
    decoder: Model,
    request: AddRequest,
    allowed: Sequence[set[int]],
    *,
    jumps: bool,
    speculate: bool = False,
    overlaps: bool = False,
    lateness: int = 0,
) -> int:
    """Return the number of steps that the request takes alone."""
    steps = 0
    loop = make_loop(decoder, speculate=speculate, overlaps=overlaps)
    grammar = Grammar(allowed, jumps, cycle([lateness]))
    grammar.open(request)
    commands: list[Command] = [request]
    while not (steps and loop.is_idle):
        done = loop.step(lambda: [commands.pop() for _ in commands[:1]] + grammar.masks())
        steps += loop.progressed
        grammar.feed(done.outputs)
    return steps


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_forced_tokens_share_steps(decoder: Model, logprobs: int | None, overlaps: bool) -> None:
    allowed: list[set[int]] = [{1, 2}, *({3 + i} for i in range(12)), {1, 2}]
    request = make_request(1, [[5]], max_tokens=24, logprobs=logprobs, constrained=True)
    steps = num_steps(decoder, request, allowed, jumps=True, overlaps=overlaps)
    assert steps < len(allowed) / 2


@pytest.mark.parametrize("lateness", [0, 3])
def test_accepted_draft_tokens_share_steps_under_a_grammar(decoder: Model, lateness: int) -> None:
    allowed: list[set[int]] = [{3}, {4}, {5}, {6}] * 6
    request = make_request(1, [[3, 4, 5, 6]], max_tokens=24, constrained=True)
    steps = {
        speculate: num_steps(
            decoder, request, allowed, jumps=False, speculate=speculate, lateness=lateness
        )
        for speculate in (False, True)
    }
    assert steps[True] < steps[False] / 2
