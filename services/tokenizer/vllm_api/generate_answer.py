"""Translation of a completion's responses to vLLM's."""

from collections.abc import Iterator, Sequence

from smg_grpc_proto.generated import vllm_engine_pb2

from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["GenerateAnswer"]

_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_CANCELLED: "abort",
}


class GenerateAnswer:
    """The answer to one GenerateRequest, from its admission to the end of its last choice."""

    def __init__(self, request: vllm_engine_pb2.GenerateRequest) -> None:
        self._streams = request.stream
        self._params = request.sampling_params
        self._prompt: Sequence[int] = ()
        self._cached_tokens = 0
        self._prompt_scores: vllm_engine_pb2.InputLogProbs | None = None
        """Scores of the prompt so far; None unless they were requested"""
        self._scored: set[int] = set()
        """Choices whose message has had the prompt's scores"""
        self._whole: dict[int, completion_pb2.ChoiceDelta] = {}
        """Tokens of the choices that are delivered when they end"""

    def responses(
        self, response: completion_pb2.GenerateResponse
    ) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """Yield the messages to the client for one response of the completion."""
        match response.WhichOneof("event"):
            case "accepted":
                self._prompt = response.accepted.prompts[0].ids
                self._cached_tokens = sum(response.accepted.cached_tokens)
                if self._params.HasField("prompt_logprobs"):
                    self._prompt_scores = self._first_prompt_score()
            case "prompt_logprobs":
                self._add_prompt_scores(response.prompt_logprobs.tokens)
            case "delta" if self._streams:
                yield vllm_engine_pb2.GenerateResponse(chunk=self._chunk(response.delta))
            case "delta":
                self._whole[response.delta.index] = response.delta
            case "finished":
                yield vllm_engine_pb2.GenerateResponse(complete=self._complete(response.finished))

    def _chunk(self, delta: completion_pb2.ChoiceDelta) -> vllm_engine_pb2.GenerateStreamChunk:
        return vllm_engine_pb2.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(delta.token_ids),
            cached_tokens=self._cached_tokens,
            output_logprobs=_output_scores(delta.tokens),
            input_logprobs=self._take_prompt_scores(delta.index),
            index=delta.index,
        )

    def _complete(
        self, finished: completion_pb2.ChoiceFinished
    ) -> vllm_engine_pb2.GenerateComplete:
        """Return the end of a choice. It does not repeat tokens that were sent in chunks."""
        delta = self._whole.pop(finished.index, completion_pb2.ChoiceDelta())
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=delta.token_ids,
            finish_reason=_REASONS[finished.reason],
            prompt_tokens=len(self._prompt),
            completion_tokens=finished.completion_tokens,
            cached_tokens=self._cached_tokens,
            output_logprobs=_output_scores(delta.tokens),
            input_logprobs=self._take_prompt_scores(finished.index),
            index=finished.index,
        )
        match finished.match.WhichOneof("match"):
            case "stop_token_id":
                complete.matched_token_id = finished.match.stop_token_id
            case "stop_string":
                complete.matched_stop_str = finished.match.stop_string
        return complete

    def _first_prompt_score(self) -> vllm_engine_pb2.InputLogProbs:
        """Return the place of the prompt's first token, which has no score."""
        return vllm_engine_pb2.InputLogProbs(
            token_ids=self._prompt[:1],
            token_logprobs=[vllm_engine_pb2.InputTokenLogProb()],
            top_logprobs=[vllm_engine_pb2.TopLogProbs()] if self._params.prompt_logprobs else (),
        )

    def _add_prompt_scores(self, tokens: types_pb2.TokenColumns) -> None:
        assert self._prompt_scores is not None
        self._prompt_scores.token_ids.extend(tokens.ids)
        self._prompt_scores.token_logprobs.extend(
            vllm_engine_pb2.InputTokenLogProb(value=value) for value in tokens.logprobs
        )
        self._prompt_scores.top_logprobs.extend(_candidates(tokens))

    def _take_prompt_scores(self, index: int) -> vllm_engine_pb2.InputLogProbs | None:
        """Return the prompt's scores once for each choice. They are complete before its tokens."""
        if self._prompt_scores is None or index in self._scored:
            return None
        self._scored.add(index)
        return self._prompt_scores


def _output_scores(tokens: types_pb2.TokenColumns) -> vllm_engine_pb2.OutputLogProbs | None:
    if not tokens.logprobs:
        return None
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=tokens.logprobs,
        token_ids=tokens.ids,
        top_logprobs=_candidates(tokens),
    )


def _candidates(tokens: types_pb2.TokenColumns) -> Iterator[vllm_engine_pb2.TopLogProbs]:
    width = tokens.top_width
    for begin in range(0, len(tokens.top_ids), max(1, width)):
        yield vllm_engine_pb2.TopLogProbs(
            token_ids=tokens.top_ids[begin : begin + width],
            values=tokens.top_logprobs[begin : begin + width],
        )
