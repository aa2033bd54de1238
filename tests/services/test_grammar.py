"""Grammar service over gRPC: compilation, masks, limits and loss."""

import asyncio
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import jsonschema
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from services.common.interceptor import RpcInterceptor
from services.engine.frontend.mask_stream import GrammarClient, MaskState, MaskStream
from services.grammar import GrammarError
from services.grammar.application import GrammarApplication, GrammarSettings
from services.grammar.compiling.compiler import Compiler
from tokenwire.channel import MESSAGE_LIMITS, connect
from tokenwire.errors import ServiceError
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.grammar.v1.grammar_pb2_grpc import GrammarServiceStub
from tokenwire.pb.types.v1.types_pb2 import ChoiceList, GrammarSpec, JsonObject

PADDING = 5  # logits wider than the tokenizer, as many checkpoints have
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    },
    "required": ["name", "age", "kind", "tags", "code"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a small byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [Path(json.__file__).read_text(), json.dumps(PERSON), Path(re.__file__).read_text()]
    tokenizer.train_from_iterator(text, trainer)
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    return directory


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


@pytest_asyncio.fixture(scope="session")
async def address(checkpoint: Path) -> AsyncIterator[str]:
    """Yield the host:port of a grammar service."""
    application = GrammarApplication(
        GrammarSettings(model=checkpoint, compile_timeout=3.0, max_grammar_bytes=300_000)
    )
    server = grpc.aio.server(options=MESSAGE_LIMITS, interceptors=[RpcInterceptor()])
    application.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await application.start()
    yield f"127.0.0.1:{port}"
    await application.stop()
    await server.stop(None)


@pytest_asyncio.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(address) as channel:
        yield channel


@dataclass
class Decoder:
    """Client in place of the engine: it draws among the allowed ids and feeds them back."""

    stream: MaskStream
    states: asyncio.Queue[list[MaskState]]
    lost: asyncio.Queue[ServiceError]
    width: int

    @classmethod
    def over(cls, channel: grpc.aio.Channel, tokenizer: Tokenizer, slots: int = 1024) -> "Decoder":
        states, lost = asyncio.Queue[list[MaskState]](), asyncio.Queue[ServiceError]()
        width = tokenizer.get_vocab_size() + PADDING
        stream = MaskStream(
            channel,
            vocabulary_size=width,
            eos_token_ids=[0],
            on_states=states.put_nowait,
            on_lost=lost.put_nowait,
            answer_seconds=60,
            mask_slots=slots,
        )
        return cls(stream, states, lost, width)

    def allowed(self, state: MaskState) -> list[int]:
        assert state.error is None, state.error
        if state.mask is None:
            return list(range(self.width))
        assert len(state.mask) == (self.width + 7) // 8
        ids = [i for i in range(len(state.mask) * 8) if state.mask[i >> 3] >> (i & 7) & 1]
        assert not ids or ids[-1] < self.width - PADDING
        assert 1 not in ids  # the checkpoint's other EOS id, which this client does not use
        return ids

    async def generate(
        self, grammar_id: str, seeds: Sequence[int], most: int = 400
    ) -> dict[int, list[int]]:
        """Return the ids of one sequence per seed: up to its grammar's end, or `most` ids."""
        sources = {seed: random.Random(seed) for seed in seeds}
        output: dict[int, list[int]] = {seed: [] for seed in seeds}
        for seed in seeds:
            self.stream.open(seed, grammar_id, [])
        running = set(seeds)
        while running:
            for state in await self.states.get():
                ids, output_ids = self.allowed(state), output[state.matcher]
                output_ids += state.forced
                if not state.terminated and len(output_ids) < most:
                    assert ids
                    token = sources[state.matcher].choice(ids)
                    if token != 0:
                        output_ids.append(token)
                        self.stream.accept(state.matcher, [token])
                        continue
                running.discard(state.matcher)
                self.stream.close(state.matcher)
        return output


COLOURS = ["red", "green", "blue violet", 'qu"oted', "é😀"]
SATISFIED: dict[str, tuple[GrammarSpec, Callable[[str], object]]] = {
    "json_schema": (
        GrammarSpec(json_schema=json.dumps(PERSON)),
        lambda text: jsonschema.validate(json.loads(text), PERSON),
    ),
    "regex": (
        GrammarSpec(regex=r"[a-f]{3,8}(-[0-9é]{2}){1,3}"),
        lambda text: re.fullmatch(r"[a-f]{3,8}(-[0-9é]{2}){1,3}", text) or pytest.fail(text),
    ),
    "lark": (
        GrammarSpec(lark='start: "(" (start | /[xy]/) ")"\n'),
        lambda text: re.fullmatch(r"\(+[xy]\)+", text) or pytest.fail(text),
    ),
    "llguidance": (
        GrammarSpec(llguidance='{"grammars":[{"json_schema":{"type":"boolean"}}]}'),
        lambda text: isinstance(json.loads(text), bool) or pytest.fail(text),
    ),
    "choice": (
        GrammarSpec(choice=ChoiceList(choices=COLOURS)),
        lambda text: text in COLOURS or pytest.fail(text),
    ),
}


@pytest.mark.parametrize("kind", SATISFIED)
async def test_random_choices_among_allowed_ids_satisfy_the_grammar(
    kind: str, channel: grpc.aio.Channel, tokenizer: Tokenizer
) -> None:
    spec, judge = SATISFIED[kind]
    grammar_id = await GrammarClient(channel).compile(spec)
    decoder = Decoder.over(channel, tokenizer)
    for ids in (await decoder.generate(grammar_id, range(12))).values():
        judge(tokenizer.decode(ids))
    await decoder.stream.aclose()


async def test_json_object_grammar_yields_json_objects(
    channel: grpc.aio.Channel, tokenizer: Tokenizer
) -> None:
    grammar_id = await GrammarClient(channel).compile(GrammarSpec(json_object=JsonObject()))
    decoder = Decoder.over(channel, tokenizer)
    complete = 0
    for ids in (await decoder.generate(grammar_id, range(40), most=100)).values():
        if len(ids) < 100:  # random choices may never close their strings and brackets
            assert isinstance(json.loads(tokenizer.decode(ids)), dict)
            complete += 1
    assert complete
    await decoder.stream.aclose()


async def test_number_of_mask_slots_does_not_change_the_output(
    channel: grpc.aio.Channel, tokenizer: Tokenizer
) -> None:
    grammar_id = await GrammarClient(channel).compile(GrammarSpec(json_schema=json.dumps(PERSON)))
    outputs = []
    for slots in (0, 2, 1024):
        decoder = Decoder.over(channel, tokenizer, slots)
        outputs.append(await decoder.generate(grammar_id, range(8)))
        await decoder.stream.aclose()
    assert outputs[0] == outputs[1] == outputs[2]


async def test_resumed_sequence_gets_the_masks_of_the_original(
    channel: grpc.aio.Channel, tokenizer: Tokenizer
) -> None:
    grammar_id = await GrammarClient(channel).compile(GrammarSpec(json_schema=json.dumps(PERSON)))
    first, second = Decoder.over(channel, tokenizer), Decoder.over(channel, tokenizer)
    ids = (await first.generate(grammar_id, [3]))[3]
    for at in range(0, len(ids), 5):
        second.stream.open(at, grammar_id, ids[:at])
        [state] = await second.states.get()
        forced = list(state.forced)
        assert ids[at : at + len(forced)] == forced
        assert [*ids, 0][at + len(forced)] in second.allowed(state)
    await first.stream.aclose()
    await second.stream.aclose()


async def test_draft_masks_equal_the_masks_after_accepting_the_draft(
    channel: grpc.aio.Channel, tokenizer: Tokenizer
) -> None:
    grammar_id = await GrammarClient(channel).compile(GrammarSpec(json_schema=json.dumps(PERSON)))
    decoder, asking = Decoder.over(channel, tokenizer), Decoder.over(channel, tokenizer)
    ids = (await decoder.generate(grammar_id, [3]))[3]
    masks: dict[int, bytes | None] = {}  # by number of tokens fed, at positions without forced ids
    for at in range(len(ids)):
        decoder.stream.open(100 + at, grammar_id, ids[:at])
        [state] = await decoder.states.get()
        masks[at + len(state.forced)] = state.mask
    lengths = set[int]()
    for at in range(len(ids)):
        asking.stream.open(at, grammar_id, ids[:at])
        asking.stream.ask_draft_masks(at, [*ids[at : at + 6], 1, *ids[at + 6 : at + 9]])
        [state] = await asking.states.get()
        begin = at + len(state.forced) + 1
        # no masks after a draft token that the grammar refuses
        assert len(state.draft_masks) <= max(at + 6 - begin + 1, 0)
        for place, mask in enumerate(state.draft_masks, start=begin):
            # `masks` has no entry for a forced position: its draft mask allows one id
            assert mask == masks.get(place, mask)
            assert mask is None or mask[ids[place] >> 3] >> (ids[place] & 7) & 1
        lengths.add(len(state.draft_masks))
        # draft masks do not advance the matcher
        asking.stream.accept(at, ids[at + len(state.forced) :][:1])
        assert (await asking.states.get())[0].error is None
    assert max(lengths) == 6
    await decoder.stream.aclose()
    await asking.stream.aclose()


async def test_rollback_and_fork_reach_the_state_of_a_fresh_matcher(
    channel: grpc.aio.Channel, tokenizer: Tokenizer
) -> None:
    grammar_id = await GrammarClient(channel).compile(GrammarSpec(json_schema=json.dumps(PERSON)))
    decoder = Decoder.over(channel, tokenizer)
    ids = (await decoder.generate(grammar_id, [5]))[5]
    await decoder.stream.aclose()
    half = len(ids) // 2

    def commands() -> list[grammar_pb2.MatcherCommand]:
        command, opened = grammar_pb2.MatcherCommand, grammar_pb2.MatcherOpen
        accept, back = grammar_pb2.MatcherAccept, grammar_pb2.MatcherRollback
        start = opened(grammar_id=grammar_id, eos_token_ids=[0])
        resumed = opened(grammar_id=grammar_id, eos_token_ids=[0], generated=ids[:half])
        return [
            command(matcher=1, open=start),
            command(matcher=1, accept=accept(ids=[*ids, 0])),
            command(matcher=1, rollback=back(count=len(ids) + 1 - half)),
            command(matcher=1, fork=grammar_pb2.MatcherFork(into=2)),
            command(matcher=3, open=resumed),
            command(matcher=4, fork=grammar_pb2.MatcherFork(into=5)),
        ]

    call = GrammarServiceStub(channel).Masks()
    configuration = grammar_pb2.MasksConfiguration(vocabulary_size=decoder.width)
    await call.write(
        grammar_pb2.MasksRequest(configuration=configuration, commands=commands(), step=7)
    )
    response = await call.read()
    assert isinstance(response, grammar_pb2.MasksResponse)
    call.cancel()
    assert response.step == 7
    assert [state.matcher for state in response.states] == [1, 2, 3, 4]
    states = [state.SerializePartialToString() for state in response.states[:3]]
    for state in response.states[:3]:
        state.matcher = 0
    assert response.states[0] == response.states[1] == response.states[2]
    assert len(set(states)) == 3  # they differ only in the matcher's number
    unknown = ServiceError.from_status(response.states[3].error)
    assert unknown.reason == "MATCHER_NOT_FOUND"


async def test_failed_matcher_does_not_affect_others_of_its_stream(
    channel: grpc.aio.Channel, tokenizer: Tokenizer
) -> None:
    grammar_id = await GrammarClient(channel).compile(GrammarSpec(regex="[ab]{4}"))
    decoder = Decoder.over(channel, tokenizer)
    fits, misfit = tokenizer.encode("a").ids, tokenizer.encode("(").ids
    for matcher in (1, 2, 3, 4):
        decoder.stream.open(matcher, grammar_id, [])
    await decoder.states.get()
    decoder.stream.accept(1, fits)
    decoder.stream.accept(2, [*fits, *misfit])
    decoder.stream.accept(3, [decoder.width - 1])
    decoder.stream.accept(4, fits)
    decoder.stream.open(5, "no such grammar", [])
    decoder.stream.open(6, grammar_id, [])
    decoder.stream.ask_draft_masks(6, fits * 65)
    decoder.stream.ask_draft_masks(4, [*misfit, decoder.width])
    states = await decoder.states.get()
    assert [state.matcher for state in states] == [1, 2, 3, 4, 5, 6]
    assert states[3].draft_masks == ()
    assert states[5].error is not None
    assert "at most 64" in states[5].error.message
    assert decoder.allowed(states[0]) == decoder.allowed(states[3]) != []
    refused, outside, missing = states[1].error, states[2].error, states[4].error
    assert refused is not None
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "Token 1" in refused.message
    assert outside is not None
    assert "outside the vocabulary" in outside.message
    assert missing is not None
    assert missing.code is grpc.StatusCode.NOT_FOUND
    decoder.stream.accept(1, fits * 3)
    [state] = await decoder.states.get()
    assert state.terminated
    assert decoder.allowed(state) == [0]
    await decoder.stream.aclose()


BAD = {
    "syntax": (GrammarSpec(json_schema='{"type":'), "line 1, column 9"),
    "keyword": (GrammarSpec(json_schema='{"properties":{"a":{"extends":{}}}}'), "$.properties.a"),
    "logic": (
        GrammarSpec(json_schema='{"items":{"type":"string","not":{"format":"date"}}}'),
        "$.items",
    ),
    "pattern": (GrammarSpec(json_schema='{"items":{"pattern":"(a"}}'), "$.items.pattern"),
    "draft": (
        GrammarSpec(
            json_schema='{"$schema":"http://json-schema.org/draft-04/schema#","items":{"const":1}}'
        ),
        "$.items",
    ),
    "options": (GrammarSpec(json_schema='{"x-guidance":{"lenient":true}}'), "x-guidance"),
    "unsatisfiable": (GrammarSpec(json_schema='{"minimum":5,"maximum":3,"type":"integer"}'), "5"),
    "long": (
        GrammarSpec(json_schema=json.dumps({"properties": {"é" * 5000: {"extends": 1}}})),
        "not",
    ),
    "regex": (GrammarSpec(regex="a(b"), "unclosed group"),
    "long regex": (GrammarSpec(regex="\x01" * 9000 + "("), "unclosed group"),
    "lark": (GrammarSpec(lark='start: "a" foo'), "foo"),
    "llguidance": (GrammarSpec(llguidance='{"grammars":[]}'), "grammars"),
    "choice": (GrammarSpec(choice=ChoiceList()), "at least one"),
}


@pytest.mark.parametrize("case", BAD)
async def test_invalid_grammar_is_refused_with_field_and_position(
    case: str, channel: grpc.aio.Channel
) -> None:
    spec, place = BAD[case]
    with pytest.raises(ServiceError) as caught:
        await GrammarClient(channel).compile(spec)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.field == f"grammar.{spec.WhichOneof('spec')}"
    assert place in caught.value.message


def _chained_references(count: int) -> str:
    names = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return json.dumps({"$defs": {**names, f"d{count}": {}}, "$ref": "#/$defs/d0"})


def _optional_properties(count: int) -> str:
    return json.dumps(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}
    )


