"""vLLM's gRPC at the tokenizer service: translation, refusals, tokenizer files, cache events."""

import asyncio
import base64
import copy
import hashlib
import io
import shutil
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2, vllm_engine_pb2
from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub
from tokenizers import Tokenizer

from tests.services.tokenizer.completion_client import make_request
from tests.stack import (
    MortalEngine,
    Stack,
    is_busy,
    is_idle,
    mortal_engine,
    running_service,
    watch_load,
)
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.vision_checkpoints import png
from tests.vision import write_whole
from tokenwire.channel import connect
from tokenwire.client import Client
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.types.v1 import types_pb2 as types
from tokenwire.pb.vllm import inference_pb2
from tokenwire.pb.vllm.inference_pb2_grpc import InferenceStub

PROMPT = "def add(a, b):\n"
IDS = list(range(300, 370))
HANG_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Facade:
    """A tokenizer service with --vllm-api, by all of its services."""

    engine: Any
    inference: Any
    sglang: Any
    client: Client
    engine_target: str
    model: Path

    async def generate(
        self, request: vllm_engine_pb2.GenerateRequest
    ) -> list[vllm_engine_pb2.GenerateResponse]:
        return [response async for response in self.engine.Generate(request)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def facade(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Facade]:
    async with serving(stack.engine, stack.model, tmp_path_factory.mktemp("log")) as facade:
        yield facade


@asynccontextmanager
async def serving(engine: str, model: Path, logs: Path) -> AsyncIterator[Facade]:
    """Run a tokenizer service with --vllm-api beside the engine at "host:port"."""
    log = logs / "tokenizer.log"
    flags = ("--model", str(model), "--engine", engine, "--vllm-api")
    async with (
        running_service("tokenizer", *flags, log=log) as service,
        connect(service.target) as channel,
        Client(service.target) as client,
    ):
        yield Facade(
            VllmEngineStub(channel),  # type: ignore[no-untyped-call]
            InferenceStub(channel),
            SglangSchedulerStub(channel),  # type: ignore[no-untyped-call]
            client,
            engine,
            model,
        )


def asked(*, stream: bool = True, **sampling: Any) -> vllm_engine_pb2.GenerateRequest:
    params = {"temperature": 0, "max_tokens": 12, **sampling}
    return vllm_engine_pb2.GenerateRequest(
        text=PROMPT, stream=stream, sampling_params=vllm_engine_pb2.SamplingParams(**params)
    )


async def refusal(call: Any) -> ServiceError:
    """Return the error of a call."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return ServiceError.from_rpc_error(error)
    raise AssertionError("the call succeeded")


async def test_chunks_hold_what_a_whole_answer_holds(facade: Facade) -> None:
    *parts, end = await facade.generate(asked(n=1, logprobs=2))
    [whole] = await facade.generate(asked(stream=False, logprobs=2))
    chunks = [part.chunk for part in parts]
    assert [each for chunk in chunks for each in chunk.token_ids] == whole.complete.output_ids
    assert sum(chunk.completion_tokens for chunk in chunks) == whole.complete.completion_tokens
    assert end.complete.finish_reason == whole.complete.finish_reason == "length"
    assert end.complete.completion_tokens == 12
    scores = [each for chunk in chunks for each in chunk.output_logprobs.token_logprobs]
    assert scores == pytest.approx(list(whole.complete.output_logprobs.token_logprobs))
    assert [len(top.token_ids) for top in whole.complete.output_logprobs.top_logprobs] == [2] * 12
    answer = await facade.client.generate(PROMPT, temperature=0, max_tokens=12)
    assert list(answer.choices[0].token_ids) == whole.complete.output_ids


async def test_zero_means_unset(facade: Facade) -> None:
    """Protobuf has no other default for these fields, so gateways leave them at 0."""
    zeros = asked(top_p=0, top_k=0, min_p=0, repetition_penalty=0, n=0, min_tokens=0)
    zeros.sampling_params.temperature = 1
    zeros.sampling_params.seed = 7
    ones = asked(top_p=1, repetition_penalty=1, n=1)
    ones.sampling_params.temperature = 1
    ones.sampling_params.seed = 7
    zeros.stream = ones.stream = False
    assert await facade.generate(zeros) == await facade.generate(ones)


async def test_output_is_limited_by_the_context_alone_without_max_tokens(facade: Facade) -> None:
    request = asked(stream=False, ignore_eos=True)
    request.sampling_params.ClearField("max_tokens")
    [answer] = await facade.generate(request)
    info = await facade.engine.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    total = answer.complete.prompt_tokens + answer.complete.completion_tokens
    assert total == info.max_context_length


async def test_tokens_of_a_stop_string_stay_for_the_gateway_to_cut(facade: Facade) -> None:
    free = (await facade.client.generate(PROMPT, temperature=0, max_tokens=12)).text
    stop = free[8:12]
    [answer] = await facade.generate(asked(stream=False, stop=[stop]))
    text = await facade.client.decode(answer.complete.output_ids)
    assert stop in text
    assert free.startswith(text)
    assert answer.complete.finish_reason == "stop"
    assert answer.complete.matched_stop_str == stop


async def test_stop_id_is_reported(facade: Facade) -> None:
    [free] = await facade.generate(asked(stream=False))
    stop = free.complete.output_ids[4]
    [answer] = await facade.generate(asked(stream=False, stop_token_ids=[stop]))
    assert answer.complete.matched_token_id == stop
    assert answer.complete.finish_reason == "stop"


async def test_prompt_is_scored_from_its_second_token_on(facade: Facade) -> None:
    request = asked(prompt_logprobs=3)
    request.tokenized.input_ids.extend(IDS[:5])
    first, *others = await facade.generate(request)
    scores = first.chunk.input_logprobs
    assert scores.token_ids == IDS[:5]
    assert [score.HasField("value") for score in scores.token_logprobs] == [False, *[True] * 4]
    assert [len(top.values) for top in scores.top_logprobs] == [0, 3, 3, 3, 3]
    assert not any(other.chunk.HasField("input_logprobs") for other in others)


async def test_logprobs_go_up_to_those_of_chats(facade: Facade) -> None:
    [answer] = await facade.generate(asked(stream=False, logprobs=20))
    assert len(answer.complete.output_logprobs.top_logprobs[0].token_ids) == 20


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: r.ClearField("text"), "input"),
        (lambda r: setattr(r, "data_parallel_rank", 1), "data_parallel_rank"),
        (lambda r: setattr(r, "kv_transfer_params_json", "{}"), "kv_transfer_params_json"),
        (lambda r: r.kv_transfer_params.SetInParent(), "kv_transfer_params"),
        (lambda r: r.mm_inputs.SetInParent(), "mm_inputs"),
        (lambda r: r.extra_mm_inputs.add(), "extra_mm_inputs"),
        (lambda r: r.tokenized.input_ids.extend([1, 99_999]), "tokenized.input_ids[1]"),
        (lambda r: r.tokenized.input_ids.extend([5] * 5_000), "tokenized.input_ids"),
        (lambda r: setattr(r, "text", "x = 1\n" * 5_000), "text"),
        (lambda r: setattr(r.sampling_params, "max_tokens", 0), "sampling_params.max_tokens"),
        (lambda r: setattr(r.sampling_params, "temperature", 3), "sampling_params.temperature"),
        (lambda r: setattr(r.sampling_params, "top_k", 500), "sampling_params.top_k"),
        (lambda r: setattr(r.sampling_params, "n", 500), "sampling_params.n"),
        (lambda r: setattr(r.sampling_params, "logprobs", -1), "sampling_params.logprobs"),
        (lambda r: setattr(r.sampling_params, "logprobs", 21), "sampling_params.logprobs"),
        (
            lambda r: setattr(r.sampling_params, "prompt_logprobs", -1),
            "sampling_params.prompt_logprobs",
        ),
        (
            lambda r: r.sampling_params.logit_bias.update({-1: 1.0}),
            "sampling_params.logit_bias[-1]",
        ),
        (lambda r: r.sampling_params.stop.append(""), "sampling_params.stop[0]"),
        (
            lambda r: setattr(r.sampling_params, "truncate_prompt_tokens", -2),
            "sampling_params.truncate_prompt_tokens",
        ),
        (
            lambda r: setattr(r.sampling_params, "json_object", False),
            "sampling_params.json_object",
        ),
        (
            lambda r: r.sampling_params.choice.choices.extend(["a", ""]),
            "sampling_params.choice.choices[1]",
        ),
        (
            lambda r: setattr(r.sampling_params, "structural_tag", "{"),
            "sampling_params.structural_tag",
        ),
        (lambda r: setattr(r.sampling_params, "regex", "("), "sampling_params.regex"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_its_field(
    facade: Facade, change: Callable[[vllm_engine_pb2.GenerateRequest], None], field: str
) -> None:
    request = asked()
    change(request)
    error = await refusal(facade.engine.Generate(request))
    assert error.field == field
    assert error.code in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
    )


async def test_abort_ends_a_request_by_its_id(facade: Facade) -> None:
    request = asked(ignore_eos=True, max_tokens=1_900)
    request.request_id = "one"
    answer = asyncio.ensure_future(facade.generate(request))
    await watch_load(facade.engine_target, until=is_busy)
    await facade.engine.Abort(vllm_engine_pb2.AbortRequest(request_ids=["other", "one"]))
    *_, end = await answer
    assert end.complete.finish_reason == "abort"
    assert end.complete.completion_tokens < 1_900
    await watch_load(facade.engine_target, until=is_idle)


async def test_gateways_learn_which_protocol_it_is(facade: Facade) -> None:
    health = sglang_scheduler_pb2.HealthCheckRequest()
    error = await refusal(facade.sglang.HealthCheck(health))
    assert error.code is grpc.StatusCode.UNIMPLEMENTED
    await facade.engine.HealthCheck(vllm_engine_pb2.HealthCheckRequest())


async def test_rpcs_without_a_meaning_here_are_refused(facade: Facade) -> None:
    for call in (
        facade.engine.Embed(vllm_engine_pb2.EmbedRequest()),
        facade.engine.StartProfile(common_pb2.StartProfileRequest()),
        facade.engine.StopProfile(common_pb2.StopProfileRequest()),
    ):
        assert (await refusal(call)).reason == "NOT_IMPLEMENTED"


async def test_tokenizer_arrives_whole(facade: Facade) -> None:
    chunks = [chunk async for chunk in facade.engine.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as bundle:
        assert {"config.json", "tokenizer_config.json"} <= set(bundle.namelist())
        tokenizer = Tokenizer.from_str(bundle.read("tokenizer.json").decode())
    assert tokenizer.encode(PROMPT).ids == list((await facade.client.encode(PROMPT)).ids)


async def test_model_and_load_are_described(facade: Facade) -> None:
    model = await facade.engine.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    server = await facade.engine.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
    load = await facade.engine.GetLoads(vllm_engine_pb2.GetLoadsRequest())
    assert model.served_model_name == facade.model.name
    assert model.is_generation
    assert model.vocab_size == 8_192
    assert server.block_size == 32
    assert not server.mm_processor
    assert load.loads[0].max_total_num_tokens > 1_000
    elsewhere = await facade.engine.GetLoads(vllm_engine_pb2.GetLoadsRequest(dp_rank=1))
    assert not elsewhere.loads


class Subscriber:
    """The blocks that a subscriber to the cache knows: ids and parent, by hash."""

    def __init__(self, facade: Facade) -> None:
        request = common_pb2.SubscribeKvEventsRequest()
        self._stream = facade.engine.SubscribeKvEvents(request)
        self._number = 0
        self.blocks: dict[int, tuple[list[int], int | None]] = {}
        """Blocks of the group of layers that see all tokens"""
        self.others: dict[int, set[int]] = {}
        """Hashes of the blocks of each other group"""
        self.kinds: dict[int, tuple[str, int]] = {}
        """Kind and window of each group"""

    async def until(self, holds: Callable[["Subscriber"], bool]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while not (self._number and holds(self)):
                self._take(await self._stream.read())

    def holds(self, ids: list[int]) -> bool:
        """Return whether the full blocks of the ids are known, each behind the one before."""
        parent = None
        for begin in range(0, len(ids) // 32 * 32, 32):
            wanted = (ids[begin : begin + 32], parent)
            parent = next((each for each, known in self.blocks.items() if known == wanted), None)
            if parent is None:
                return False
        return True

    def close(self) -> None:
        self._stream.cancel()

    def _take(self, batch: common_pb2.KvEventBatch) -> None:
        assert batch.HasField("load")
        assert batch.sequence_number == self._number + (not batch.load.load_only)
        self._number = batch.sequence_number
        for event in batch.events:
            match event.WhichOneof("data"):
                case "cleared":
                    self.blocks.clear()
                    self.others.clear()
                case "removed" if event.removed.group_idx:
                    self.others[event.removed.group_idx] -= {*event.removed.block_hashes}
                case "removed":
                    for each in event.removed.block_hashes:
                        self.blocks.pop(each, None)
                case "stored" if event.stored.group_idx:
                    stored = event.stored
                    held = self.others.setdefault(stored.group_idx, set())
                    held |= {block.block_hash for block in stored.blocks}
                    self._note_kind(stored)
                case "stored":
                    stored = event.stored
                    self._note_kind(stored)
                    has_parent = stored.HasField("parent_block_hash")
                    parent = stored.parent_block_hash if has_parent else None
                    for block in stored.blocks:
                        assert parent is None or parent in self.blocks
                        assert block.block_size == len(block.token_ids)
                        self.blocks[block.block_hash] = (list(block.token_ids), parent)
                        parent = block.block_hash

    def _note_kind(self, stored: common_pb2.KvBlocksStored) -> None:
        kind = (stored.kv_cache_spec_kind, stored.kv_cache_spec_sliding_window)
        assert self.kinds.setdefault(stored.group_idx, kind) == kind


async def test_subscriber_knows_the_blocks_that_the_engine_holds(facade: Facade) -> None:
    request = asked(stream=False, max_tokens=40, ignore_eos=True)
    request.tokenized.input_ids.extend(IDS)
    early = Subscriber(facade)
    [answer] = await facade.generate(request)
    sequence = [*IDS, *answer.complete.output_ids[:-1]]
    await early.until(lambda each: each.holds(sequence))
    late = Subscriber(facade)
    await late.until(lambda each: each.holds(sequence))
    assert late.blocks == early.blocks
    await watch_load(facade.engine_target, until=is_idle)
    flush = common_pb2.FlushCacheRequest(timeout_s=HANG_SECONDS)
    assert (await facade.engine.FlushCache(flush)).success
    await early.until(lambda each: not each.blocks)
    await late.until(lambda each: not each.blocks)
    early.close()
    late.close()


@pytest.mark.parametrize(
    ("family", "kind"), [("gemma3", ("sliding_window", 9)), ("qwen3.5", ("mamba", 0))]
)
async def test_subscriber_knows_what_each_group_of_layers_holds(
    family: str, kind: tuple[str, int], embedded_model: Path, tmp_path: Path
) -> None:
    """Else a gateway counts on a prefix of which the engine has evicted a part."""
    config = copy.deepcopy(CONFIGS[family])
    config.vocab_size = 8_192  # that of the embedded model's tokenizer
    make_checkpoint(tmp_path, config)
    shutil.copy(embedded_model / "tokenizer.json", tmp_path)
    flags = ("--model", str(tmp_path), "--dtype", "float32", "--kv-memory", "16MiB")
    async with (
        running_service("engine", *flags, log=tmp_path / "engine.log") as engine,
        serving(engine.target, tmp_path, tmp_path) as facade,
    ):
        subscriber = Subscriber(facade)
        request = asked(stream=False, max_tokens=1)
        request.tokenized.input_ids.extend(range(3, 90))
        await facade.generate(request)
        await subscriber.until(lambda each: each.holds([*range(3, 90)]) and bool(each.others))
        assert subscriber.kinds == {0: ("full_attention", 0), 1: kind}
        assert subscriber.others[1] <= set(subscriber.blocks)
        subscriber.close()


async def test_prompts_of_tenants_are_told_to_nobody(facade: Facade) -> None:
    secret = [7, *IDS]
    open_ids = [9, *IDS]
    request = asked(stream=False, max_tokens=1)
    request.tokenized.input_ids.extend(secret)
    async for _ in facade.engine.Generate(request, metadata=(("x-tenant", "a"),)):
        pass
    request.tokenized.input_ids[:] = open_ids
    await facade.generate(request)
    subscriber = Subscriber(facade)
    await subscriber.until(lambda each: each.holds(open_ids))
    assert not any(7 in ids for ids, _ in subscriber.blocks.values())
    subscriber.close()


async def test_events_start_with_the_present_only(facade: Facade) -> None:
    request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=5)
    error = await refusal(facade.engine.SubscribeKvEvents(request))
    assert error.code is grpc.StatusCode.OUT_OF_RANGE  # at which smg subscribes from 0


def streamed(**fields: Any) -> inference_pb2.GenerateRequest:
    fields = {"text": PROMPT, "stopping": {"max_new_tokens": 12}, **fields}
    return inference_pb2.GenerateRequest(**fields)


async def test_inference_streams_text_and_ids(facade: Facade) -> None:
    options = {"output_token_ids": True, "output_logprobs": True, "prompt_token_ids": True}
    request = streamed(response={**options, "output_candidates": {"top_n": 3}})
    first, *others = [part async for part in facade.inference.GenerateStream(request)]
    answer = await facade.client.generate(PROMPT, temperature=0, max_tokens=12)
    parts = [first.outputs, *(other.outputs for other in others)]
    assert "".join(part.text for part in parts) == answer.text
    assert [each for part in parts for each in part.token_ids] == list(answer.choices[0].token_ids)
    assert list(first.prompt_info.token_ids) == list((await facade.client.encode(PROMPT)).ids)
    assert not any(other.HasField("prompt_info") for other in others)
    for part in parts[:-1]:
        assert len(part.logprobs) == len(part.candidate_tokens) == part.num_tokens
        assert all(2 <= len(each.tokens) <= 3 for each in part.candidate_tokens)
    end = parts[-1].finish_info
    assert end.finish_reason == inference_pb2.FinishInfo.LENGTH
    assert end.num_output_tokens == 12


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": "other"}, "model"),
        ({"lora_name": "a"}, "lora_name"),
        ({"kv": {"bypass_prefix_cache": True}}, "kv.bypass_prefix_cache"),
        ({"kv": {"kv_transfer_params": {}}}, "kv.kv_transfer_params"),
        ({"temperature": 3}, "temperature"),
        ({"sampling": {"top_k": 500}}, "sampling.top_k"),
        ({"decoding": {"repetition_penalty": 3}}, "decoding.repetition_penalty"),
        ({"decoding": {"allowed_token_ids": [99_999]}}, "decoding.allowed_token_ids[0]"),
        ({"decoding": {"regex": "("}}, "decoding.regex"),
        ({"stopping": {"stop_strings": [""]}}, "stopping.stop_strings[0]"),
        ({"stopping": {"max_new_tokens": 1, "min_new_tokens": 2}}, "stopping.min_new_tokens"),
        (
            {"response": {"output_logprobs": True, "output_candidates": {"all": True}}},
            "response.output_candidates.all",
        ),
        ({"media": [{"url": "http://a/b.png"}], "token_ids": {"ids": [1]}}, "media[0].url"),
    ],
)
async def test_inference_refuses_what_it_cannot_serve(
    facade: Facade, fields: Any, field: str
) -> None:
    if "token_ids" in fields:
        fields = {"text": None, **fields}
    error = await refusal(facade.inference.GenerateStream(streamed(**fields)))
    assert error.field == field


async def test_inference_refuses_fields_of_later_versions(facade: Facade) -> None:
    request = inference_pb2.GenerateRequest.FromString(
        streamed().SerializeToString() + b"\xf8\x07\x01"  # field 127
    )
    error = await refusal(facade.inference.GenerateStream(request))
    assert error.field == "127"


async def test_images_come_as_data_urls(tmp_path: Path) -> None:
    """Both protocols bring ids with one image token for each image."""
    model, image = write_whole(tmp_path / "tiny-llava", "llava"), png(40, 40, 1)
    flags = ("--model", str(model), "--dtype", "float32", "--kv-memory", "64MiB")
    async with running_service("engine", *flags, log=tmp_path / "engine.log") as engine:
        before = ("--model", str(model), "--engine", engine.target, "--vllm-api")
        async with (
            running_service("tokenizer", *before, log=tmp_path / "tokenizer.log") as service,
            connect(service.target) as channel,
            Client(service.target) as client,
        ):
            text = "<image>def a("
            answer = await client.generate(text, images=[image], temperature=0, max_tokens=6)
            ids = (await client.encode(text)).ids
            expected = list(answer.choices[0].token_ids)
            stub: Any = VllmEngineStub(channel)  # type: ignore[no-untyped-call]
            request = asked(stream=False, max_tokens=6)
            request.tokenized.input_ids.extend(ids)
            data = base64.b64encode(image).decode()
            request.media_refs.items.add(modality=1, url=f"data:image/png;base64,{data}")
            [whole] = [part async for part in stub.Generate(request)]
            assert whole.complete.output_ids == expected
            assert whole.complete.prompt_tokens == answer.usage.prompt_tokens > len(ids)
            server = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
            assert server.mm_media_ref_schemes == "data"
            for url, reason in (
                ("https://a/b.png", "NOT_IMPLEMENTED"),
                ("data:image/png;base64,!", "INVALID_FIELD"),
                ("data:image/png;base64,AAAA", "INVALID_FIELD"),
            ):
                request.media_refs.items[0].url = url
                error = await refusal(stub.Generate(request))
                assert (error.reason, error.field[:19]) == (reason, "media_refs.items[0]")
            inference: Any = InferenceStub(channel)
            streams = inference.GenerateStream(
                inference_pb2.GenerateRequest(
                    token_ids=inference_pb2.TokenIds(ids=ids),
                    media=[inference_pb2.MediaItem(raw_bytes=image)],
                    stopping=inference_pb2.StoppingCriteria(max_new_tokens=6),
                    response=inference_pb2.ResponseOptions(output_token_ids=True),
                )
            )
            parts = [part async for part in streams]
            assert [each for part in parts for each in part.outputs.token_ids] == expected


async def test_service_without_the_flag_serves_its_own_protocol_only(
    stack: Stack, tmp_path: Path
) -> None:
    flags = ("--model", str(stack.model), "--engine", stack.engine)
    async with (
        running_service("tokenizer", *flags, log=tmp_path / "log") as service,
        connect(service.target) as channel,
    ):
        stub: Any = VllmEngineStub(channel)  # type: ignore[no-untyped-call]
        error = await refusal(stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest()))
    assert error.code is grpc.StatusCode.UNIMPLEMENTED


async def test_grammars_need_their_service_and_health_an_engine(
    embedded_model: Path, tmp_path: Path
) -> None:
    """smg looks at the status of the call of health alone."""
    async with mortal_engine(embedded_model) as engine:
        flags = ("--model", str(embedded_model), "--engine", engine.target, "--vllm-api")
        async with (
            running_service("tokenizer", *flags, log=tmp_path / "log") as service,
            connect(service.target) as channel,
        ):
            await _assert_grammars_are_refused(channel)
            await _assert_health_follows(channel, engine)


async def _assert_grammars_are_refused(channel: grpc.aio.Channel) -> None:
    vllm: Any = VllmEngineStub(channel)  # type: ignore[no-untyped-call]
    inference: Any = InferenceStub(channel)
    request = make_request(PROMPT, grammar=types.GrammarSpec(regex="a"))
    for call, field in (
        (CompletionServiceStub(channel).Generate(request), "grammar"),
        (vllm.Generate(asked(regex="a")), "sampling_params.regex"),
        (inference.GenerateStream(streamed(decoding={"regex": "a"})), "decoding.regex"),
    ):
        error = await refusal(call)
        assert (error.code, error.field) == (grpc.StatusCode.UNIMPLEMENTED, field)


async def _assert_health_follows(channel: grpc.aio.Channel, engine: MortalEngine) -> None:
    stub: Any = VllmEngineStub(channel)  # type: ignore[no-untyped-call]
    await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    await engine.kill()
    async with asyncio.timeout(HANG_SECONDS):
        while (code := await _health_code(stub)) is grpc.StatusCode.OK:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert code is grpc.StatusCode.UNAVAILABLE


async def _health_code(stub: Any) -> grpc.StatusCode:
    call = stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    return cast(grpc.StatusCode, await call.code())
