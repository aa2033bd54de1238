"""Generation from token ids over gRPC with the generated stubs."""

import os

import grpc

from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub, EngineServiceStub
from tokenwire.pb.types.v1 import types_pb2

with grpc.insecure_channel(os.environ.get("ENGINE", "127.0.0.1:50052")) as channel:
    model = EngineControlServiceStub(channel).GetModel(engine_pb2.GetModelRequest())
    print(f"{model.model}: {model.vocabulary_size} ids, context {model.context_length}")

    request = engine_pb2.GenerateRequest(
        prompts=[types_pb2.TokenIds(ids=[100, 101, 102])],
        sampling=types_pb2.SamplingParams(temperature=0.8, seed=7),
        stopping=types_pb2.StoppingParams(max_tokens=16, ignore_eos=True),
        logprobs=0,
    )
    for response in EngineServiceStub(channel).Generate(request):
        if response.HasField("delta"):
            columns = response.delta.tokens
            print(list(columns.ids), [round(logprob, 3) for logprob in columns.logprobs])
        elif response.HasField("completed"):
            print(response.completed.usage.completion_tokens, "tokens")
