"""The engine in the process of a script, without gRPC.

    with Engine(Path("models/tokenwire-code-6m")) as engine:
        print(engine.generate([100, 101, 102], max_tokens=8, temperature=0).token_ids)

Importing this module loads torch, which reads OpenMP's settings once. A script with short steps
should first call `limit_thread_spinning` of `frontend.child_process`.
"""

import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TypedDict, Unpack

import grpc
import torch
from torch import Tensor

from services.common.contract import DEFAULT_MAX_TOKENS
from services.common.model_files.checkpoint import opened
from services.engine.batch.step_batch import StateSegments, StepBatch
from services.engine.checked_request import (
    CheckedRequest,
    PlacedImage,
    Pooled,
    SamplingSettings,
    StoppingSettings,
)
from services.engine.execution.model_runner import SCORED_ROWS
from services.engine.frontend.events import refusal
from services.engine.loop.loaded_loop import LoadedLoop, load_loop
from services.engine.messages import (
    AddRequest,
    CancelRequest,
    Embedded,
    FinishCause,
    Finished,
    FlushCache,
    Output,
    Refused,
    RequestDone,
    Score,
    ScoredPrompt,
    Token,
)
from services.engine.model_description import ModelDescription
from services.engine.settings import EngineSettings
from tokenwire.errors import ServiceError, invalid

__all__ = ["Engine", "GenerateOptions", "Generation"]


class GenerateOptions(TypedDict, total=False):
    """Options of a request. protos/tokenwire/types/v1/types.proto states their ranges."""

    max_tokens: int
    """Upper bound of generated tokens; 0 with `prompt_logprobs` only scores the prompt"""
    temperature: float
    """Temperature of the draws, 1.0 by default; 0 takes the most likely token each time"""
    top_p: float
    top_k: int
    """Candidates to draw from; 0 = all, the default"""
    min_p: float
    seed: int | None
    """Seed of the draws: equal seeds draw equal tokens; None = a random seed"""
    stop_token_ids: Collection[int]
    ignore_eos: bool
    logprobs: int | None
    """Number of candidates in the score of a generated token; None = no scores"""
    prompt_logprobs: int | None
    """Number of candidates in the score of a prompt token; None = no scores"""
    images: Sequence[PlacedImage]
    """Images of the prompt, in order"""


@dataclass(slots=True)
class Generation:
    """The result of one request."""

    token_ids: list[int] = field(default_factory=list)
    """Generated ids, with the id that ended the sequence"""
    finish: FinishCause = FinishCause.LENGTH
    scores: list[Score] = field(default_factory=list)
    """Score of each generated token; empty without `logprobs`"""
    prompt_scores: list[Score] = field(default_factory=list)
    """Score of each prompt token but the first; empty without `prompt_logprobs`"""


