"""Plan of a completion: the request to the engine, and the treatment of its tokens."""

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from services.common.annotations import unenforced_in
from services.common.block_hash import ImagePlaces
from services.common.contract import DEFAULT_MAX_TOKENS, MAX_BAD_IDS, MAX_BAD_SPELLINGS
from services.tokenizer.completion.prompt_encoding import (
    EncodedPrompt,
    PromptPolicy,
    encode_prompt,
    kept_tokens,
)
from services.tokenizer.completion.stops import StopAutomaton, compile_stops
from services.tokenizer.images.image_expander import ImageExpander
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.detokenizer import TokenTable
from services.tokenizer.text.infill import InfillTemplate
from services.tokenizer.text.vocabulary import Vocabulary
from services.tokenizer.tool_schemas import (
    constrained_tools,
    tool_call_grammar,
    unenforced_in_tools,
)
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "ChoicePlan",
    "CompletionPlan",
    "Constraint",
    "EncodedInput",
    "choice_count",
    "context_length",
    "grammar_constraint",
    "plan_prompts",
    "plan_request",
]

_SEED_BITS = 53  # a JSON reader that knows only doubles keeps the seed
_DRY_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's defaults


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """Treatment of the tokens of every choice."""

    stops: StopAutomaton | None
    include_stop: bool
    end_ids: Collection[int]
    """Ids that end a choice and add no text"""
    min_tokens: int
    scored: bool
    """True if the client gets logprobs"""
    ranked: bool
    """True if the mean logprobs of all candidates decide which ones the client gets"""
    suffix: str
    """Text to append when the choice ends"""
    skip_special_tokens: bool = True
    """True if special tokens add no text"""


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A completion, ready for the engine."""

    engine_request: engine_pb2.GenerateRequest
    prompts: Sequence[EncodedPrompt]
    n: int
    """Choices per prompt that the client gets out of the `engine_request.n` generated ones"""
    choice: ChoicePlan
    remap_error: Callable[[ServiceError], None] | None
    """Function that sets the request's field in a grammar's error; None = the field is right"""
    ignored: Sequence[str]
    """Paths of schema keywords that are not enforced"""
    echo: bool
    whole: bool
    """True if each choice is delivered at its end"""
    limits: ModelLimits
    table: TokenTable
    """Texts of generated tokens"""
    prompt_logprobs: int | None
    """Candidates per prompt token in events of their own; None without such events."""
    full_table: TokenTable
    """Texts of all tokens, special ones included"""
    begins_text: bool
    """True if each output begins a text, instead of continuing the text of its prompt"""
    resume: completion_pb2.Resumption | None = None
    """Output that the client has received before; None for a new request"""
    generates_again: bool = False
    """True if the engine generates a resumed choice again: ids do not restore all of its state"""
    images: Sequence[Sequence[ImagePlaces]] = ()
    """Images of each prompt; empty without any"""
    writes_one_large: bool = False
    """True if `write` ends after a large output, because parsing it takes long"""

    @property
    def searches(self) -> bool:
        """True if the choices are the results of a beam search."""
        return self.engine_request.HasField("beam_search")

    @property
    def ids_name_blocks(self) -> bool:
        """True if the ids alone name the blocks in an engine's cache: no images, no adapter."""
        return not (self.engine_request.images or self.limits.adapter)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.ids) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Constraint:
    """Grammar of every choice."""

    spec: types_pb2.GrammarSpec
    ignored: Sequence[str]
    """Paths of schema keywords that are not enforced"""
    remap_error: Callable[[ServiceError], None] | None
    """Function that sets the request's field in a grammar's error; None = the field is right"""


@dataclass(frozen=True, slots=True)
class EncodedInput:
    """The prompts, or the conversation, of a request as the engine gets them."""

    prompts: Sequence[EncodedPrompt]
    max_tokens: int
    """Most tokens of a choice: the request's limit, or the default of prompts or conversations"""
    constraint: Constraint | None = None
    stop_ids: Collection[int] = ()
    """Ids that end a choice beside those of the request and EOS; ignore_eos disables them"""
    suffix: str = ""
    """Text to append when the choice ends"""
    echo: bool = False
    """True if the prompt's tokens come before each choice, with scores if the choice has scores"""
    images: Sequence[engine_pb2.PromptImage] = ()
    image_places: Sequence[Sequence[ImagePlaces]] = ()
    """Images of each prompt; empty without any"""


