"""Prompt scores and drawn tokens from the hidden states of a step."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.engine.batch.transfer import copy_rows, rows_of, to_device
from services.engine.execution.model_runner import SCORED_ROWS, ModelRunner
from services.engine.loop import refusals
from services.engine.loop.draws import Draw, HeldLogits, LaunchedDraws
from services.engine.loop.prompt_pooling import PendingVectors, PromptPooling
from services.engine.loop.request_table import RequestTable
from services.engine.messages import AddRequest, Embedded, FinishCause, Score, ScoredPrompt
from services.engine.sampling.bad_words import intersect_masks
from services.engine.sampling.pending_tokens import PendingTokens
from services.engine.sampling.row import NOTHING_ALLOWED, Row
from services.engine.sampling.sampler import argmax, reject_nan, sample
from services.engine.sampling.score import PendingScores, score
from services.engine.scheduling.sequence import LogitsHold, SequenceState, TokenSequence
from services.engine.scheduling.step_plan import Chunk, StepPlan

__all__ = ["PromptResults", "StepSampler"]


class PromptResults(NamedTuple):
    """Results of a step's prompts that the host does not have yet."""

    scores: list["_PromptScores"]
    scored: list[TokenSequence]
    """Sequences that end with these scores and vectors"""
    vectors: list[PendingVectors]


class _PromptScores(NamedTuple):
    """Scores of consecutive prompt tokens."""

    sequence: TokenSequence
    start: int
    """Index of the first scored token in the prompt"""
    ids: list[int]
    scores: PendingScores