class Engine:
    """A model, its KV cache and its step loop.

    Requests run in `step`, on the thread that calls it: `generate` runs one to its end, `submit`
    and `step` run several side by side. An engine is not safe for threads.
    """

    def __init__(self, model: str | Path, settings: EngineSettings | None = None) -> None:
        """Load the checkpoint in directory `model`, or the GGUF file `model`.

        Raises CheckpointError or StartupError.

        settings: flags of the engine service; those of its server have no effect.
        """
        with opened(replace(settings or EngineSettings(), model=Path(model))) as opened_settings:
            self._loaded: LoadedLoop | None = load_loop(opened_settings)
        self._handles = 0
        self._undelivered: list[Output] = []
        """Outputs of a step in which a request was refused"""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the model and the KV cache."""
        self._loaded = None

    @property
    def loaded(self) -> LoadedLoop:
        """The parts of the engine. Raises RuntimeError once it is closed."""
        if self._loaded is None:
            raise RuntimeError("The engine is closed.")
        return self._loaded

    @property
    def model(self) -> ModelDescription:
        """Shape and size of the loaded model."""
        return self.loaded.description

    def generate(self, prompt: Sequence[int], **options: Unpack[GenerateOptions]) -> Generation:
        """Generate from a prompt.

        Outputs of other requests that run meanwhile are lost. Raises ServiceError.
        """
        handle = self.submit(prompt, **options)
        generation = Generation()
        while True:
            for output in self.step():
                match output:
                    case Token() if output.handle == handle:
                        generation.token_ids.append(output.id)
                        if output.score is not None:
                            generation.scores.append(output.score)
                    case ScoredPrompt() if output.handle == handle:
                        generation.prompt_scores += output.scores
                    case Finished() if output.handle == handle:
                        generation.finish = output.cause
                    case RequestDone() if output.handle == handle:
                        return generation

    def embed(
        self,
        prompts: Sequence[Sequence[int]],
        second_texts: Mapping[int, int] | None = None,
        instructions: Mapping[int, int] | None = None,
        *,
        is_raw: bool = False,
    ) -> Tensor:
        """Return the vectors of prompts, embeddings or scores: float32 [prompts, width].

        second_texts: index of the first token of a pair's second text, by index of the prompt.
        instructions: number of tokens at the beginning that pooling may leave out, by index of the
        prompt. is_raw: leave out the last stage, which activates scores or normalizes embeddings.
        Outputs of other requests that run meanwhile are lost. Raises ServiceError.
        """
        pooled = self._pooled()
        length = self.model.context_length
        checked = CheckedRequest.of_texts(
            prompts, pooled, length, second_texts, instructions, is_raw=is_raw
        )
        return torch.cat(self._vectors(checked))

    def token_vectors(
        self,
        prompts: Sequence[Sequence[int]],
        unattended: Mapping[int, int] | None = None,
        *,
        is_raw: bool = False,
    ) -> list[Tensor]:
        """Return the vectors of all tokens of each prompt: float32 [tokens, width].

        For a model without vectors of tokens, these are the states of the last layer. unattended:
        number of tokens at the end to which no token attends, by index of the prompt. All else is
        as in `embed`.
        """
        pooled, length = self._pooled(), self.model.context_length
        checked = CheckedRequest.of_texts(
            prompts, pooled, length, unattended=unattended, is_raw=is_raw, keeps_tokens=True
        )
        return self._vectors(checked)

    def _pooled(self) -> Pooled:
        if self.model.pooled is None:
            message = "The model makes no embeddings; start it with --pooling."
            raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "NO_EMBEDDINGS", message)
        return self.model.pooled

    def _vectors(self, checked: CheckedRequest) -> list[Tensor]:
        """Return the vectors of each prompt: float32 [vectors, width]."""
        for prompt in checked.prompts:
            self._check(prompt)
        handle = self._enter(checked)
        width = self.model.token_width if checked.keeps_tokens else self.model.vector_width
        vectors: dict[int, Tensor] = {}
        while True:
            for output in self.step():
                match output:
                    case Embedded() if output.handle == handle:
                        buffer = bytearray(output.vectors)
                        numbers = torch.frombuffer(buffer, dtype=torch.float32)
                        vectors[output.prompt] = numbers.view(-1, width)
                    case RequestDone() if output.handle == handle:
                        return [vectors[index] for index in range(len(checked.prompts))]

    def submit(self, prompt: Sequence[int], **options: Unpack[GenerateOptions]) -> int:
        """Queue a request; return the handle that its outputs carry.

        Raises ServiceError for a prompt that the model can't take.
        """
        self._check(prompt)
        seed = options.get("seed")
        sampling = SamplingSettings(
            temperature=options.get("temperature", 1.0),
            top_p=options.get("top_p", 1.0),
            top_k=options.get("top_k", 0),
            min_p=options.get("min_p", 0.0),
            seed=secrets.randbits(63) if seed is None else seed,
            suppressed=self.model.suppressed.always,
            suppressed_first=self.model.suppressed.first,
        )
        stopping = StoppingSettings(
            max_tokens=options.get("max_tokens", DEFAULT_MAX_TOKENS),
            min_tokens=0,
            ignore_eos=options.get("ignore_eos", False),
            context_length=self.model.context_length,
            stop_token_ids=frozenset(options.get("stop_token_ids", ())),
        )
        checked = CheckedRequest(
            prompts=[prompt],
            n=1,
            sampling=sampling,
            stopping=stopping,
            logprobs=options.get("logprobs"),
            prompt_logprobs=options.get("prompt_logprobs"),
            resume=(),
            constrained=False,
            images={0: images} if (images := options.get("images")) else {},
        )
        return self._enter(checked)

    def _enter(self, checked: CheckedRequest) -> int:
        self._handles += 1
        request = AddRequest(
            handle=self._handles,
            checked=checked,
            credit=None,
            cache_salt=b"",
            priority=0,
            arrival=time.monotonic(),
        )
        self.loaded.steps.apply([request])
        return self._handles

    def step(self) -> Sequence[Output]:
        """Run one step; return its outputs.

        Raises ServiceError when a request is refused; the next call returns the other outputs.
        """
        outputs = [*self._undelivered, *self.loaded.steps.step(list).outputs]
        self._undelivered = []
        for index, output in enumerate(outputs):
            if isinstance(output, Refused):
                self._undelivered = outputs[:index] + outputs[index + 1 :]
                raise refusal(output)
        return outputs

    def cancel(self, handles: Iterable[int]) -> None:
        """End requests; the next step reports them as cancelled."""
        self.loaded.steps.apply([CancelRequest(handle) for handle in handles])

    def flush_cache(self) -> None:
        """Empty the prefix cache."""
        self.loaded.steps.apply([FlushCache()])

    @torch.inference_mode()
    def log_probabilities(self, ids: Sequence[int]) -> Tensor:
        """Return the model's log-probabilities after each token: float32 [tokens, vocabulary].

        The ids are computed in one pass, in a KV cache of their own. Raises ServiceError.
        """
        self._check(ids)
        decoder, count = self.loaded.model.decoder, len(ids)
        blocks = -(-count // decoder.block_size)
        cache = decoder.allocate_cache(blocks, num_states=1)
        positions = torch.arange(count, device=decoder.device)
        batch = StepBatch(
            token_ids=torch.tensor(ids, device=decoder.device),
            positions=positions,
            slots=positions,
            query_starts=torch.tensor([0, count], dtype=torch.int32, device=decoder.device),
            context_lengths=torch.tensor([count], dtype=torch.int32, device=decoder.device),
            block_tables=positions[None, :blocks].int(),
            num_decodes=0,
            query_lengths_host=(count,),
            states=StateSegments.from_zeros([count], decoder.device) if cache.states else None,
            context_lengths_host=(count,),
        )
        hidden = decoder.forward(batch, cache)
        # the decoder has room for the logits of SCORED_ROWS rows, which the next call overwrites
        parts = [hidden[start : start + SCORED_ROWS] for start in range(0, count, SCORED_ROWS)]
        return torch.cat([decoder.logits(part).log_softmax(-1) for part in parts])

    def _check(self, prompt: Sequence[int]) -> None:
        size, most = self.model.vocabulary_size, self.model.context_length
        if not prompt:
            raise invalid("prompt", "A prompt needs at least one id.")
        if min(prompt) < 0 or max(prompt) >= size:
            raise invalid("prompt", f"Ids must be between 0 and {size - 1}.")
        if len(prompt) > most:
            message = f"The prompt has {len(prompt)} tokens; the context is {most} tokens."
            raise invalid("prompt", message, reason="CONTEXT_LENGTH_EXCEEDED")
