"""vllm.Inference: the service of vLLM that vllm-router calls."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

from services.common.interceptor import metadata_value
from services.tokenizer.completion_call import Context
from services.tokenizer.vllm_api.generate_calls import GenerateCalls
from services.tokenizer.vllm_api.inference_answer import InferenceAnswer
from services.tokenizer.vllm_api.inference_request import inference_field, request_of
from tokenwire.errors import invalid
from tokenwire.pb.vllm import inference_pb2
from tokenwire.pb.vllm.inference_pb2_grpc import InferenceServicer

__all__ = ["VllmInference"]

_RANK = "x-data-parallel-rank"


class VllmInference(InferenceServicer):
    """The one rpc of vllm.Inference that vllm-router needs."""

    def __init__(self, calls: GenerateCalls) -> None:
        self._calls = calls

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Generate, and stream text, ids, or both."""
        if (metadata_value(context, _RANK) or "0") != "0":
            raise invalid(_RANK, "There is one rank, 0.")
        answer = InferenceAnswer(request)
        responses = self._calls.run(
            request_of(request),
            request.request_id,
            partial(inference_field, request=request),
            context,
            salt=request.kv.cache_salt,
            priority=-request.priority,
        )
        async with aclosing(responses):
            async for response in responses:
                for message in answer.responses(response):
                    yield message
