"""Parts of an answer: the same ones however its deltas arrive, with each step told once."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.http_shim.dialects.custom_tools import arguments_of
from services.http_shim.dialects.parts import (
    Change,
    Part,
    PartAssembler,
    PartKind,
    Step,
    parts_of,
)
from tests.unit.http_shim.synthetic import call_delta, chat_delta, input_of
from tokenwire.pb.completion.v1 import completion_pb2

Deltas = list[completion_pb2.ChoiceDelta]
Shown = tuple[PartKind, str, int, str, str]
"""Kind, text, index, id and name of a part"""
TEXT, REASONING = PartKind.TEXT, PartKind.REASONING
CALL, CUSTOM_CALL = PartKind.CALL, PartKind.CUSTOM_CALL
CUSTOM = frozenset({"shell"})
TEXTS = st.text(max_size=6)
INPUTS = TEXTS | st.text(alphabet='"\\{}:é😀 input', max_size=12)


def shown(parts: list[Part]) -> list[Shown]:
    return [(part.kind, part.text, part.index, part.call_id, part.name) for part in parts]


def pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=3).map(sorted))
    return [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]


@st.composite
def answers(draw: st.DrawFn) -> tuple[Deltas, list[Shown]]:
    """Draw the deltas of an answer, and the parts that they have in the end."""
    kinds = draw(st.lists(st.sampled_from(PartKind), max_size=6))
    deltas: Deltas = []
    parts: list[Shown] = []
    calls = 0
    for kind in kinds:
        if kind in (CALL, CUSTOM_CALL):
            name, identity = ("f" if kind is CALL else "shell"), f"call_{calls}"
            is_json = kind is CUSTOM_CALL and draw(st.booleans())
            arguments = draw(INPUTS)
            arguments = arguments_of(arguments) if is_json else arguments
            first, *rest = pieces(draw, arguments)
            fragments = [call_delta(calls, identity=identity, name=name, arguments=first)]
            fragments += [call_delta(calls, arguments=piece) for piece in rest]
            if draw(st.booleans()):
                deltas.append(chat_delta(calls=fragments))
            else:
                deltas += [chat_delta(calls=[fragment]) for fragment in fragments]
            text = arguments if kind is CALL else input_of(arguments)
            parts.append((kind, text, calls, identity, name))
            calls += 1
            continue
        text = draw(TEXTS)
        field = "content" if kind is TEXT else "reasoning"
        deltas += [chat_delta(**{field: piece}) for piece in pieces(draw, text)]  # type: ignore[arg-type]
        if text and parts and parts[-1][0] is kind:
            text = parts.pop()[1] + text
        if text:
            parts.append((kind, text, 0, "", ""))
    return deltas, parts


def divided(draw: st.DrawFn, deltas: Deltas) -> list[Deltas]:
    """Divide deltas into those of several reads, of which some may have none."""
    cuts = draw(st.lists(st.integers(0, len(deltas)), max_size=6).map(sorted))
    return [deltas[begin:end] for begin, end in pairwise([0, *cuts, len(deltas)])]


@st.composite
def read_answers(draw: st.DrawFn) -> tuple[list[Deltas], list[Shown]]:
    deltas, parts = draw(answers())
    return divided(draw, deltas), parts


def changes_of(reads: list[Deltas]) -> tuple[PartAssembler, list[Change]]:
    assembler = PartAssembler(CUSTOM)
    changes = [change for read in reads for change in assembler.add(read)]
    return assembler, changes + list(assembler.close())


@given(read_answers())
def test_any_division_of_the_deltas_gives_the_same_parts(
    answer: tuple[list[Deltas], list[Shown]],
) -> None:
    """A slow client of a stream, and one that asks for the whole answer, get the same."""
    reads, parts = answer
    assembler, _ = changes_of(reads)
    assert shown(assembler.parts) == parts
    assert shown(parts_of([delta for read in reads for delta in read], CUSTOM)) == parts


@given(read_answers())
def test_each_part_opens_grows_and_closes_before_the_next(
    answer: tuple[list[Deltas], list[Shown]],
) -> None:
    """The texts of the steps join to the part's, and clients see one part at a time."""
    reads, parts = answer
    assembler, changes = changes_of(reads)
    joined: list[str] = []
    is_open = False
    for change in changes:
        match change.step:
            case Step.OPENED:
                assert not is_open
                is_open = True
                joined.append("")
            case Step.GROWN:
                assert is_open
                assert change.text
                joined[-1] += change.text
            case Step.CLOSED:
                assert is_open
                is_open = False
        assert change.part is assembler.parts[len(joined) - 1]
    assert not is_open
    assert joined == [part[1] for part in parts]
    assert not list(assembler.close()), "an answer ends once"