HOSTILE = {
    "overflows the stack": GrammarSpec(json_schema=_chained_references(1400)),
    "overflows the stack too": GrammarSpec(
        lark='start: r0\nr4000: "b"\n' + "".join(f'r{i}: "a" r{i + 1}?\n' for i in range(4000))
    ),
    "never ends": GrammarSpec(json_schema=_optional_properties(9000)),
    "no finite text": GrammarSpec(
        json_schema='{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}'
    ),
    "endless forced text": GrammarSpec(regex="((a{100}){100}){100}"),
    "catastrophic regex": GrammarSpec(regex=".*" * 500),
    "too large": GrammarSpec(json_schema=json.dumps({"enum": ["x" * 1_000_000]})),
    "too deep": GrammarSpec(json_schema="[" * 100_000),
    "huge product": GrammarSpec(
        json_schema=json.dumps(
            {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(8)]}
                       for i in range(12)]}
        )
    ),
}  # fmt: skip


async def test_hostile_grammars_do_not_affect_other_requests(
    channel: grpc.aio.Channel, tokenizer: Tokenizer
) -> None:
    client = GrammarClient(channel)
    healthy = await client.compile(GrammarSpec(json_schema=json.dumps(PERSON)))
    attacks = asyncio.gather(
        *(client.compile(spec) for spec in HOSTILE.values()), return_exceptions=True
    )
    decoder = Decoder.over(channel, tokenizer)
    output = await decoder.generate(healthy, range(16))
    assert all(json.loads(tokenizer.decode(ids)) for ids in output.values())
    await decoder.stream.aclose()
    refused = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    for name, result in zip(HOSTILE, await attacks, strict=True):
        assert isinstance(result, ServiceError), name
        assert result.code in refused, (name, result)
    assert await client.compile(GrammarSpec(regex="after all that"))


