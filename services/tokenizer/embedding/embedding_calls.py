"""Calls of Embed, Score and Classify: vectors and scores of texts, from the engines."""

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

from services.common.accounts.usage import RequestUsage
from services.common.errors import draining_error
from services.common.failures import failure
from services.common.vector_sizes import check_token_states, check_vectors
from services.tokenizer import metrics
from services.tokenizer.completion.engine_request import CallContext
from services.tokenizer.completion.validation import check_model
from services.tokenizer.embedding.label_names import LabelNames
from services.tokenizer.embedding.late_interaction import LateInteraction
from services.tokenizer.embedding.late_scores import LateScores
from services.tokenizer.embedding.pair_template import PairTemplate
from services.tokenizer.embedding.request_checks import (
    Request,
    check_classify,
    check_embed,
    check_score,
    truncation,
)
from services.tokenizer.embedding.sentence_prompts import SentencePrompt, SentencePrompts
from services.tokenizer.embedding.task_prompts import TaskPrompts
from services.tokenizer.embedding.text_encoding import TextEncoder
from services.tokenizer.embedding.text_roles import PLAIN, TextRole
from services.tokenizer.embedding.vector_request import VectorRequest, Vectors
from services.tokenizer.embedding.vector_scores import VectorScores
from services.tokenizer.engines.engine_pool import EnginePool
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["EmbeddingCalls"]

_LOG = logging.getLogger("embedding")
_INLINE_CHARACTERS = 4_096  # longer texts are encoded in a thread: the event loop must stay free
_TEXT_CHARACTERS = 64  # characters whose encoding takes as long as the rest of a text's

Answer = TypeVar("Answer")
EncodedTexts: TypeAlias = Sequence[engine_pb2.EmbeddedPrompt]
TextsRequest: TypeAlias = completion_pb2.EmbedRequest | completion_pb2.ClassifyRequest


