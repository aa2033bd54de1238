"""Masks of the grammar service: output that satisfies its grammar, drafts, forks, resumption."""

import json
import re
from collections.abc import Callable

import grpc
import jsonschema
import pytest
from tokenizers import Tokenizer

from services.engine.frontend.mask_stream import GrammarClient
from tests.services.grammar.mask_client import PERSON, Decoder
from tokenwire.errors import ServiceError
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.grammar.v1.grammar_pb2_grpc import GrammarServiceStub
from tokenwire.pb.types.v1.types_pb2 import ChoiceList, GrammarSpec, JsonObject

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


async def test_resumed_matcher_reaches_the_state_of_one_that_took_each_token(
    channel: grpc.aio.Channel, tokenizer: Tokenizer
) -> None:
    grammar_id = await GrammarClient(channel).compile(GrammarSpec(json_schema=json.dumps(PERSON)))
    decoder = Decoder.over(channel, tokenizer)
    ids = (await decoder.generate(grammar_id, [5]))[5]
    await decoder.stream.aclose()
    half = len(ids) // 2
    command, opened = grammar_pb2.MatcherCommand, grammar_pb2.MatcherOpen
    accept = grammar_pb2.MatcherAccept
    commands = [
        command(matcher=1, open=opened(grammar_id=grammar_id, eos_token_ids=[0])),
        command(matcher=1, accept=accept(ids=ids[:half])),
        command(
            matcher=2,
            open=opened(grammar_id=grammar_id, eos_token_ids=[0], generated=ids[:half]),
        ),
        command(matcher=3, accept=accept(ids=ids[:1])),
    ]
    call = GrammarServiceStub(channel).Masks()
    configuration = grammar_pb2.MasksConfiguration(vocabulary_size=decoder.width)
    await call.write(
        grammar_pb2.MasksRequest(configuration=configuration, commands=commands, step=7)
    )
    response = await call.read()
    assert isinstance(response, grammar_pb2.MasksResponse)
    call.cancel()
    assert response.step == 7
    assert [state.matcher for state in response.states] == [1, 2, 3]
    stepped, resumed, unknown = response.states
    resumed.matcher = stepped.matcher
    assert stepped == resumed
    assert ServiceError.from_status(unknown.error).reason == "MATCHER_NOT_FOUND"


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


async def test_mask_stream_without_vocabulary_size_is_refused(channel: grpc.aio.Channel) -> None:
    call = GrammarServiceStub(channel).Masks()
    await call.write(grammar_pb2.MasksRequest(step=1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = ServiceError.from_rpc_error(caught.value)
    assert error.field == "configuration.vocabulary_size"