async def test_quick_grammars_compile_while_slow_ones_do(channel: grpc.aio.Channel) -> None:
    client = GrammarClient(channel)
    slow = [
        asyncio.ensure_future(
            client.compile(GrammarSpec(json_schema=_optional_properties(9000 + i)))
        )
        for i in range(3)
    ]
    await asyncio.sleep(0)
    await asyncio.gather(*(client.compile(GrammarSpec(regex=f"quick{i}")) for i in range(4)))
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)


async def test_grammar_that_exceeds_the_library_limits_fails_alone(
    channel: grpc.aio.Channel, tokenizer: Tokenizer
) -> None:
    client = GrammarClient(channel)
    # the number of continuations exceeds the library's limit, but only after the trial run
    names = [f"p{i}" for i in range(2500)]
    rules = "".join(f'{name}: "{name}"\n' for name in names)
    lark = f"start: /[a-z]{{60}}/ {' '.join(f'{name}?' for name in names)}\n{rules}"
    hopeless = await client.compile(GrammarSpec(lark=lark))
    healthy = await client.compile(GrammarSpec(json_schema=json.dumps(PERSON)))
    decoder = Decoder.over(channel, tokenizer)
    decoder.stream.open(99, hopeless, [])
    error: ServiceError | None = None
    for _ in range(61):
        [state] = await decoder.states.get()
        error = state.error
        if error is not None:
            break
        decoder.stream.accept(99, decoder.allowed(state)[:1])
    assert error is not None
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    output = await decoder.generate(healthy, range(4))
    assert all(json.loads(tokenizer.decode(ids)) for ids in output.values())
    await decoder.stream.aclose()


