"""Translation of a completion's responses to vllm.GenerateResponse."""

from collections.abc import Iterator, Sequence

from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2
from tokenwire.pb.vllm import inference_pb2

__all__ = ["InferenceAnswer"]

_REASONS = {
    types_pb2.FINISH_REASON_STOP: inference_pb2.FinishInfo.STOP,
    types_pb2.FINISH_REASON_LENGTH: inference_pb2.FinishInfo.LENGTH,
    types_pb2.FINISH_REASON_CANCELLED: inference_pb2.FinishInfo.ABORTED,
}


class InferenceAnswer:
    """The answer to one GenerateRequest, from its admission to the end of its last choice."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self._options = request.response
        self._info: inference_pb2.PromptInfo | None = None
        """Description of the prompt for the first response, with its scores; None after that"""
        self._sent: dict[int, int] = {}
        """Number of sent tokens of each choice"""

    def responses(
        self, response: completion_pb2.GenerateResponse
    ) -> Iterator[inference_pb2.GenerateResponse]:
        """Yield the messages to the client for one response of the completion."""
        match response.WhichOneof("event"):
            case "accepted":
                self._info = self._prompt_info(response.accepted.prompts[0].ids)
            case "prompt_logprobs" if self._info is not None:
                tokens = response.prompt_logprobs.tokens
                self._info.logprobs.extend(tokens.logprobs)
                self._info.ranks.extend(tokens.ranks)
                self._info.candidate_tokens.extend(_candidates(tokens))
            case "delta":
                yield self._response(self._part(response.delta))
            case "finished":
                yield self._response(self._end(response.finished))

    def _prompt_info(self, ids: Sequence[int]) -> inference_pb2.PromptInfo:
        info = inference_pb2.PromptInfo(num_prompt_tokens=len(ids))
        if self._options.prompt_token_ids:
            info.token_ids.extend(ids)
        if self._options.prompt_logprobs:  # the first token has no score
            info.logprobs.append(0.0)
            info.ranks.append(0)
            if self._options.prompt_candidates.top_n:
                info.candidate_tokens.add()
        return info

    def _response(self, output: inference_pb2.SequenceOutput) -> inference_pb2.GenerateResponse:
        info, self._info = self._info, None
        return inference_pb2.GenerateResponse(prompt_info=info, outputs=output)

    def _part(self, delta: completion_pb2.ChoiceDelta) -> inference_pb2.SequenceOutput:
        options, tokens = self._options, delta.tokens
        self._sent[delta.index] = delta.position + len(delta.token_ids)
        gives_text = not options.HasField("output_text") or options.output_text
        return inference_pb2.SequenceOutput(
            index=delta.index,
            text=delta.text if gives_text else "",
            num_tokens=len(delta.token_ids),
            token_ids=delta.token_ids if options.output_token_ids else (),
            logprobs=tokens.logprobs,
            ranks=tokens.ranks,
            candidate_tokens=_candidates(tokens),
        )

    def _end(self, finished: completion_pb2.ChoiceFinished) -> inference_pb2.SequenceOutput:
        """Return the end of a choice. It counts tokens that a stop string has removed."""
        end, count = finished.match, finished.completion_tokens
        info = inference_pb2.FinishInfo(
            num_output_tokens=count, finish_reason=_REASONS[finished.reason]
        )
        match end.WhichOneof("match"):
            case "stop_token_id":
                info.stop_token_id = end.stop_token_id
            case "eos_token_id":
                info.eos_token_id = end.eos_token_id
            case "stop_string":
                info.stop_string = end.stop_string
        return inference_pb2.SequenceOutput(
            index=finished.index,
            num_tokens=count - self._sent.pop(finished.index, 0),
            finish_info=info,
        )


def _candidates(tokens: types_pb2.TokenColumns) -> Iterator[inference_pb2.CandidateTokenInfo]:
    """Yield the candidates of each token, without the token itself."""
    width = tokens.top_width
    if not width:
        return
    for place, token in enumerate(tokens.ids):
        row = range(place * width, (place + 1) * width)
        yield inference_pb2.CandidateTokenInfo(
            tokens=[
                inference_pb2.CandidateTokenInfo.TokenInfo(
                    id=tokens.top_ids[i], logprob=tokens.top_logprobs[i], rank=rank
                )
                for rank, i in enumerate(row, 1)
                if tokens.top_ids[i] != token
            ]
        )
