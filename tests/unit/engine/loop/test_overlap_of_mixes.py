"""Overlap changes no output, whatever streams share the steps and whenever they come and go."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.engine.checked_request import DrySettings, MirostatSettings, SamplingSettings
from services.engine.messages import (
    AddRequest,
    CancelRequest,
    Command,
    Finished,
    GrantCredit,
    Output,
    Refused,
    ScoredPrompt,
    Token,
)
from services.engine.model.model import Model
from services.engine.sampling import sampler
from tests.unit.engine.loop.grammar import Grammar
from tests.unit.engine.tiny import SAME_EXAMPLES, VOCABULARY, make_loop, make_request, mask_of

PLAIN = SamplingSettings(0.8, 1.0, 0, 0.0, 1)
SAMPLING: dict[str, SamplingSettings] = {
    "greedy": replace(PLAIN, temperature=0.0),
    "seeded": PLAIN,
    "restricted": replace(PLAIN, temperature=2.0, top_p=0.9),
    "penalised": replace(PLAIN, repetition_penalty=1.3, frequency_penalty=0.4),
    "penalised and restricted": replace(PLAIN, temperature=2.0, top_p=0.9, presence_penalty=0.5),
    "dry": replace(PLAIN, temperature=0.0, dry=DrySettings(2.0, 1.75, 1, frozenset({7}))),
    "mirostat": replace(PLAIN, mirostat=MirostatSettings(4.0, 0.3)),
    "allowed ids": replace(PLAIN, top_p=0.9, allowed=mask_of(range(0, 48, 3))),
    "bad words": replace(PLAIN, bad_words=((5, 6), (7,), (8, 9, 10))),
}
IDS = st.sets(st.integers(1, VOCABULARY - 1), min_size=2, max_size=8)
FORCED = st.sets(st.integers(1, VOCABULARY - 1), min_size=1, max_size=1)


@dataclass(frozen=True)
class Stream:
    """A request, and what happens to it."""

    sampling: str
    prompt: list[int]
    n: int
    max_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    grammar: list[set[int]] | None
    jumps: bool
    lateness: list[int]
    """Calls of `receive` until each mask comes"""
    credit: int | None
    priority: int
    arrival: int
    """Step before which it arrives"""
    cancelled: int | None
    """Step before which it is cancelled"""
    lost: int | None
    """Step before which its grammar service is lost"""


STREAMS = st.builds(
    Stream,
    sampling=st.sampled_from(sorted(SAMPLING)),
    prompt=st.lists(st.integers(1, 3), min_size=1, max_size=24),
    n=st.integers(1, 2),
    max_tokens=st.integers(0, 12),
    logprobs=st.sampled_from([None, None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
    grammar=st.none() | st.lists(IDS | FORCED, min_size=1, max_size=14),
    jumps=st.booleans(),
    lateness=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    credit=st.sampled_from([None, None, 1, 3]),
    priority=st.integers(0, 1),
    arrival=st.integers(0, 8),
    cancelled=st.none() | st.none() | st.integers(0, 20),
    lost=st.none() | st.integers(1, 20),
)


def request_of(handle: int, stream: Stream) -> AddRequest:
    return make_request(
        handle,
        [stream.prompt],
        n=stream.n,
        max_tokens=stream.max_tokens,
        sampling=replace(SAMPLING[stream.sampling], seed=handle),
        stop=frozenset({17, 30}),
        ignore_eos=handle % 2 == 0,
        min_tokens=handle % 3,
        logprobs=stream.logprobs,
        prompt_logprobs=stream.prompt_logprobs,
        constrained=stream.grammar is not None,
        credit=stream.credit,
        priority=stream.priority,
        arrival=float(handle),
    )


@dataclass
class Seen:
    """What the client of one request sees."""

    tokens: dict[int, list[tuple[object, ...]]] = field(default_factory=dict)
    """Ids and candidates, by sequence"""
    ends: dict[int, tuple[object, ...]] = field(default_factory=dict)
    refusal: str | None = None
    prompt: list[int] = field(default_factory=list)
    """Scored ids of the prompt"""
    numbers: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """Logprobs and mirostat states, by sequence and position"""

    def take(self, output: Output) -> None:
        if isinstance(output, Token):
            mine = self.tokens.setdefault(output.sequence, [])
            assert output.position == len(mine)
            assert output.sequence not in self.ends
            score, mu = output.score, output.mirostat_mu
            mine.append((output.id, score and list(score.top_ids)))
            self.numbers[output.sequence, output.position] = [
                *([score.logprob, *score.top_logprobs] if score is not None else ()),
                *([mu] if mu is not None else ()),
            ]
        elif isinstance(output, ScoredPrompt):
            assert not self.tokens.get(output.prompt)
            assert output.position == len(self.prompt) + 1
            self.prompt += output.ids
        elif isinstance(output, Finished):
            assert output.sequence not in self.ends
            end = (output.cause, output.token_id, output.completion_tokens)
            self.ends[output.sequence] = end
        elif isinstance(output, Refused):
            assert self.refusal is None
            self.refusal = output.reason


def serve(
    decoder: Model,
    streams: Sequence[Stream],
    *,
    overlaps: bool,
    is_disturbed: bool,
    blocks: int,
    step_tokens: int,
    running: int,
    drafts: str = "none",
) -> list[Seen]:
    """Return what each client sees. Only disturbed streams arrive late, wait, and are cancelled."""
    loop = make_loop(
        decoder,
        blocks=blocks,
        step_tokens=step_tokens,
        running=running,
        overlaps=overlaps,
        speculate=drafts == "n-grams",
        draft=decoder if drafts == "model" else None,
    )
    seen = [Seen() for _ in streams]
    grammars: dict[int, Grammar] = {}
    for turn in range(3000):
        commands: list[Command] = []
        for handle, stream in enumerate(streams):
            if turn == (stream.arrival if is_disturbed else 0):
                request = request_of(handle, stream)
                commands.append(request)
                if stream.grammar is not None:
                    lateness = cycle(stream.lateness if is_disturbed else [0])
                    grammars[handle] = Grammar(stream.grammar, stream.jumps, lateness, handle)
                    grammars[handle].open(request)
            if is_disturbed and turn == stream.lost and handle in grammars:
                grammars[handle].reopen()
            if is_disturbed and turn == stream.cancelled:
                commands.append(CancelRequest(handle))
            if stream.credit is not None and turn % 5 == 4:
                commands.append(GrantCredit(handle, 2))

        def receive(commands: list[Command] = commands) -> list[Command]:
            taken, commands[:] = list(commands), []
            return [*taken, *(mask for each in grammars.values() for mask in each.masks())]

        outputs = loop.step(receive).outputs
        loop.check()
        for grammar in grammars.values():
            grammar.feed(outputs)
        for output in outputs:
            seen[output.handle].take(output)  # type: ignore[union-attr]
        if loop.is_idle and turn >= 8:
            return seen
    raise AssertionError("the loop never came to rest")


@given(
    streams=st.lists(STREAMS, min_size=1, max_size=6),
    blocks=st.integers(10, 60),
    step_tokens=st.integers(3, 40),
    running=st.integers(1, 8),
    candidates=st.sampled_from([3, 256]),
    drafts=st.sampled_from(["none", "n-grams", "model"]),
)
@settings(
    SAME_EXAMPLES,
    max_examples=180,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_mixed_streams_get_the_same_output(
    decoder: Model,
    monkeypatch: pytest.MonkeyPatch,
    streams: list[Stream],
    blocks: int,
    step_tokens: int,
    running: int,
    candidates: int,
    drafts: str,
) -> None:
    """Streams of all kinds are preempted, starved, cancelled, and wait for masks or drafts."""
    monkeypatch.setattr(sampler, "_CANDIDATES", candidates)
    alone = serve(
        decoder,
        streams,
        overlaps=False,
        is_disturbed=False,
        blocks=256,
        step_tokens=256,
        running=64,
    )
    together = serve(
        decoder,
        streams,
        overlaps=True,
        is_disturbed=True,
        blocks=blocks,
        step_tokens=step_tokens,
        running=running,
        drafts=drafts,
    )
    for stream, seen, expected in zip(streams, together, alone, strict=True):
        if stream.cancelled is None:
            assert seen.refusal == expected.refusal
        if stream.cancelled is None and seen.refusal is None:
            assert (seen.tokens, seen.ends, seen.prompt) == (
                expected.tokens,
                expected.ends,
                expected.prompt,
            )
        for sequence in seen.tokens.keys() & expected.tokens.keys():
            pairs = zip(seen.tokens[sequence], expected.tokens[sequence], strict=False)
            assert all(ours == theirs for ours, theirs in pairs)
        for place in seen.numbers.keys() & expected.numbers.keys():
            assert seen.numbers[place] == pytest.approx(expected.numbers[place], abs=1e-3)
