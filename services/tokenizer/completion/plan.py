"""How a valid CompleteRequest will be served: what the engine is asked, and what becomes of its
tokens."""

import asyncio
import secrets
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.common.annotations import unenforced_in
from services.common.contract import DEFAULT_MAX_TOKENS, MAX_BAD_IDS, MAX_BAD_SPELLINGS
from services.tokenizer.completion.prompt import (
    EncodedPrompt,
    PromptPolicy,
    encode_prompt,
    kept_tokens,
)
from services.tokenizer.completion.stops import StopAutomaton, compile_stops
from services.tokenizer.completion.validation import check_complete
from services.tokenizer.limits import Limits
from services.tokenizer.text.detokenizer import TokenTable
from services.tokenizer.text.infill import InfillTemplate
from services.tokenizer.text.vocabulary import Vocabulary
from services.tokenizer.tools import call_grammar, forced_tools, unenforced_in_tools
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "ChoicePlan",
    "CompletePlan",
    "CompleteWork",
    "Work",
    "context_length",
    "is_large",
    "plan_complete",
]

_INLINE = 4_096  # characters; longer texts are encoded in a thread
_LARGE = 16_384  # bytes
_SEED_BITS = 53  # survives JSON readers that know only doubles
_DRY_BREAKERS = ("\n", ":", '"', "*")


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """What becomes of the tokens of every choice."""

    stops: StopAutomaton | None
    include_stop: bool
    enders: Collection[int]
    """Ids that end a choice and add no text."""
    min_tokens: int
    scored: bool
    """Whether the client is shown logprobs."""
    ranked: bool
    """Whether best_of needs them."""
    suffix: str
    """Appended when the choice is complete."""
    skip_special_tokens: bool = True
    """Whether special tokens add no text to the choice's."""


@dataclass(frozen=True, slots=True)
class CompletePlan:
    """A completion, ready for the engine."""

    engine_request: engine_pb2.GenerateRequest
    prompts: Sequence[EncodedPrompt]
    n: int
    """Choices per prompt that are answered, of engine_request.n that are drawn."""
    choice: ChoicePlan
    blame: Callable[[ServiceError], None] | None
    """Makes the refusal of a grammar speak of what it was made of; None: it is the request's."""
    ignored: Sequence[str]
    """Paths of what the request's schemas say without effect"""
    echo: bool
    whole: bool
    limits: Limits
    table: TokenTable
    """How the output is decoded."""
    prompt_logprobs: int | None
    """Candidates per prompt token that the client is told apart from an echo; None = no scores."""
    full_table: TokenTable
    """What every token is on its own, special ones too."""
    begins_text: bool
    """Whether each output begins a text rather than going on with its prompt's."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.ids) for prompt in self.prompts)


class Work(Protocol):
    """A request before it is served."""

    def check(self, limits: Limits) -> None:
        """Raises the ServiceError of the first field that is wrong. Quick: what `is_large` is
        checked by `plan`."""

    def plan(self, limits: Limits) -> CompletePlan | Coroutine[None, None, CompletePlan]:
        """How it will be served: at once, or aside where that takes a while. It was checked."""


def is_large(request: completion_pb2.CompleteRequest | completion_pb2.ChatRequest) -> bool:
    """Whether all work on the request is done in a thread: the loop carries everybody's tokens.

    Breakers are searched for in the whole vocabulary, and each bad word is encoded by itself.
    """
    words = bool(request.dry_sequence_breakers) or bool(request.bad_words)
    return words or request.ByteSize() > _LARGE


@dataclass(frozen=True, slots=True)
class CompleteWork:
    """A completion."""

    request: completion_pb2.CompleteRequest
    vocabulary: Vocabulary
    infill: InfillTemplate | None

    def check(self, limits: Limits) -> None:
        """As `check_complete`."""
        if not is_large(self.request):
            check_complete(self.request, limits, self.infill)

    def plan(self, limits: Limits) -> CompletePlan | Coroutine[None, None, CompletePlan]:
        """Raises as `plan_complete`, and as `check_complete` what `check` left."""
        request = self.request
        arguments = (request, self.vocabulary, self.infill, limits)
        if is_large(request):
            return asyncio.to_thread(self._check_and_plan, limits)
        if len(request.suffix) + sum(len(prompt.text) for prompt in request.prompts) > _INLINE:
            return asyncio.to_thread(plan_complete, *arguments)
        return plan_complete(*arguments)

    def _check_and_plan(self, limits: Limits) -> CompletePlan:
        check_complete(self.request, limits, self.infill)
        return plan_complete(self.request, self.vocabulary, self.infill, limits)


def plan_complete(
    request: completion_pb2.CompleteRequest,
    vocabulary: Vocabulary,
    infill: InfillTemplate | None,
    limits: Limits,
) -> CompletePlan:
    """Encodes the prompts and resolves what the request leaves open. The request was checked.

    Takes a while for long texts. Raises as `encode_prompt`.
    """
    stopping = request.stopping
    suffix = request.suffix if request.HasField("suffix") else None
    context = context_length(stopping, limits)
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else DEFAULT_MAX_TOKENS
    keep: int | None = None
    if request.HasField("truncate_prompt_tokens"):
        keep = kept_tokens(request.truncate_prompt_tokens, context, max_tokens)
    policy = PromptPolicy(
        context_length=context,
        max_tokens=max_tokens,
        truncate=request.truncate_prompt,
        refuse_overflow=request.context_overflow == completion_pb2.CONTEXT_OVERFLOW_ERROR,
        echo=request.echo,
        infill=infill,
        suffix=suffix,
        keep=keep,
    )
    prompts = [
        encode_prompt(vocabulary, prompt, f"prompts[{index}]", policy)
        for index, prompt in enumerate(request.prompts)
    ]
    stop_ids = set(stopping.stop_token_ids)
    if infill is not None and suffix is not None and not stopping.ignore_eos:
        stop_ids.update(infill.stop_ids)
    n = request.n if request.HasField("n") else 1
    ranked = request.best_of > n
    calls = call_grammar(request.tools, request.tool_choice)
    engine_request = engine_pb2.GenerateRequest(
        prompts=[types_pb2.TokenIds(ids=prompt.ids) for prompt in prompts],
        n=max(n, request.best_of),
        sampling=_sampling(request, vocabulary),
        stopping=types_pb2.StoppingParams(
            max_tokens=policy.max_tokens,
            min_tokens=stopping.min_tokens,
            ignore_eos=stopping.ignore_eos,
            stop_token_ids=sorted(stop_ids),
            context_length=policy.context_length,
        ),
    )
    ignored: Sequence[str] = ()
    if request.HasField("grammar"):
        engine_request.grammar.CopyFrom(request.grammar)
        ignored = unenforced_in(request.grammar, "grammar")
    elif calls is not None:
        engine_request.grammar.CopyFrom(calls)
        ignored = unenforced_in_tools(forced_tools(request.tools, request.tool_choice))
    if ranked:
        engine_request.logprobs = 0
    if request.HasField("logprobs"):
        engine_request.logprobs = request.logprobs
        if request.echo:
            engine_request.prompt_logprobs = request.logprobs
    prompt_logprobs: int | None = None
    if request.HasField("prompt_logprobs"):
        prompt_logprobs = request.prompt_logprobs
        # an echo has its scores of the same rows
        engine_request.prompt_logprobs = max(engine_request.prompt_logprobs, prompt_logprobs)
    skips = not request.HasField("skip_special_tokens") or request.skip_special_tokens
    enders = stop_ids if stopping.ignore_eos else stop_ids.union(limits.eos_ids)
    choice = ChoicePlan(
        stops=compile_stops(tuple(request.stop)) if request.stop else None,
        include_stop=request.include_stop_string,
        enders=() if request.include_stop_string and not skips else enders,
        skip_special_tokens=skips,
        min_tokens=stopping.min_tokens,
        scored=request.HasField("logprobs"),
        ranked=ranked,
        suffix=suffix if suffix is not None and infill is None else "",
    )
    whole = request.delivery == completion_pb2.DELIVERY_WHOLE
    return CompletePlan(
        engine_request=engine_request,
        prompts=prompts,
        n=n,
        choice=choice,
        blame=None if calls is None else _blame_tools,
        ignored=ignored,
        echo=request.echo,
        whole=whole,
        limits=limits,
        table=vocabulary.table if skips else vocabulary.full_table,
        prompt_logprobs=prompt_logprobs,
        full_table=vocabulary.full_table,
        begins_text=False,
    )


def _blame_tools(error: ServiceError) -> None:
    error.field = "tools"


def context_length(stopping: types_pb2.StoppingParams, limits: Limits) -> int:
    """The engine's, or what the request lowers it to; in tokens."""
    if stopping.HasField("context_length"):
        return min(stopping.context_length, limits.context_length)
    return limits.context_length