async def test_concurrent_requests_for_a_grammar_get_one_answer(channel: grpc.aio.Channel) -> None:
    stub = GrammarServiceStub(channel)
    request = grammar_pb2.CompileRequest(grammar=GrammarSpec(regex="same(again)?"))
    responses = await asyncio.gather(*(stub.Compile(request) for _ in range(5)))
    assert len({response.SerializeToString() for response in responses}) == 1


def _enumeration(first: int, count: int) -> GrammarSpec:
    words = [hashlib.sha256(str(first + i).encode()).hexdigest() for i in range(count)]
    return GrammarSpec(json_schema=json.dumps({"enum": words}))


async def test_size_of_a_compiled_grammar_grows_with_the_grammar(channel: grpc.aio.Channel) -> None:
    """The limit on the cache's memory counts these sizes."""
    stub = GrammarServiceStub(channel)
    sizes = []
    for spec in (GrammarSpec(regex="[ab]{7}"), _enumeration(0, 3000)):
        request = grammar_pb2.CompileRequest(grammar=spec)
        sizes.append((await stub.Compile(request)).size_bytes)
    small, large = sizes
    assert small < 1_000_000
    assert 10 * len(_enumeration(0, 3000).json_schema) < large


async def test_cache_evicts_grammars_when_its_memory_is_used_up(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    """An open matcher keeps its evicted grammar; a new one fails with GRAMMAR_NOT_FOUND."""
    application = GrammarApplication(GrammarSettings(model=checkpoint, cache_bytes=4_000_000))
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    application.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        client, decoder = GrammarClient(channel), Decoder.over(channel, tokenizer)
        first = await client.compile(GrammarSpec(regex="[ab]{3}"))
        decoder.stream.open(1, first, [])
        [state] = await decoder.states.get()
        large = await client.compile(_enumeration(0, 3000))
        await client.compile(_enumeration(3000, 3000))
        for number, gone in ((2, first), (3, large)):
            decoder.stream.open(number, gone, [])
            [missing] = await decoder.states.get()
            assert missing.error is not None
            assert missing.error.reason == "GRAMMAR_NOT_FOUND"
        for _ in range(3):
            decoder.stream.accept(1, decoder.allowed(state)[:1])
            [state] = await decoder.states.get()
        assert state.terminated
        decoder.stream.open(4, await client.compile(_enumeration(0, 3000)), [])
        assert decoder.allowed((await decoder.states.get())[0])
        await decoder.stream.aclose()
    await application.stop()
    await server.stop(None)


async def test_fingerprint_is_the_hash_of_the_tokenizer_file(
    channel: grpc.aio.Channel, checkpoint: Path
) -> None:
    request = grammar_pb2.CompileRequest(grammar=GrammarSpec(regex="a"))
    response = await GrammarServiceStub(channel).Compile(request)
    content = (checkpoint / "tokenizer.json").read_bytes()
    assert response.tokenizer_fingerprint == hashlib.sha256(content).hexdigest()


async def test_mask_stream_without_vocabulary_size_is_refused(channel: grpc.aio.Channel) -> None:
    call = GrammarServiceStub(channel).Masks()
    await call.write(grammar_pb2.MasksRequest(step=1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = ServiceError.from_rpc_error(caught.value)
    assert error.field == "configuration.vocabulary_size"


async def test_loss_of_the_service_is_reported_once_and_the_stream_reconnects(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    application = GrammarApplication(GrammarSettings(model=checkpoint))
    application.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        decoder, client = Decoder.over(channel, tokenizer), GrammarClient(channel)
        grammar_id = await client.compile(GrammarSpec(regex="[ab]+"))
        decoder.stream.open(1, grammar_id, [])
        await decoder.states.get()
        await server.stop(None)
        assert (await decoder.lost.get()).code is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(ServiceError) as caught:
            await client.compile(GrammarSpec(regex="a"))
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert caught.value.retry_seconds
        again = grpc.aio.server(interceptors=[RpcInterceptor()])
        application.register(again)
        again.add_insecure_port(f"127.0.0.1:{port}")
        await again.start()
        await channel.channel_ready()
        decoder.stream.open(2, grammar_id, [])
        [state] = await decoder.states.get()
        assert len(decoder.allowed(state)) > 1
        assert decoder.lost.empty()
        await decoder.stream.aclose()
        await again.stop(None)
    await application.stop()


async def test_killed_compile_process_is_logged_and_restarted(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A regular stop of the process logs nothing."""
    application = GrammarApplication(GrammarSettings(model=checkpoint))
    compiler = application._compiler
    await application.start()
    assert compiler._process is not None
    compiler._process.kill()
    await compiler._process.wait()
    assert compiler._reader is not None
    await compiler._reader
    lost = "the process that compiles grammars ended with signal SIGKILL"
    assert lost in caplog.messages
    assert await compiler.try_out(GrammarSpec(regex="a")) > 0
    with pytest.raises(GrammarError):
        await compiler.try_out(HOSTILE["overflows the stack"])
    # services of other tests log here too: they may still compile for disconnected clients
    assert any("compilation of a grammar ended with signal SIG" in line for line in caplog.messages)
    await application.stop()
    assert sum("the process that compiles" in line for line in caplog.messages) == 1


def test_missing_checkpoint_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "services.grammar", "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "tokenizer.json" in result.stderr


async def test_grammar_sent_during_the_start_shares_the_compile_process(checkpoint: Path) -> None:
    """Two readers of one pipe would take each other's results."""
    compiler = Compiler(checkpoint, timeout=5, concurrency=2)
    spec = GrammarSpec(regex="a")
    others = _compile_processes()
    try:
        _, size = await asyncio.gather(compiler.start(), compiler.try_out(spec))
        assert size
        assert len(_compile_processes()) == len(others) + 1
    finally:
        await compiler.stop()


def _compile_processes() -> list[int]:
    """Return the ids of this process's children that compile grammars."""
    own = f"/proc/{os.getpid()}"
    children = [
        int(child)
        for task in Path(own, "task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    module = "services.grammar.compiling.compile_process"
    return [pid for pid in children if module in Path(f"/proc/{pid}/cmdline").read_text()]
