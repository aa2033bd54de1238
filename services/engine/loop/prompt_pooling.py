"""Vectors of prompts from the hidden states of a step."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from services.engine.batch.transfer import HostCopy, to_device
from services.engine.execution.model_runner import ModelRunner
from services.engine.model.checkpoint.sentence_modules import Pooling
from services.engine.model.lexical_head import LexicalHead
from services.engine.model.pooler import Pooler
from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.step_plan import StepPlan

__all__ = ["PendingVectors", "PromptPooling"]


@dataclass(frozen=True, slots=True)
class PendingVectors:
    """Vectors of complete prompts that are being copied to the host."""

    sequences: list[TokenSequence]
    counts: list[int]
    """Number of vectors of each sequence: one, or one for each token"""
    vectors: HostCopy
    """float32 [sum of the counts, width]"""


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows of one prompt in a step."""

    sequence: TokenSequence
    start: int
    """First row that is pooled"""
    end: int
    is_first: bool
    """True if the rows begin the prompt"""
    is_last: bool
    """True if the rows end the prompt"""


class PromptPooling:
    """Pooling of the hidden states of prompts, each of which may take several steps."""

    def __init__(self, pooler: Pooler, runner: ModelRunner) -> None:
        self._pooler = pooler
        self._runner = runner
        self._token_vectors: WeakKeyDictionary[TokenSequence, list[Tensor]] = WeakKeyDictionary()
        """Vectors of the computed tokens of incomplete prompts"""
        self._sums: WeakKeyDictionary[TokenSequence, Tensor] = WeakKeyDictionary()
        """Sums of the computed hidden states of incomplete prompts"""

    def pool(self, plan: StepPlan, hidden: Tensor) -> list[PendingVectors]:
        """Return the vectors of the prompts that the step completes, and of their tokens.

        hidden: the step's hidden states, a row for each kept token.
        """
        spans = self._spans(plan)
        whole = self._pooled([each for each in spans if not each.sequence.keeps_tokens], hidden)
        kept = [self._kept(each, hidden) for each in spans if each.sequence.keeps_tokens]
        return [pending for pending in (whole, *kept) if pending is not None]

    @torch.inference_mode()
    def _kept(self, span: _Span, hidden: Tensor) -> PendingVectors | None:
        """Return the vectors of a complete prompt's tokens; keep those of an incomplete prompt."""
        vectors = self._runner.states(hidden, range(span.start, span.end)).clone()
        heads, is_raw = self._pooler.token_heads, span.sequence.is_raw
        if self._pooler.pooling is Pooling.TOKENS:
            vectors = self._pooler.finish(vectors, [is_raw] * len(vectors))
        elif heads is not None:
            make = heads.weights if span.sequence.weighs_tokens else heads.vectors
            vectors = make(vectors, is_raw=is_raw)
        before = self._token_vectors.pop(span.sequence, [])
        parts = [vectors] if span.is_first else [*before, vectors]
        if not span.is_last:
            self._token_vectors[span.sequence] = parts
            return None
        whole = torch.cat(parts)
        return PendingVectors([span.sequence], [len(whole)], HostCopy(whole))

    def _pooled(self, spans: list[_Span], hidden: Tensor) -> PendingVectors | None:
        """Return the vectors of the prompts that end; None without any."""
        complete = [span for span in spans if span.is_last]
        if self._pooler.pooling is Pooling.MEAN and spans:
            pooled = self._means(spans, hidden)
        elif self._pooler.lexical is not None and complete:
            pooled = self._lexical(self._pooler.lexical, complete, hidden)
        elif complete:
            is_last = self._pooler.pooling is Pooling.LAST
            rows = [span.end - 1 if is_last else span.start for span in complete]
            pooled = self._runner.states(hidden, rows)
        if not complete:
            return None
        with torch.inference_mode():
            vectors = self._pooler.finish(pooled, [span.sequence.is_raw for span in complete])
        ones = [1] * len(complete)
        return PendingVectors([span.sequence for span in complete], ones, HostCopy(vectors))

    @torch.inference_mode()
    def _lexical(self, head: LexicalHead, spans: list[_Span], hidden: Tensor) -> Tensor:
        """Return the weights that each prompt gives the vocabulary, computed from whole prompts."""
        texts = (self._runner.states(hidden, range(each.start, each.end)) for each in spans)
        return torch.stack([head.pooled(states) for states in texts])

    @torch.inference_mode()
    def _means(self, spans: list[_Span], hidden: Tensor) -> Tensor:
        """Return the means of the complete prompts; keep the sums of the others."""
        lengths = [span.end - span.start for span in spans]
        whole = range(spans[0].start, spans[-1].end)
        follow = sum(lengths) == len(whole)  # no rows of streams are between them
        rows = whole if follow else [row for each in spans for row in range(each.start, each.end)]
        states = self._pooler.of_tokens(self._runner.states(hidden, rows))
        owners = torch.arange(len(spans)).repeat_interleave(torch.tensor(lengths))
        sums = torch.zeros((len(spans), states.shape[1]), device=states.device)
        sums.index_add_(0, to_device(owners, states.device), states)
        if not all(span.is_first and span.is_last for span in spans):
            return self._continued(spans, sums)
        counts = torch.tensor(lengths).clamp(min=1)
        return sums / to_device(counts, sums.device)[:, None]

    def _continued(self, spans: list[_Span], sums: Tensor) -> Tensor:
        """Return the means of the prompts that end; keep the sums of the others."""
        means = []
        for span, total in zip(spans, sums, strict=True):
            before = self._sums.get(span.sequence)
            if not span.is_first and before is not None:
                total += before
            if span.is_last:
                skipped = self._skipped(span.sequence)
                means.append(total / max(1, span.sequence.prompt_length - skipped))
            else:
                self._sums[span.sequence] = total
        return torch.stack(means) if means else sums

    def _spans(self, plan: StepPlan) -> list[_Span]:
        spans, row = [], 0
        for sequence in plan.decodes:
            if sequence.pooled is not None:
                spans.append(self._span(sequence, row, 1, sequence.num_computed))
            row += 1
        for chunk in plan.chunks:
            if chunk.sequence.pooled is not None:
                spans.append(self._span(chunk.sequence, row, chunk.num_outputs, chunk.end))
            row += chunk.num_outputs
        return spans

    def _span(self, sequence: TokenSequence, row: int, count: int, end: int) -> _Span:
        """Return `count` rows from `row` on; the last row is that of the token before `end`."""
        begin = end - count
        skipped = min(count, max(0, self._skipped(sequence) - begin))
        is_last = end == sequence.prompt_length
        return _Span(sequence, row + skipped, row + count, begin == 0, is_last)

    def _skipped(self, sequence: TokenSequence) -> int:
        """Return the number of tokens at the beginning of a prompt that are not pooled."""
        pooling, length = self._pooler.pooling, sequence.instruction_length
        keeps = sequence.keeps_tokens or not self._pooler.skips_instructions
        if keeps or pooling is Pooling.LAST:
            return 0
        is_all = pooling is Pooling.CLS and length >= sequence.prompt_length
        return 0 if is_all else length
