"""Tokens that sparse attention chooses, and what its decodes read."""

import pytest
import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.mixers.latent_attention import LatentAttention
from services.engine.model.mixers.latent_pages import LatentBuffer
from services.engine.model.mixers.token_choice import best_places
from services.engine.model.operators.torch_operators import TorchOperators

COUNT = 5


def places_by_sorting(scores: Tensor, end: int) -> list[int]:
    order = sorted(range(end), key=lambda place: (-float(scores[place]), place))
    return sorted(order[:COUNT])


@pytest.mark.parametrize("context", [3, 5, 6, 40])
def test_equal_scores_are_chosen_in_order_of_their_places(context: int) -> None:
    """Otherwise a text would depend on what else is in a batch."""
    generator = torch.Generator().manual_seed(context)
    scores = torch.randint(-1, 2, (200, context), generator=generator).float()
    scores *= torch.rand(200, 1, generator=generator) < 0.9  # whole rows of zeros
    ends = torch.randint(1, context + 1, (200,), generator=generator)
    found = best_places(scores, ends, COUNT)
    for row, places in enumerate(found.tolist()):
        end = int(ends[row])
        expected = places_by_sorting(scores[row], end)
        assert places == expected + [end - 1] * (COUNT - len(expected))


def test_places_behind_the_end_are_not_chosen_whatever_their_scores() -> None:
    """They hold tokens of another text, or what the last owner of a block left."""
    scores = torch.tensor([[1.0, 3.0, 2.0, torch.nan, torch.inf, 9.0, 9.0]])
    assert best_places(scores, torch.tensor([3]), 2).tolist() == [[1, 2]]


def test_decodes_and_short_chunks_read_the_chosen_tokens_alone() -> None:
    """Reading all 128K tokens of a context costs 64 times as much as reading 2,048."""
    spec = LatentSpec(2, 0, 8, 4, 4, 4, 0.5, None, False, False, 1e-6, attended_tokens=COUNT)
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(2, 4, 8, generator=generator) for _ in range(2))
    operators = TorchOperators(torch.float32, torch.device("cpu"))
    attention = LatentAttention(spec, keys, values, None, operators, LatentBuffer())
    pages = torch.randn(4, 8, spec.page_width, generator=generator)
    queries = torch.randn(3, 2 * spec.head_width, generator=generator)
    chosen = torch.tensor([[0, 2, 9, 11, 17], [1, 2, 3, 4, 17], [0, 1, 2, 3, 18]])
    outputs = []
    for unread in (0.0, torch.nan):
        kept = torch.zeros(32, dtype=torch.bool)
        kept[chosen.flatten()] = True
        pages.flatten(0, 1)[~kept] = unread
        out = torch.empty(3, 8)
        attention.attend(queries, None, pages, batch_of([18, 19]), out, chosen)
        outputs.append(out)
    assert torch.equal(*outputs)
    assert outputs[0].isfinite().all()


def batch_of(contexts: list[int]) -> StepBatch:
    """Return a decode and a chunk of two tokens over the same blocks."""
    return StepBatch(
        token_ids=torch.zeros(3, dtype=torch.int64),
        positions=torch.tensor([contexts[0] - 1, contexts[1] - 2, contexts[1] - 1]),
        slots=torch.arange(3),
        query_starts=torch.tensor([0, 1, 3], dtype=torch.int32),
        context_lengths=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.arange(4, dtype=torch.int32).expand(2, -1),
        num_decodes=1,
        query_lengths_host=(1, 2),
        context_lengths_host=tuple(contexts),
    )