class StepSampler:
    """Sampler that scores prompts, draws tokens, and holds logits of sequences that must wait."""

    def __init__(
        self,
        runner: ModelRunner,
        requests: RequestTable,
        eos_token_ids: frozenset[int],
        *,
        needs_logits: bool,
        pooling: PromptPooling | None = None,
    ) -> None:
        """needs_logits: compute logits even if the most likely tokens suffice.

        pooling: makes the vectors of prompts; None = no request asks for them.
        """
        self._runner = runner
        self._requests = requests
        self._eos_token_ids = eos_token_ids
        self._searches = runner.finds_most_likely and not needs_logits
        self._held: list[HeldLogits] = []
        self._pooling = pooling
        self._results = PromptResults([], [], [])

    def score_prompts(self, plan: StepPlan, hidden: Tensor) -> None:
        """Score the prompt tokens whose predecessors the step computed, for `take_results`.

        Make the vectors of prompts that the step completes, too.
        """
        if self._pooling is not None:
            self._results.vectors.extend(self._pooling.pool(plan, hidden))
        end_row = len(plan.decodes)
        for chunk in plan.chunks:
            end_row += chunk.num_outputs
            width = chunk.sequence.request.command.checked.prompt_logprobs
            if width is not None:
                self._results.scores.extend(self._score_chunk(chunk, hidden, end_row, width))

    def _score_chunk(
        self, chunk: Chunk, hidden: Tensor, end_row: int, width: int
    ) -> Iterator[_PromptScores]:
        """Score the prompt tokens that follow a chunk's tokens. end_row: end of its kept rows."""
        sequence = chunk.sequence
        end = min(chunk.end + 1, sequence.prompt_length)
        for start in range(max(sequence.scored, chunk.start + 1), end, SCORED_ROWS):
            ids = sequence.tokens[start : min(start + SCORED_ROWS, end)].tolist()
            row = end_row - chunk.end + start - 1
            logits = self._runner.logits(hidden, list(range(row, row + len(ids))))
            index = to_device(torch.tensor(ids, dtype=torch.int64), logits.device)
            yield _PromptScores(sequence, start, ids, PendingScores(logits, index, width))

    def take_results(self) -> PromptResults:
        """Return the scores and vectors of prompts that were computed since the last call."""
        results, self._results = self._results, PromptResults([], [], [])
        return results

    def report_results(self, results: PromptResults) -> None:
        """Wait for scores of prompts and report them; end the sequences that only score."""
        for sequence, start, ids, pending in results.scores:
            known = max(sequence.scored - start, 0)  # above 0 after a preemption
            if sequence.state is SequenceState.FINISHED or known >= len(ids):
                continue
            scores = pending.wait()
            handle, prompt = sequence.request.command.handle, sequence.prompt_index
            if any(math.isnan(each.logprob) for each in scores):
                self._requests.abort(refusals.not_finite(handle))
                continue
            first = start + known
            scored = ScoredPrompt(handle, prompt, first, ids[known:], scores[known:])
            self._requests.report(scored)
            sequence.scored = start + len(ids)
        for vectors in results.vectors:
            self._report_vectors(vectors)
        for sequence in results.scored:
            if sequence.state is not SequenceState.FINISHED:
                self._requests.finish(sequence, FinishCause.LENGTH)

    def _report_vectors(self, pending: PendingVectors) -> None:
        rows = pending.vectors.wait().numpy()
        finite = np.isfinite(rows).all(axis=1)
        end = 0
        for sequence, count in zip(pending.sequences, pending.counts, strict=True):
            start, end = end, end + count
            handle = sequence.request.command.handle
            if sequence.state is SequenceState.FINISHED:
                continue
            if finite[start:end].all():
                vectors = rows[start:end].tobytes()
                self._requests.report(Embedded(handle, sequence.prompt_index, vectors))
            else:
                self._requests.abort(refusals.not_finite(handle))

    def draws(self, plan: StepPlan) -> list[Draw]:
        """Return the draws from a step's rows; record the sequences that only score a prompt."""
        draws: list[Draw] = []
        for row, sequence in enumerate(plan.decodes):
            if self._generates(sequence):
                draws.append(Draw(sequence, row, sequence.position + sequence.in_flight))
        last_row = len(plan.decodes) - 1
        for chunk in plan.chunks:
            last_row += chunk.num_outputs
            sequence = chunk.sequence
            is_complete = chunk.end - len(chunk.draft) >= sequence.length
            if is_complete and self._generates(sequence):
                row = last_row - len(chunk.draft)
                draws.append(Draw(sequence, row, sequence.position))
                draws += [
                    Draw(sequence, row + i, sequence.position + i, token)
                    for i, token in enumerate(chunk.draft, start=1)
                ]
        return draws

    def _generates(self, sequence: TokenSequence) -> bool:
        """Return whether a computed sequence generates; record it if it only scores its prompt."""
        if sequence.state is SequenceState.FINISHED:
            return False
        if sequence.max_tokens == 0:
            self._results.scored.append(sequence)
            return False
        return True

    def compute(
        self, draws: Sequence[Draw], hidden: Tensor
    ) -> tuple[Tensor | None, Sequence[int] | None]:
        """Return the logits of the draws, or the most likely tokens if these suffice."""
        rows = [draw.row for draw in draws]
        if not rows:
            return None, None
        if self._searches and all(draw.sequence.request.needs_no_logits for draw in draws):
            tokens = self._runner.most_likely(hidden, rows)
            pairs = zip(draws, tokens, strict=True)
            if not any(token in _suppressed(draw) for draw, token in pairs):
                return None, tokens
        return self._runner.logits(hidden, rows), None

    def rows(self, draws: Sequence[Draw]) -> list[Row] | None:
        """Return the sampling of each draw; None = take the most likely token of every row."""
        if all(draw.sequence.request.is_plainly_greedy for draw in draws):
            return None
        return [self._row(draw) for draw in draws]

    def draw(self, draws: Sequence[Draw], logits: Tensor) -> None:
        """Draw tokens of the sequences that may draw; hold the logits of the others."""
        ready: list[int] = []
        held: list[int] = []
        for i, draw in enumerate(draws):
            sequence = draw.sequence
            if sequence.state is SequenceState.FINISHED or draw.position < sequence.position:
                continue  # the sequence ended, or advanced by forced tokens, while the step ran
            (ready if sequence.may_draw_at(draw.position) else held).append(i)
        if held:
            self.hold([draws[i] for i in held], copy_rows(logits, held))
        if ready:
            self.advance([draws[i] for i in ready], rows_of(logits, ready))

    def hold(self, draws: Sequence[Draw], logits: Tensor) -> None:
        """Hold logits until `take_ready` returns them. Logits of draft tokens need all before them.

        logits: float32 [draws, vocabulary], which no later step changes.
        """
        held: dict[TokenSequence, list[int]] = {}
        for i, draw in enumerate(draws):
            if draw.assumed is not None and draw.sequence in held:
                held[draw.sequence].append(i)
            elif draw.assumed is None and draw.is_next:
                held[draw.sequence] = [i]
        for sequence, indices in held.items():
            own = logits[indices[0] : indices[-1] + 1]
            sequence.logits_hold = LogitsHold()
            self._held.append(HeldLogits([draws[i] for i in indices], own, sequence.logits_hold))

    def take_ready(self) -> list[HeldLogits]:
        """Remove and return the held logits of sequences that may draw now."""
        held = [each for each in self._held if each.is_valid]
        self._held = [each for each in held if not each.sequence.may_draw]
        return [each for each in held if each.sequence.may_draw]

    def take_beams(self) -> list[list[HeldLogits]]:
        """Remove and return the held logits, of all beams, of searches that may go on."""
        groups: dict[int, list[HeldLogits]] = {}
        for held in self._held:
            if held.is_valid and held.sequence.search is not None:
                groups.setdefault(id(held.sequence.search), []).append(held)
        ready = [
            sorted(beams, key=lambda held: held.sequence.index)
            for beams in groups.values()
            if len(beams) == beams[0].sequence.request.command.checked.n
        ]
        taken = {id(held.logits) for beams in ready for held in beams}
        if taken:
            self._held = [held for held in self._held if id(held.logits) not in taken]
        return ready

    @property
    def awaits_masks(self) -> bool:
        """True if logits are held for the lack of a mask."""
        return any(held.is_valid and held.sequence.awaits_mask for held in self._held)

    def launch(self, draws: Sequence[Draw], logits: Tensor) -> LaunchedDraws:
        """Draw on the device, without waiting for it. logits: float32 [draws, vocabulary]."""
        widths = [draw.sequence.request.command.checked.logprobs for draw in draws]
        return LaunchedDraws(list(draws), PendingTokens(logits, self.rows(draws), widths))

    def launch_step(
        self, draws: Sequence[Draw], logits: Tensor | None, drafted: Collection[TokenSequence]
    ) -> tuple[list[LaunchedDraws], list[Draw], Tensor | None]:
        """Launch the draws of a step that need no mask, credit or preceding token.

        logits: float32 [draws, vocabulary], which the next step overwrites; None = no draws.
        drafted: sequences with draft tokens in the step. Returns the other draws, too, and a copy
        of their logits.
        """
        if logits is None:
            return [], [], None
        ahead: list[int] = []
        verifying: list[int] = []
        others: list[int] = []
        for i, draw in enumerate(draws):
            if not draw.runs_ahead:
                others.append(i)
            else:
                (verifying if draw.sequence in drafted else ahead).append(i)
        launched: list[LaunchedDraws] = []
        if ahead:
            launched.append(self.launch([draws[i] for i in ahead], rows_of(logits, ahead)))
        if verifying:
            some = [draws[i] for i in verifying]
            launched.append(self._launch_drafted(some, rows_of(logits, verifying)))
        held = copy_rows(logits, others) if others else None
        return launched, [draws[i] for i in others], held

    def _launch_drafted(self, draws: Sequence[Draw], logits: Tensor) -> LaunchedDraws:
        """Launch draws that verify draft tokens, for whose result their sequences wait.

        draws: those of each sequence one after another. logits: float32 [draws, vocabulary].
        """
        held: list[HeldLogits] = []
        for sequence, indices in groupby(range(len(draws)), lambda i: draws[i].sequence):
            rows = list(indices)
            sequence.logits_hold = LogitsHold()
            own = logits[rows[0] : rows[-1] + 1]
            held.append(HeldLogits([draws[i] for i in rows], own, sequence.logits_hold))
        return self.launch(draws, logits)._replace(held=held)

    def launch_held(self, ready: Sequence[HeldLogits]) -> list[LaunchedDraws]:
        """Draw from held logits on the device, without waiting for it.

        All sequences that continue with their tokens on the device share the first launch.
        """
        continuing: list[HeldLogits] = []
        waiting: list[HeldLogits] = []
        for held in ready:
            (continuing if held.continues else waiting).append(held)
        launched = [self.launch(*held.allowed)._replace(held=[held]) for held in waiting]
        if continuing:
            draws = [held.draws[0] for held in continuing]
            launched.append(self.launch(draws, _join([held.logits for held in continuing])))
        for held in continuing:
            held.sequence.logits_hold = None
        return launched

    def shrink_held(self) -> None:
        """Copy held logits out of larger tensors, which would otherwise stay allocated."""
        for i, held in enumerate(self._held):
            if held.is_valid and held.logits.untyped_storage().nbytes() > held.logits.nbytes:
                self._held[i] = held._replace(logits=held.logits.clone())

    def draw_held(self, ready: Sequence[HeldLogits]) -> None:
        """Draw tokens from held logits."""
        allowed = [each.allowed for each in ready]
        self.advance(
            [draw for draws, _ in allowed for draw in draws],
            torch.cat([logits for _, logits in allowed]),
        )

    def advance(self, draws: Sequence[Draw], logits: Tensor) -> None:
        """Draw tokens, report them with their scores, and end sequences that are complete.

        logits: float32 [draws, vocabulary].
        """
        rows = self.rows(draws)
        tokens = argmax(logits) if rows is None else sample(logits, rows)
        scores = self._scores(draws, logits, tokens)
        tokens = reject_nan(logits, tokens)
        for i, row in enumerate(rows or ()):
            if row.allows_nothing:
                tokens[i] = NOTHING_ALLOWED
        self.append(draws, tokens, scores)

    def append_held(self, launched: LaunchedDraws, sequences: Collection[TokenSequence]) -> None:
        """Wait for launched draws, and append the tokens of some of their sequences."""
        arrived = launched.tokens.wait()
        places = [i for i, draw in enumerate(launched.draws) if draw.sequence in sequences]
        scores = {at: arrived.scores[i] for at, i in enumerate(places) if i in arrived.scores}
        draws = [launched.draws[i] for i in places]
        self.append(draws, [arrived.final[i] for i in places], scores)

    def append(
        self, draws: Sequence[Draw], tokens: Sequence[int], scores: Mapping[int, Score]
    ) -> None:
        """Append drawn tokens and report them. scores: by index of the draw.

        A negative token aborts the request: its logits are NaN, or its limits allow no id.
        """
        for i, (draw, token) in enumerate(zip(draws, tokens, strict=True)):
            if not draw.is_next:
                continue
            if token < 0:
                self._abort(draw.sequence.request.command, token)
            else:
                self._requests.append(draw.sequence, token, scores.get(i))
        for draw in draws:
            if draw.sequence.mask is not None:
                draw.sequence.drop_draft_masks()

    def _abort(self, command: AddRequest, token: int) -> None:
        if token == NOTHING_ALLOWED:
            sampling = command.checked.sampling
            self._requests.abort(refusals.nothing_allowed(command.handle, sampling))
        else:
            self._requests.abort(refusals.not_finite(command.handle))

    def _scores(
        self, draws: Sequence[Draw], logits: Tensor, tokens: Sequence[int]
    ) -> dict[int, Score]:
        """Return the scores of the drawn tokens that a request asks for, by index of the draw."""
        widths = [draw.sequence.request.command.checked.logprobs for draw in draws]
        scores: dict[int, Score] = {}
        for width in {width for width in widths if width is not None}:
            rows = [i for i, each in enumerate(widths) if each == width]
            found = score(rows_of(logits, rows), [tokens[i] for i in rows], width)
            scores.update(zip(rows, found, strict=True))
        return scores

    def _row(self, draw: Draw) -> Row:
        sequence, checked = draw.sequence, draw.sequence.request.command.checked
        sampling, stopping = checked.sampling, checked.stopping
        banned = _suppressed(draw)
        if draw.position < stopping.min_tokens:
            eos = () if stopping.ignore_eos else self._eos_token_ids
            banned = (*banned, *eos, *stopping.stop_token_ids)
        if sequence.penalties is not None:
            sequence.penalties.update(sequence.tokens)
        mask = sequence.mask.allows_at(draw.position) if sequence.mask is not None else None
        forbidden: Sequence[int] = ()
        if sampling.limits_ids:
            words = sequence.request.bad_words
            if words is not None:
                forbidden = words.forbidden_after(sequence.tokens[sequence.prompt_length :])
            if mask is not None or sampling.allowed is not None:
                mask, forbidden = intersect_masks(mask, sampling.allowed, forbidden), ()
        return Row(
            sampling,
            sequence.index,
            draw.position,
            banned,
            mask,
            sequence.penalties,
            sequence.mirostat,
            forbidden,
        )


def _suppressed(draw: Draw) -> tuple[int, ...]:
    """Return the ids that the checkpoint excludes from a draw."""
    sampling = draw.sequence.request.command.checked.sampling
    if draw.position == 0 and sampling.suppressed_first:
        return sampling.suppressed + sampling.suppressed_first
    return sampling.suppressed


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate held logits. Consecutive rows of one tensor need no copy.

    parts: float32 [1, vocabulary] each.
    """
    first, width = parts[0], parts[0].shape[1]
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    if all(
        part.untyped_storage().data_ptr() == storage and part.storage_offset() == offset + i * width
        for i, part in enumerate(parts)
    ):
        return first.as_strided((len(parts), width), (width, 1))
    return torch.cat(list(parts))