def plan_prompts(
    request: completion_pb2.GenerateRequest,
    vocabulary: Vocabulary,
    infill: InfillTemplate | None,
    limits: ModelLimits,
    images: ImageExpander | None = None,
) -> CompletionPlan:
    """Encode the prompts of a valid request with its images, and resolve its defaults.

    Takes long for long texts. Raises the errors of `encode_prompt` and `ImageExpander.place`, and
    INVALID_ARGUMENT for wrong bad_words.
    """
    given = request.prompts
    policy = _prompt_policy(request, infill, limits)
    placed = images.place(given.items) if images is not None else ()
    prompts = [
        encode_prompt(
            vocabulary, prompt, f"prompts.items[{index}]", policy, placed[index] if placed else None
        )
        for index, prompt in enumerate(given.items)
    ]
    is_infilled = infill is not None and given.HasField("suffix")
    encoded = EncodedInput(
        prompts,
        policy.max_tokens,
        _constraint(request),
        stop_ids=infill.stop_ids if infill is not None and is_infilled else (),
        suffix=given.suffix if infill is None else "",
        echo=request.echo,
        images=images.messages(placed) if images is not None else (),
        image_places=images.places(placed, [each.ids for each in prompts]) if images else (),
    )
    return plan_request(request, encoded, vocabulary, limits)


def plan_request(
    request: completion_pb2.GenerateRequest,
    encoded: EncodedInput,
    vocabulary: Vocabulary,
    limits: ModelLimits,
) -> CompletionPlan:
    """Return the plan of a valid request. Raises INVALID_ARGUMENT for wrong bad_words."""
    stop_ids = {*request.stopping.stop_token_ids}
    if not request.stopping.ignore_eos:
        stop_ids.update(encoded.stop_ids)
    engine_request = engine_pb2.GenerateRequest(
        model=limits.model if limits.adapter else "",
        prompts=[types_pb2.TokenIds(ids=prompt.ids) for prompt in encoded.prompts],
        n=max(choice_count(request), request.best_of),
        sampling=_sampling(request, vocabulary),
        stopping=types_pb2.StoppingParams(
            max_tokens=encoded.max_tokens,
            min_tokens=request.stopping.min_tokens,
            ignore_eos=request.stopping.ignore_eos,
            stop_token_ids=sorted(stop_ids),
            context_length=context_length(request.stopping, limits),
        ),
        images=encoded.images,
        grammar=encoded.constraint.spec if encoded.constraint is not None else None,
        beam_search=request.beam_search if request.HasField("beam_search") else None,
        prediction=_prediction(request, vocabulary, limits),
    )
    _request_logprobs(request, engine_request, echo=encoded.echo)
    choice = _choice_plan(request, stop_ids, encoded.suffix, limits)
    return CompletionPlan(
        engine_request=engine_request,
        prompts=encoded.prompts,
        n=choice_count(request),
        choice=choice,
        remap_error=encoded.constraint.remap_error if encoded.constraint is not None else None,
        ignored=encoded.constraint.ignored if encoded.constraint is not None else (),
        echo=encoded.echo,
        whole=request.delivery == completion_pb2.DELIVERY_WHOLE,
        limits=limits,
        table=vocabulary.table if choice.skip_special_tokens else vocabulary.full_table,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        full_table=vocabulary.full_table,
        begins_text=False,
        resume=request.resume if request.HasField("resume") else None,
        generates_again=request.sampling.HasField("mirostat") or request.HasField("beam_search"),
        images=encoded.image_places,
    )


def _prediction(
    request: completion_pb2.GenerateRequest, vocabulary: Vocabulary, limits: ModelLimits
) -> types_pb2.TokenIds | None:
    """Return the tokens of the expected text. Raises INVALID_ARGUMENT for too many."""
    if not request.prediction:
        return None
    ids = vocabulary.encode_plain(request.prediction)
    if len(ids) > limits.context_length:
        raise invalid(
            "prediction",
            f"The prediction has {len(ids):,} tokens; the context has {limits.context_length:,}.",
        )
    return types_pb2.TokenIds(ids=ids)


def grammar_constraint(request: completion_pb2.GenerateRequest) -> Constraint | None:
    """Return the constraint by the request's own grammar, if it has one."""
    if not request.HasField("grammar"):
        return None
    return Constraint(request.grammar, unenforced_in(request.grammar, "grammar"), None)


def _constraint(request: completion_pb2.GenerateRequest) -> Constraint | None:
    """Return the constraint of prompts: the request's grammar, or the grammar of a tool call."""
    calls = tool_call_grammar(request.tools, request.tool_choice)
    if request.HasField("grammar") or calls is None:
        return grammar_constraint(request)
    tools = constrained_tools(request.tools, request.tool_choice)
    return Constraint(calls, unenforced_in_tools(tools), _remap_to_tools)


