"""Draws of beam searches: the next tokens of all beams of a prompt, chosen together."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.engine.execution.model_runner import ModelRunner
from services.engine.loop import refusals
from services.engine.loop.draws import HeldLogits
from services.engine.loop.request_table import RequestTable
from services.engine.loop.step_sampler import StepSampler
from services.engine.messages import Score
from services.engine.sampling.adjustments import adjust
from services.engine.sampling.score import score
from services.engine.scheduling.beam_search import Continuation
from services.engine.scheduling.scheduler import Scheduler

__all__ = ["BeamDraws"]


class BeamDraws:
    """Draws of beam searches from the logits of their beams."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        requests: RequestTable,
        sampler: StepSampler,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._requests = requests
        self._sampler = sampler

    def advance(self, beams: Sequence[HeldLogits]) -> None:
        """Give all beams of a search their next tokens, or end the search. beams: all, in order."""
        sequences = [held.sequence for held in beams]
        search, request = sequences[0].search, sequences[0].request
        assert search is not None
        logits = torch.cat([held.logits for held in beams])
        tokens, logprobs = self._candidates(beams, logits, search.candidates)
        if np.isnan(logprobs).any():
            self._requests.abort(refusals.not_finite(request.command.handle))
            return
        chosen = search.choose(tokens, logprobs)
        if not chosen:
            sampling = request.command.checked.sampling
            self._requests.abort(refusals.nothing_allowed(request.command.handle, sampling))
            return
        width = request.command.checked.logprobs
        parents = search.advance(chosen, _scores(logits, chosen, width))
        for sequence in sequences:
            sequence.logits_hold = None
        if search.is_over:
            self._requests.end_search(sequences, search)
            return
        self._runner.copy_blocks(self._scheduler.fork(sequences, parents))
        for beam, sequence in enumerate(sequences):
            self._requests.append_to_beam(sequence, search.newest(beam))

    def _candidates(
        self, beams: Sequence[HeldLogits], logits: Tensor, count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the most likely tokens of each beam, best first, with their logprobs.

        Both are [beams, count]. Biases and exclusions change logprobs after the normalization.
        """
        rows = self._sampler.rows([held.draws[0] for held in beams])
        if rows is None or not any(row.is_adjusted for row in rows):
            return _most_likely(logits, count)
        adjusted = logits.clone()
        adjust(adjusted, rows)
        tokens, _ = _most_likely(adjusted, count)
        values = adjusted.gather(1, torch.from_numpy(tokens).to(logits.device))
        _, logprobs = _most_likely(logits, 1)
        normaliser = logits.amax(dim=1, keepdim=True) - torch.from_numpy(logprobs).to(logits.device)
        return tokens, (values - normaliser).cpu().numpy()


def _most_likely(
    logits: Tensor, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    scores = score(logits, [0] * len(logits), count)
    tokens = np.array([each.top_ids for each in scores], np.int64)
    return tokens, np.array([each.top_logprobs for each in scores], np.float32)


def _scores(
    logits: Tensor, chosen: Sequence[Continuation], width: int | None
) -> Sequence[Score | None]:
    """Return the scores of the chosen tokens. width: number of candidates; None = no scores."""
    if width is None:
        return [None] * len(chosen)
    rows = logits[[each.beam for each in chosen]]
    return score(rows, [each.token for each in chosen], width)