@given(read_answers())
def test_steps_of_text_have_the_deltas_of_their_text(
    answer: tuple[list[Deltas], list[Shown]],
) -> None:
    """The scores of an answer's tokens are in them; each is told once."""
    reads, _ = answer
    _, changes = changes_of(reads)
    for kind, field in ((TEXT, "text"), (REASONING, "reasoning")):
        told = [delta for change in changes if change.part.kind is kind for delta in change.deltas]
        assert told == [delta for read in reads for delta in read if getattr(delta, field)]
        for change in changes:
            if change.step is Step.GROWN and change.part.kind is kind:
                assert "".join(getattr(each, field) for each in change.deltas) == change.text


def steps(*deltas: completion_pb2.ChoiceDelta) -> list[tuple[Step, PartKind, str]]:
    """Return the steps of deltas that are read at once."""
    return [(each.step, each.part.kind, each.text) for each in changes_of([list(deltas)])[1]]


def test_neighbours_of_one_kind_are_one_step() -> None:
    """A slow client gets one event for them."""
    found = steps(
        chat_delta(reasoning="a"),
        chat_delta(reasoning="b"),
        chat_delta("c", reasoning="x"),
        chat_delta(),
        chat_delta("d"),
    )
    assert found == [
        (Step.OPENED, REASONING, ""),
        (Step.GROWN, REASONING, "abx"),
        (Step.CLOSED, REASONING, ""),
        (Step.OPENED, TEXT, ""),
        (Step.GROWN, TEXT, "cd"),
        (Step.CLOSED, TEXT, ""),
    ]


def test_text_is_told_before_the_call_that_follows_it() -> None:
    found = steps(chat_delta("a"), chat_delta("b", calls=[call_delta(name="f", arguments="{}")]))
    assert found == [
        (Step.OPENED, TEXT, ""),
        (Step.GROWN, TEXT, "ab"),
        (Step.CLOSED, TEXT, ""),
        (Step.OPENED, CALL, ""),
        (Step.GROWN, CALL, "{}"),
        (Step.CLOSED, CALL, ""),
    ]


def test_start_of_a_call_and_its_arguments_are_steps_of_their_own() -> None:
    """Clients read the name from the first, and join the texts of the others."""
    found = steps(
        chat_delta(calls=[call_delta(identity="c", name="f", arguments='{"a"')]),
        chat_delta(calls=[call_delta(arguments=":1}"), call_delta(1, identity="d", name="f")]),
    )
    assert found == [
        (Step.OPENED, CALL, ""),
        (Step.GROWN, CALL, '{"a"'),
        (Step.GROWN, CALL, ":1}"),
        (Step.CLOSED, CALL, ""),
        (Step.OPENED, CALL, ""),
        (Step.CLOSED, CALL, ""),
    ]


def test_input_of_a_custom_tool_is_read_as_far_as_it_is_certain() -> None:
    arguments = json.dumps({"input": "ls é"})
    found = steps(
        *(
            chat_delta(calls=[call_delta(name="" if index else "shell", arguments=piece)])
            for index, piece in enumerate([arguments[:4], arguments[4:14], arguments[14:]])
        )
    )
    assert "".join(text for _, _, text in found) == "ls é"
    assert [step for step, _, _ in found] == [Step.OPENED, Step.GROWN, Step.GROWN, Step.CLOSED]
    assert {kind for _, kind, _ in found} == {CUSTOM_CALL}


def test_input_of_another_form_is_told_before_the_next_part() -> None:
    """Only the end of the call says that it is not JSON."""
    found = steps(
        chat_delta(calls=[call_delta(name="shell", arguments="p")]),
        chat_delta(calls=[call_delta(arguments="wd")]),
        chat_delta("done"),
    )
    assert found == [
        (Step.OPENED, CUSTOM_CALL, ""),
        (Step.GROWN, CUSTOM_CALL, "pwd"),
        (Step.CLOSED, CUSTOM_CALL, ""),
        (Step.OPENED, TEXT, ""),
        (Step.GROWN, TEXT, "done"),
        (Step.CLOSED, TEXT, ""),
    ]


def test_arguments_that_come_with_later_text_belong_to_their_call() -> None:
    """A step of several tokens may end a call and begin a text."""
    deltas = [
        chat_delta(calls=[call_delta(identity="c", name="f", arguments="{")]),
        chat_delta("Bye", calls=[call_delta(arguments='"a": 1}')]),
    ]
    assert shown(parts_of(deltas)) == [
        (CALL, '{"a": 1}', 0, "c", "f"),
        (TEXT, "Bye", 0, "", ""),
    ]


def test_arguments_of_calls_that_alternate_stay_apart() -> None:
    names = {0: "f", 1: "g"}
    starts = [
        chat_delta(calls=[call_delta(index, identity=name, name=name, arguments="{")])
        for index, name in names.items()
    ]
    ends = [chat_delta(calls=[call_delta(index, arguments="}")]) for index in names]
    assert shown(parts_of(starts + ends)) == [(CALL, "{}", 0, "f", "f"), (CALL, "{}", 1, "g", "g")]
