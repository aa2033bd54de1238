"""Scores of many texts, whose vectors do not fit into one message of an engine."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from services.common.contract import MAX_TOKEN_STATES, MAX_VECTORS
from services.tokenizer.embedding import vector_math
from services.tokenizer.embedding.late_scores import LateScores
from services.tokenizer.embedding.text_roles import TextRole
from services.tokenizer.embedding.vector_request import Vectors
from services.tokenizer.embedding.vector_scores import VectorScores
from services.tokenizer.model_limits import ModelLimits
from tokenwire.pb.engine.v1.engine_pb2 import EmbeddedPrompt

Array = npt.NDArray[np.float32]


class Engines:
    """Vectors that the ids of prompts determine, and the size of the largest answer."""

    def __init__(self) -> None:
        self.largest = 0

    async def vectors(
        self, prompts: Sequence[EmbeddedPrompt], limits: ModelLimits, *, keeps_tokens: bool = False
    ) -> Vectors:
        width = limits.token_width if keeps_tokens else limits.vector_width
        data = b"".join(vectors_of(each, width, keeps_tokens).tobytes() for each in prompts)
        self.largest = max(self.largest, len(data))
        return Vectors(width, data)


def vectors_of(prompt: EmbeddedPrompt, width: int, of_tokens: bool = True) -> Array:
    ids = prompt.ids if of_tokens else prompt.ids[:1]
    rows = [np.random.default_rng(each).normal(size=width).astype(np.float32) for each in ids]
    return np.stack(rows)


def limits(vector_width: int = 0, token_width: int = 0) -> ModelLimits:
    base = ModelLimits("m", "", 512, 99, (), (), 0, 0, 128, 0, False)
    return replace(base, vector_width=vector_width, token_width=token_width)


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("queries", [1, 40])
def test_maxsim_asks_for_no_more_than_one_answer_holds(queries: int, averages: bool) -> None:
    """Each query has more tokens than its document."""
    width, engines = 2048, cast(Any, Engines())
    first = [EmbeddedPrompt(ids=[place % 9, *range(31)]) for place in range(queries)]
    second = [EmbeddedPrompt(ids=[place % 7, 5]) for place in range(39)]
    second.append(EmbeddedPrompt(ids=range(300)))
    late = LateScores(engines, limits(token_width=width), TextRole(), TextRole(), averages)
    scores = asyncio.run(late.scores(first, second))
    assert MAX_TOKEN_STATES / 2 < engines.largest <= MAX_TOKEN_STATES
    for place in (0, 17, 39):
        query = vectors_of(first[place % queries], width)
        expected = (query @ vectors_of(second[place], width).T).max(axis=1).sum()
        assert scores[place] == pytest.approx(expected / (32 if averages else 1), rel=1e-4)


@pytest.mark.parametrize("are_products", [False, True])
@pytest.mark.parametrize("firsts", [1, 9])
def test_similarity_asks_for_no_more_than_one_answer_holds(firsts: int, are_products: bool) -> None:
    """A vocabulary's weights are wide."""
    width, engines = MAX_VECTORS // 4 // 5, cast(Any, Engines())
    first = [EmbeddedPrompt(ids=[place]) for place in range(firsts)]
    second = [EmbeddedPrompt(ids=[place % 4]) for place in range(9)]
    similarities = VectorScores(engines, limits(vector_width=width), are_products)
    scores = asyncio.run(similarities.scores(first, second))
    assert MAX_VECTORS / 2 < engines.largest <= MAX_VECTORS
    for place in (0, 3, 8):
        one, other = (
            vectors_of(each, width)[0].astype(float)
            for each in (first[place % firsts], second[place])
        )
        lengths = 1 if are_products else np.linalg.norm(one) * np.linalg.norm(other)
        expected = one @ other / lengths
        error = 1e-5 * (width if are_products else 1)
        assert scores[place] == pytest.approx(expected, rel=1e-3, abs=error)


def test_long_query_is_multiplied_in_parts() -> None:
    query, document = (
        np.random.default_rng(seed).normal(size=(1100, 8)).astype(np.float32) for seed in (1, 2)
    )
    kept = [[True] * 1100]
    [score] = vector_math.maxsims(8, query.tobytes(), kept, document.tobytes(), kept)
    assert score == pytest.approx((query @ document.T).max(axis=1).sum(), rel=1e-5)