class EmbeddingCalls:
    """All calls of Embed, Score and Classify of the process."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompts: SentencePrompts,
        labels: LabelNames,
        late: LateInteraction,
        pair_template: PairTemplate | None,
        tasks: TaskPrompts,
        pool: EnginePool,
    ) -> None:
        self._vocabulary = vocabulary
        self._prompts = prompts
        self._labels = labels
        self._late = late
        self._pair_template = pair_template
        self._tasks = tasks
        self._pool = pool
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    async def drain(self) -> None:
        """Refuse new calls; return when the running ones have ended."""
        self._is_draining = True
        await self._idle.wait()

    async def embed(
        self, request: completion_pb2.EmbedRequest, context: CallContext
    ) -> completion_pb2.EmbedResponse:
        """Embed texts. Raises ServiceError."""
        return await self._answered(context, partial(self._embed, request))

    async def score(
        self, request: completion_pb2.ScoreRequest, context: CallContext
    ) -> completion_pb2.ScoreResponse:
        """Score pairs of texts. Raises ServiceError."""
        return await self._answered(context, partial(self._score, request))

    async def classify(
        self, request: completion_pb2.ClassifyRequest, context: CallContext
    ) -> completion_pb2.ClassifyResponse:
        """Sort texts into classes. Raises ServiceError."""
        return await self._answered(context, partial(self._classify, request))

    def labels_of(self, limits: ModelLimits) -> Sequence[str]:
        """Return the names of the labels that a model sorts texts into; empty if it has no head."""
        return self._labels.first(limits.vector_width if limits.vectors_are_scores else 0)

    async def _embed(
        self, request: completion_pb2.EmbedRequest, engines: VectorRequest
    ) -> completion_pb2.EmbedResponse:
        limits = await self._limits(request, engines.context)
        check_embed(request, limits)
        of_tokens = limits.only_tokens_have_vectors
        role = self._late.role(_prompt_name(request)) if of_tokens else None
        prompt = self._prompt(request) if role is None else None
        model = limits.model
        if request.task:
            limits = self._limits_of_task(request.task, limits)
        prompts = await self._prompts_of(request, limits, prompt, role or PLAIN)
        if request.tokens or request.token_weights or of_tokens:
            answer = await self._embed_tokens(request, engines, limits, prompts, role)
            answer.model = model
            return answer
        check_vectors(len(prompts), limits.vector_width, "inputs")
        vectors = await engines.vectors(prompts, limits, is_raw=request.raw)
        if request.HasField("dimensions"):
            normalizes = limits.vectors_are_normalized and not request.raw
            shorten = partial(_shortened, vectors, request.dimensions, normalizes=normalizes)
            vectors = await asyncio.to_thread(shorten)
        return completion_pb2.EmbedResponse(
            width=vectors.width,
            vectors=vectors.data,
            model=model,
            usage=engines.usage,
        )

    def _limits_of_task(self, task: str, given: ModelLimits) -> ModelLimits:
        """Return the limits of the adapter of a task. given: limits of the request's model.

        Raises INVALID_ARGUMENT if there is no such adapter, or if the request names another model.
        """
        if given.adapter and given.model != task:
            message = f"model names the adapter {given.model}. Leave out task, or name the model."
            raise invalid("task", message)
        limits = self._pool.limits_of(task)
        if not limits.adapter:
            raise invalid("task", f"No engine holds the adapter of the task {task}.")
        return limits

    def _prompt(self, request: completion_pb2.EmbedRequest) -> SentencePrompt | None:
        """Return the prompt before the texts. Raises INVALID_ARGUMENT for unknown names."""
        task = request.task or (request.model if request.model in self._tasks else "")
        instruction = self._tasks.named(task) if task else None
        if instruction is not None and not request.HasField("prompt_name"):
            return instruction
        return self._prompts.named(_prompt_name(request))

    async def _embed_tokens(
        self,
        request: completion_pb2.EmbedRequest,
        engines: VectorRequest,
        limits: ModelLimits,
        prompts: Sequence[engine_pb2.EmbeddedPrompt],
        role: TextRole | None,
    ) -> completion_pb2.EmbedResponse:
        """Return vectors or weights of the texts' tokens, without tokens that scores leave out."""
        tokens, weighs = sum(len(each.ids) for each in prompts), request.token_weights
        check_token_states(tokens, 1 if weighs else limits.token_width, "inputs")
        vectors = await engines.vectors(
            prompts, limits, is_raw=request.raw, keeps_tokens=not weighs, weighs_tokens=weighs
        )
        kept = [
            (role if role is not None and given.HasField("text") else PLAIN).keeps(prompt.ids)
            for given, prompt in zip(request.inputs, prompts, strict=True)
        ]
        if limits.weighs_tokens:
            first = self._vocabulary.bos_id
            ends = limits.eos_ids if weighs else ()
            kept = [_within(prompt.ids, first, ends) for prompt in prompts]
        data = vectors.data
        if not all(map(all, kept)):
            data = _selected(vectors, [keeps for each in kept for keeps in each])
        return completion_pb2.EmbedResponse(
            width=vectors.width,
            vectors=data,
            model=limits.model,
            usage=engines.usage,
            counts=map(sum, kept),
        )

    async def _classify(
        self, request: completion_pb2.ClassifyRequest, engines: VectorRequest
    ) -> completion_pb2.ClassifyResponse:
        limits = await self._limits(request, engines.context)
        check_classify(request, limits)
        prompts = await self._prompts_of(request, limits)
        check_vectors(len(prompts), limits.vector_width, "inputs")
        vectors = await engines.vectors(prompts, limits, is_raw=request.raw)
        return completion_pb2.ClassifyResponse(
            labels=self.labels_of(limits),
            probabilities=vectors.data,
            model=limits.model,
            usage=engines.usage,
        )

    async def _prompts_of(
        self,
        request: TextsRequest,
        limits: ModelLimits,
        prompt: SentencePrompt | None = None,
        role: TextRole = PLAIN,
    ) -> Sequence[engine_pb2.EmbeddedPrompt]:
        """Encode a request's inputs. A text stands behind `prompt`, or is encoded by its role."""
        encoder = TextEncoder(self._vocabulary, limits, truncation(request), prompt, role)
        added = len(role.prefix) if prompt is None else len(prompt.text)
        size = _size([each.text for each in request.inputs], added)
        return await _run(lambda: encoder.encode(request.inputs), size)

    async def _score(
        self, request: completion_pb2.ScoreRequest, engines: VectorRequest
    ) -> completion_pb2.ScoreResponse:
        limits = await self._limits(request, engines.context)
        check_score(request, limits)
        if limits.only_tokens_have_vectors:
            scores = await self._late_scores(request, engines, limits)
            return completion_pb2.ScoreResponse(
                scores=scores, model=limits.model, usage=engines.usage
            )
        encoder = TextEncoder(
            self._vocabulary, limits, truncation(request), pair_template=self._pair_template
        )
        first, second = request.first, request.second
        if limits.vectors_are_scores:
            pairs = list(zip([*first] * (len(second) // len(first)), second, strict=True))
            has_types = limits.takes_pairs
            size = _size([text for pair in pairs for text in pair])
            prompts = await _run(lambda: encoder.encode_pairs(pairs, has_types=has_types), size)
            vectors = await engines.vectors(prompts, limits, is_raw=request.raw)
            scores = array("f", vectors.data).tolist()
        else:
            texts, count = [*first, *second], len(first)
            fields = [*_fields_of_first(first), *_fields_of_second(second)]
            prompts = await _run(lambda: encoder.encode_texts(texts, fields), _size(texts))
            similarities = VectorScores(engines, limits, self._late.multiplies)
            scores = await similarities.scores(prompts[:count], prompts[count:])
        return completion_pb2.ScoreResponse(scores=scores, model=limits.model, usage=engines.usage)

    async def _late_scores(
        self, request: completion_pb2.ScoreRequest, engines: VectorRequest, limits: ModelLimits
    ) -> list[float]:
        """Return the MaxSim of each pair: first texts are queries, second ones documents."""
        first, second = request.first, request.second
        query, document = (
            TextEncoder(self._vocabulary, limits, truncation(request), None, role)
            for role in (self._late.query, self._late.document)
        )

        def encode() -> tuple[EncodedTexts, EncodedTexts]:
            return (
                query.encode_texts(first, _fields_of_first(first)),
                document.encode_texts(second, _fields_of_second(second)),
            )

        size = _size(first, len(query.role.prefix)) + _size(second, len(document.role.prefix))
        queries, documents = await _run(encode, size)
        late = LateScores(engines, limits, query.role, document.role, self._late.averages)
        return await late.scores(queries, documents)

    async def _limits(self, request: Request, context: CallContext) -> ModelLimits:
        """Admit a call. Returns the limits of its model. Raises ServiceError."""
        if self._is_draining:
            raise draining_error()
        if context.meter is not None:
            await context.meter.begin()
        await self._pool.wait_until_serving(context.deadline, "It is not connected.", is_new=True)
        limits = self._pool.limits_of(request.model)
        check_model(request.model, limits.model)
        return limits

    async def _answered(
        self, context: CallContext, answer: Callable[[VectorRequest], Awaitable[Answer]]
    ) -> Answer:
        """Return a call's answer; count the tokens that it used, and log its end."""
        engines = VectorRequest(self._pool, context)
        started, outcome = time.monotonic(), "cancelled"
        why: dict[str, str] = {}
        self._running += 1
        self._idle.clear()
        metrics.RUNNING.inc()
        try:
            answered = await answer(engines)
            outcome = "ok"
        except ServiceError as error:
            outcome, why = error.code.name.lower(), failure(_LOG, error)
            raise
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
            used_tokens = engines.usage.prompt_tokens
            metrics.RUNNING.dec()
            metrics.REQUESTS.labels(outcome).inc()
            metrics.PROMPT_TOKENS.inc(used_tokens)
            if context.meter is not None:
                model = self._pool.limits.model if used_tokens else ""
                is_error = outcome not in ("ok", "cancelled")
                context.meter.end(RequestUsage(model, used_tokens, is_error=is_error))
            if why:
                context.span.fail(**why)
            context.span.end()
            milliseconds = round((time.monotonic() - started) * 1e3, 2)
            fields = {**context.log_fields, **why, "prompt_tokens": used_tokens}
            _LOG.info("embedding %s", outcome, extra={**fields, "milliseconds": milliseconds})
        return answered


def _prompt_name(request: completion_pb2.EmbedRequest) -> str | None:
    return request.prompt_name if request.HasField("prompt_name") else None


def _shortened(vectors: Vectors, dimensions: int, *, normalizes: bool) -> Vectors:
    """Return the first `dimensions` numbers of each vector, with length 1 if `normalizes`."""
    from services.tokenizer.embedding.vector_math import shortened

    data = shortened(vectors.data, vectors.width, dimensions, normalizes=normalizes)
    return Vectors(dimensions, data)


def _within(ids: Sequence[int], first: int | None, ends: Collection[int]) -> list[bool]:
    """Return for each id whether it belongs to the text: it is neither `first` nor one of `ends`.

    FlagEmbedding, too, leaves these out, and the weights of unknown and padding tokens.
    """
    kept = [True] * len(ids)
    kept[0] = ids[0] != first
    kept[-1] &= ids[-1] not in ends
    return kept


def _selected(vectors: Vectors, kept: Sequence[bool]) -> bytes:
    from services.tokenizer.embedding.vector_math import selected

    return selected(vectors.data, vectors.width, kept)


def _fields_of_first(texts: Sequence[str]) -> list[str]:
    return ["first"] if len(texts) == 1 else [f"first[{place}]" for place in range(len(texts))]


def _fields_of_second(texts: Sequence[str]) -> list[str]:
    return [f"second[{place}]" for place in range(len(texts))]


def _size(texts: Sequence[str], added: int = 0) -> int:
    """Return the cost of encoding texts behind `added` characters each, in characters."""
    return sum(map(len, texts)) + len(texts) * (_TEXT_CHARACTERS + added)


async def _run(encode: Callable[[], Answer], size: int) -> Answer:
    """Encode texts, in a thread if it takes long. size: cost in characters, from `_size`."""
    return encode() if size <= _INLINE_CHARACTERS else await asyncio.to_thread(encode)