def _sampling(
    request: completion_pb2.CompleteRequest, vocabulary: Vocabulary
) -> types_pb2.SamplingParams:
    """What the engine is told: a seed always, and no field that asks for nothing."""
    sampling = types_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)
    if not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(_SEED_BITS)
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(sampling, name) == 0:
            sampling.ClearField(name)
    if sampling.repetition_penalty == 1:
        sampling.ClearField("repetition_penalty")
    if not sampling.dry.multiplier:
        sampling.ClearField("dry")
    elif request.dry_sequence_breakers or not (
        sampling.dry.breaker_ids or request.no_dry_sequence_breakers
    ):
        breakers = tuple(request.dry_sequence_breakers) or _DRY_BREAKERS
        ids = {*sampling.dry.breaker_ids, *vocabulary.ids_containing(breakers)}
        sampling.dry.breaker_ids[:] = sorted(ids)
    _forbid(request.bad_words, sampling, vocabulary)
    return sampling


def _forbid(
    words: Sequence[str], sampling: types_pb2.SamplingParams, vocabulary: Vocabulary
) -> None:
    """Adds the ids of bad words. Raises INVALID_ARGUMENT for words that have none, or too many."""
    if not words and not sampling.bad_token_ids:
        return
    for index, word in enumerate(words):
        spellings = vocabulary.spellings(word)
        if not spellings:
            raise invalid(f"bad_words[{index}]", "A bad word must have tokens; this one has none.")
        sampling.bad_token_ids.extend(types_pb2.TokenIds(ids=ids) for ids in spellings)
    count = sum(len(run.ids) for run in sampling.bad_token_ids)
    if count > MAX_BAD_IDS or len(sampling.bad_token_ids) > MAX_BAD_SPELLINGS:
        raise invalid(
            "bad_words" if words else "sampling.bad_token_ids",
            f"Bad words must have at most {MAX_BAD_IDS:,} tokens in all, and {MAX_BAD_SPELLINGS:,} "
            f"ways to be spelled; these have {count:,} and {len(sampling.bad_token_ids):,}.",
        )
