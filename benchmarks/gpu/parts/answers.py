"""Answers of an engine on the device, and their probabilities in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.context import Row
from services.engine import engine as engine_module
from services.engine.checked_request import CheckedRequest, PlacedImage
from services.engine.engine import Engine
from services.engine.messages import AddRequest, RequestDone, ScoredPrompt, Token
from services.engine.settings import EngineSettings

__all__ = ["Answer", "Image", "Question", "answer", "differences", "exact_engine", "verdict"]

_MEAN_NATS, _MOST_NATS = 0.02, 0.5
"""Bounds of log-probability differences from float32"""
_MEDIAN_NATS, _NINE_OF_TEN_NATS = 0.04, 0.2
"""Bounds with experts: rounding exchanges some that the router likes equally, on a CPU too"""


@dataclass(frozen=True, slots=True)
class Image:
    """Features that stand in a prompt in place of an image's tokens."""

    features: Tensor
    """float32 [layers, tokens, hidden size]"""
    first: int
    """Index of the first token in the prompt"""
    grid: tuple[int, int] | None = None

    def placed(self, dtype: torch.dtype) -> PlacedImage:
        """Return the image for a model of this dtype."""
        numbers = self.features.to(dtype).view(torch.uint8).numpy().tobytes()
        places = range(self.first, self.first + self.features.shape[1])
        return PlacedImage(sha256(numbers).digest(), places, bytearray(numbers), self.grid)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and what belongs to it."""

    prompt: Sequence[int]
    adapter: int = 0
    """Number of its adapter; 0 = none"""
    image: Image | None = None
    prediction: Sequence[int] = ()
    """Tokens that the answer is expected to have, which are drafts"""


@dataclass(slots=True)
class Answer:
    """Tokens that an engine chose, and the log-probabilities that it gave."""

    question: Question
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log probabilities of the prompt's tokens but the first, then of `tokens`"""


@contextmanager
def exact_engine(path: Path) -> Iterator[Engine]:
    """Start an engine that computes in float32 on the CPU."""
    settings = EngineSettings(dtype="float32", device="cpu", kv_memory="128MiB")
    with Engine(path, settings) as engine:
        yield engine


def answer(engine: Engine, questions: Sequence[Question], output: int) -> tuple[list[Answer], int]:
    """Answer all questions at once with the most likely tokens. Return the number of steps, too."""
    answers = {_submit(engine, each, output): Answer(each) for each in questions}
    left, steps = len(answers), 0
    while left:
        steps += 1
        for event in engine.step():
            match event:
                case ScoredPrompt():
                    answers[event.handle].logprobs += [each.logprob for each in event.scores]
                case Token():
                    answers[event.handle].tokens.append(event.id)
                    assert event.score is not None
                    answers[event.handle].logprobs.append(event.score.logprob)
                case RequestDone():
                    left -= 1
    return list(answers.values()), steps


def differences(engine: Engine, answers: Sequence[Answer]) -> list[float]:
    """Return how far log-probabilities are from those that another engine gives the same tokens."""
    found = []
    for each in answers:
        whole = Question(
            [*each.question.prompt, *each.tokens], each.question.adapter, each.question.image
        )
        [scored], _ = answer(engine, [whole], 0)
        pairs = zip(each.logprobs, scored.logprobs, strict=True)
        found += [abs(mine - exact) for mine, exact in pairs]
    return found


def verdict(found: Sequence[float], *, has_experts: bool = False) -> Row:
    """Return the differences' mean, quantiles and maximum, and whether these are in bounds."""
    ordered = sorted(found)
    mean, most = sum(ordered) / len(ordered), ordered[-1]
    median, high = (ordered[int(share * len(ordered))] for share in (0.5, 0.9))
    if has_experts:
        is_good = median <= _MEDIAN_NATS and high <= _NINE_OF_TEN_NATS
    else:
        is_good = mean <= _MEAN_NATS and most <= _MOST_NATS
    return {"mean": mean, "median": median, "9 of 10": high, "most": most, "ok": is_good}


def _submit(engine: Engine, question: Question, output: int) -> int:
    images = []
    if question.image is not None:
        images = [question.image.placed(engine.loaded.model.decoder.dtype)]
    request = partial(AddRequest, adapter=question.adapter)
    checked = partial(CheckedRequest, prediction=question.prediction)
    with (
        patch.object(engine_module, "AddRequest", request),
        patch.object(engine_module, "CheckedRequest", checked),
    ):
        return engine.submit(
            question.prompt,
            max_tokens=output,
            temperature=0.0,
            ignore_eos=True,
            logprobs=0 if output else None,
            prompt_logprobs=0,
            images=images,
        )
