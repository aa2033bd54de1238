"""Passes of a draft, of which the host reads the tokens once all passes are launched."""

from pathlib import Path

import pytest
import torch

from services.engine.execution.draft_model import DraftModel
from services.engine.execution.model_runner import StepCapacity
from services.engine.model.model import Model
from services.engine.scheduling.draft_pages import DraftPages
from services.engine.scheduling.draft_plan import DraftPart
from services.engine.scheduling.sequence import Request, TokenSequence
from services.engine.scheduling.sequence_cache import BlockTable
from services.engine.scheduling.token_ids import Prompt
from tests.unit.engine.tiny import BLOCK, CONTEXT, VOCABULARY, load_tiny, make_request

BLOCKS = 12


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny(tmp_path_factory.mktemp("model"))


def make_sequence(tokens: list[int], blocks: list[int]) -> TokenSequence:
    request = Request(make_request(1, [tokens]))
    sequence = TokenSequence(request, 0, Prompt(tokens, b"", BLOCK), None, 8)
    sequence.tables = [BlockTable(blocks)]
    return sequence


def make_drafts(decoder: Model, *, padded: bool) -> DraftModel:
    drafts = DraftModel(decoder, decoder.allocate_cache(BLOCKS + padded, BLOCK), VOCABULARY, 64)
    if padded:
        drafts.reserve(StepCapacity(64, 4, CONTEXT // BLOCK), BLOCKS)
    return drafts


@pytest.mark.parametrize("count", [1, 2])
def test_short_draft_beside_a_long_one_writes_to_no_block_but_its_own(
    decoder: Model, count: int
) -> None:
    """Its row stays in the padded batch. The block behind its own is another sequence's.

    count: number of tokens of each sequence in the first pass.
    """
    short = make_sequence([5, 9, 3, 7, 2, 6, 1, 8][:BLOCK], [0])
    long = make_sequence([4, 8, 2], [1, 2])
    results, others = [], []
    for padded in (False, True):
        drafts = make_drafts(decoder, padded=padded)
        drafts.make([DraftPart(each, 0, each.length - count, 0) for each in (short, long)])
        parts = [
            DraftPart(each, each.length - count, each.length, length)
            for each, length in ((short, 1), (long, 5))
        ]
        results.append(drafts.make(parts))
        pages = [page[3:BLOCKS] for page in drafts._cache.pages]
        others.append(max(page.abs().max().item() for page in pages))
    plain, padded_result = results
    assert [len(tokens) for tokens in plain.tokens] == [1, 5]
    assert plain.tokens == padded_result.tokens
    assert [each.tokens for each in plain.passes] == [2 * count, 1, 1, 1, 1]
    assert others == [0, 0]


def test_draft_ends_at_an_id_that_the_engine_lacks(tmp_path: Path) -> None:
    """The passes behind it are launched all the same, and their tokens are dropped."""
    decoder = load_tiny(tmp_path)
    sequence = make_sequence([5, 9, 3], [0, 1])
    part = DraftPart(sequence, 0, 3, 4)
    [whole] = make_drafts(decoder, padded=False).make([part]).tokens
    largest = max(whole)
    drafts = DraftModel(decoder, decoder.allocate_cache(BLOCKS, BLOCK), largest, 64)
    [cut] = drafts.make([part]).tokens
    assert list(cut) == list(whole[: list(whole).index(largest)])


def test_block_behind_a_cut_draft_is_computed_again(decoder: Model) -> None:
    """A block with the same tokens as before would else be believed, and its drafts useless."""
    text, cache, pages = [*range(1, 13)], decoder.allocate_cache(BLOCKS, BLOCK), DraftPages(BLOCK)

    def make(vocabulary: int, tokens: list[int], blocks: list[int]) -> list[int]:
        sequence = make_sequence(tokens, blocks)
        part = DraftPart(sequence, pages.count_computed(sequence), len(tokens), 4)
        [made] = DraftModel(decoder, cache, vocabulary, 64).make([part]).tokens
        pages.write(part, made[:-1])
        pages.count_computed(sequence)
        pages.leave(sequence)
        return list(made)

    fresh = make(VOCABULARY, text, [0, 1, 2, 3])
    largest = make(VOCABULARY, [5, 9, 3], [4, 5])[0]
    assert make(largest, [5, 9, 3], [6, 1]) == []  # its passes write to block 1
    assert make(VOCABULARY, text, [0, 1, 2, 3]) == fresh


def test_passes_are_launched_without_reading_a_token(
    decoder: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the host would wait for each pass."""
    drafts, read = make_drafts(decoder, padded=True), []
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> list[int]:
        read.append(len(tensor))
        found: list[int] = tolist(tensor)
        return found

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    parts = [DraftPart(make_sequence([5, 9, 3], [0, 1]), 2, 3, 4)]
    assert len(drafts.make(parts).tokens[0]) == 4
    assert read == [4]
