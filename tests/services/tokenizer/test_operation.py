"""Operation of the tokenizer service: loss of its engine, start, shutdown and imports."""

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.services.tokenizer.completion_client import Answer, completed, make_request, tokens
from tests.stack import Stack, mortal_engine, running_service
from tokenwire.channel import connect
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.types.v1 import types_pb2 as types


def _assert_same_scores(
    actual: Sequence[completion.PromptLogprobs], expected: Sequence[completion.PromptLogprobs]
) -> None:
    """The rounding of a logprob depends on what else is in its step; all else is equal."""
    for got, wanted in zip(actual, expected, strict=True):
        for name in ("logprobs", "top_logprobs"):
            values = getattr(wanted.tokens, name)
            assert list(getattr(got.tokens, name)) == pytest.approx(list(values), abs=1e-4)
            getattr(got.tokens, name)[:] = values
        assert got == wanted


async def test_completion_continues_after_an_engine_loss(
    embedded_model: Path, tmp_path: Path
) -> None:
    """The restarted engine continues from prompt and generated ids with the sampling state.

    The client sees the same text, and each token once.
    """
    async with (
        mortal_engine(embedded_model) as engine,
        running_service(
            "tokenizer", "--model", str(embedded_model), "--engine", engine.target,
            "--engine-wait", "120", log=tmp_path / "log",
        ) as service,
        connect(service.target) as channel,
    ):  # fmt: skip
        stub = CompletionServiceStub(channel)
        sampling = types.SamplingParams(
            seed=1,
            frequency_penalty=0.3,
            repetition_penalty=1.1,
            dry=types.DryParams(multiplier=0.8),
            mirostat=types.MirostatParams(target_perplexity=8),
        )
        request = make_request(
            "import re", n=2, sampling=sampling, logprobs=0, echo=True, prompt_logprobs=2,
            bad_words=["self", "import os"], stopping=tokens(64, ignore_eos=True),
        )  # fmt: skip
        # a concurrent request whose candidates are ranked only at the end
        ranked = make_request(
            "def ", n=2, best_of=4, sampling=types.SamplingParams(seed=2), logprobs=0,
            stopping=tokens(200, ignore_eos=True), delivery=completion.DELIVERY_WHOLE,
        )  # fmt: skip
        calm = await completed(stub.Generate(request))
        calm_ranked = await completed(stub.Generate(ranked))
        is_ranking = False
        while not is_ranking:  # retry if the ranking ended before the kill
            ranking = asyncio.ensure_future(completed(stub.Generate(ranked)))
            stormy, killed = Answer(), False
            async for response in stub.Generate(request):
                stormy.take(response)
                if len(stormy.ids.get(1, ())) >= 20 and not killed:
                    killed, is_ranking = True, not ranking.done()
                    await engine.kill()
                    await engine.start()
            stormy_ranked = await ranking
            assert killed
            assert stormy.texts == calm.texts
            assert stormy.ids == calm.ids
            _assert_same_scores(stormy.prompt_logprobs, calm.prompt_logprobs)
            assert all("self" not in text for text in stormy.texts.values())
            assert stormy.usage is not None
            assert stormy.usage.completion_tokens == 128
            assert stormy_ranked.ids == calm_ranked.ids
            assert stormy_ranked.usage is not None
            assert stormy_ranked.usage.completion_tokens == 800


async def test_sigterm_finishes_running_requests(stack: Stack, tmp_path: Path) -> None:
    arguments = ("--model", str(stack.model), "--engine", stack.engine)
    async with (
        running_service("tokenizer", *arguments, log=tmp_path / "log") as service,
        connect(service.target) as channel,
    ):
        stub = CompletionServiceStub(channel)
        answer = Answer()
        async for response in stub.Generate(
            make_request("import", stopping=tokens(300, ignore_eos=True))
        ):
            if response.HasField("delta") and not answer.deltas:
                service.process.send_signal(signal.SIGTERM)
            answer.take(response)
        assert len(answer.ids[0]) == 300
        assert await service.process.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "/nowhere"], "The model directory /nowhere does not exist."),
        (["--model", "tests"], "tests has no tokenizer.json."),
        ([], "--model must name the directory of a checkpoint, or a GGUF file."),
        (["--max-logprobs", "21"], "--max-logprobs must be between 0 and 20, not 21."),
    ],
)
async def test_failed_start_is_one_sentence(arguments: list[str], complaint: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.tokenizer", "--port", "0", *arguments),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    [line] = said.decode().splitlines()
    assert line.startswith("tokenizer: ")
    assert line.endswith(complaint)


async def test_service_imports_neither_torch_nor_transformers() -> None:
    """The imports would cost 300 MB of memory, and seconds at every start."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys, services.tokenizer.application as _; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))",
    )
    assert await process.wait() == 0