def _prompt_policy(
    request: completion_pb2.GenerateRequest, infill: InfillTemplate | None, limits: ModelLimits
) -> PromptPolicy:
    stopping, prompts = request.stopping, request.prompts
    context = context_length(stopping, limits)
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else DEFAULT_MAX_TOKENS
    keep: int | None = None
    if request.HasField("truncate_prompt_tokens"):
        keep = kept_tokens(request.truncate_prompt_tokens, context, max_tokens)
    return PromptPolicy(
        context_length=context,
        max_tokens=max_tokens,
        truncate=request.truncate_prompt,
        refuse_overflow=request.context_overflow == completion_pb2.CONTEXT_OVERFLOW_ERROR,
        echo=request.echo,
        infill=infill,
        suffix=prompts.suffix if prompts.HasField("suffix") else None,
        keep=keep,
    )


def choice_count(request: completion_pb2.GenerateRequest) -> int:
    """Return the number of choices per prompt."""
    return request.n if request.HasField("n") else 1


def _is_ranked(request: completion_pb2.GenerateRequest) -> bool:
    """Return whether the candidates of best_of must be ranked: beams come best first."""
    return request.best_of > choice_count(request) and not request.HasField("beam_search")


def _request_logprobs(
    request: completion_pb2.GenerateRequest,
    engine_request: engine_pb2.GenerateRequest,
    *,
    echo: bool,
) -> None:
    """Request the logprobs that the client, an echo or best_of needs."""
    if _is_ranked(request):
        engine_request.logprobs = 0
    if request.HasField("logprobs"):
        engine_request.logprobs = request.logprobs
        if echo:
            engine_request.prompt_logprobs = request.logprobs
    if request.HasField("prompt_logprobs"):
        # an echo uses the same rows
        most = max(engine_request.prompt_logprobs, request.prompt_logprobs)
        engine_request.prompt_logprobs = most


def _choice_plan(
    request: completion_pb2.GenerateRequest,
    stop_ids: Collection[int],
    suffix: str,
    limits: ModelLimits,
) -> ChoicePlan:
    skips = not request.HasField("skip_special_tokens") or request.skip_special_tokens
    end_ids = {*stop_ids}
    if not request.stopping.ignore_eos:
        end_ids.update(limits.eos_ids)
    return ChoicePlan(
        stops=compile_stops(tuple(request.stop)) if request.stop else None,
        include_stop=request.include_stop_string,
        end_ids=() if request.include_stop_string and not skips else end_ids,
        min_tokens=request.stopping.min_tokens,
        scored=request.HasField("logprobs"),
        ranked=_is_ranked(request),
        suffix=suffix,
        skip_special_tokens=skips,
    )


def _remap_to_tools(error: ServiceError) -> None:
    error.field = "tools"


def context_length(stopping: types_pb2.StoppingParams, limits: ModelLimits) -> int:
    """Return the context length in tokens: the engine's, or the lower one of the request."""
    if stopping.HasField("context_length"):
        return min(stopping.context_length, limits.context_length)
    return limits.context_length


def _sampling(
    request: completion_pb2.GenerateRequest, vocabulary: Vocabulary
) -> types_pb2.SamplingParams:
    """Return the engine's parameters. They have a seed, and no penalty with a neutral value."""
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
    _add_bad_words(request.bad_words, sampling, vocabulary)
    return sampling


def _add_bad_words(
    words: Sequence[str], sampling: types_pb2.SamplingParams, vocabulary: Vocabulary
) -> None:
    """Add the ids of bad words. Raises INVALID_ARGUMENT for words with no ids, or too many."""
    if not words and not sampling.bad_token_ids:
        return
    for index, word in enumerate(words):
        spellings = vocabulary.spellings(word)
        if not spellings:
            raise invalid(f"bad_words[{index}]", "A bad word must have at least one token.")
        sampling.bad_token_ids.extend(types_pb2.TokenIds(ids=ids) for ids in spellings)
    count = sum(len(run.ids) for run in sampling.bad_token_ids)
    if count > MAX_BAD_IDS or len(sampling.bad_token_ids) > MAX_BAD_SPELLINGS:
        raise invalid(
            "bad_words" if words else "sampling.bad_token_ids",
            f"All bad words together must have at most {MAX_BAD_IDS:,} tokens in "
            f"{MAX_BAD_SPELLINGS:,} sequences, got {count:,} in {len(sampling.bad_token_ids):,}.",
        )
