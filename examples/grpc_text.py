"""Completion over gRPC with the generated stubs."""

import os

import grpc

from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.types.v1 import types_pb2

with grpc.insecure_channel(os.environ.get("TOKENIZER", "127.0.0.1:50051")) as channel:
    prompt = completion_pb2.Prompt(text="def read_json(path):\n")
    request = completion_pb2.GenerateRequest(
        prompts=completion_pb2.Prompts(items=[prompt]),
        sampling=types_pb2.SamplingParams(temperature=0),
        stopping=types_pb2.StoppingParams(max_tokens=48),
    )
    for response in CompletionServiceStub(channel).Generate(request):
        if response.HasField("delta"):
            print(response.delta.text, end="", flush=True)
    print()
