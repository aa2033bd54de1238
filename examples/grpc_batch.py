"""A batch over gRPC with the generated stubs: a file of requests in, a file of answers out."""

import json
import os
import time
from collections.abc import Iterator

import grpc

from tokenwire.pb.jobs.v1 import jobs_pb2
from tokenwire.pb.jobs.v1.jobs_pb2_grpc import BatchServiceStub, FileServiceStub

PROMPTS = ("def read_json(path):\n", "import os\n")


def upload() -> Iterator[jobs_pb2.UploadFileRequest]:
    """Yield the messages of an upload: what the file is, then its content in pieces."""
    yield jobs_pb2.UploadFileRequest(name="requests.jsonl", purpose="batch")
    for number, prompt in enumerate(PROMPTS):
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0}
        line = {"custom_id": str(number), "url": "/v1/completions", "body": body}
        yield jobs_pb2.UploadFileRequest(piece=json.dumps(line).encode() + b"\n")


with grpc.insecure_channel(os.environ.get("JOBS", "127.0.0.1:50054")) as channel:
    files, batches = FileServiceStub(channel), BatchServiceStub(channel)
    file = files.UploadFile(upload()).file
    batch = batches.CreateBatch(
        jobs_pb2.CreateBatchRequest(input_file_id=file.id, endpoint="/v1/completions")
    ).batch
    while not batch.HasField("ended_at"):
        time.sleep(0.2)
        batch = batches.GetBatch(jobs_pb2.GetBatchRequest(batch_id=batch.id)).batch
    download = files.DownloadFile(jobs_pb2.DownloadFileRequest(file_id=batch.output_file_id))
    output = b"".join(answer.piece for answer in download)
    for answer in map(json.loads, output.splitlines()):
        text = answer["response"]["body"]["choices"][0]["text"]
        print(f"{answer['custom_id']}: {PROMPTS[int(answer['custom_id'])]}{text}")
