"""Shortened conversations: what stays together, and what stays at all."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.chat.dropped_messages import shorter_conversations
from tokenwire.pb.completion.v1 import completion_pb2

SYSTEM, USER, ASSISTANT, TOOL = (
    completion_pb2.ROLE_SYSTEM,
    completion_pb2.ROLE_USER,
    completion_pb2.ROLE_ASSISTANT,
    completion_pb2.ROLE_TOOL,
)


def message(role: completion_pb2.Role.ValueType, call: int | None) -> completion_pb2.Message:
    made = completion_pb2.Message(role=role)
    if call is not None and role == ASSISTANT:
        made.tool_calls.add(id=str(call), name="f")
    elif call is not None and role == TOOL:
        made.tool_call_id = str(call)
    return made


MESSAGES = st.lists(
    st.builds(
        message, st.sampled_from([SYSTEM, USER, ASSISTANT, TOOL]), st.integers(0, 3) | st.none()
    ),
    min_size=1,
    max_size=24,
)


@given(MESSAGES)
def test_each_way_leaves_out_more_and_keeps_what_belongs_together(
    messages: list[completion_pb2.Message],
) -> None:
    ways = [[*way.indices(len(messages))] for way in shorter_conversations(messages)]
    assert ways[0] == [*range(len(messages))]
    for longer, shorter in pairwise(ways):
        assert set(shorter) < set(longer)
    instructions = next((i for i, each in enumerate(messages) if each.role != SYSTEM), None)
    questions = [i for i, each in enumerate(messages) if each.role == USER]
    for way in ways:
        assert way == sorted(way)
        assert way[-1] == len(messages) - 1
        assert set(range(instructions or 0)) <= set(way)
        for place, index in enumerate(way):
            called = {call.id for i in way[:place] for call in messages[i].tool_calls}
            before = {call.id for each in messages[:index] for call in each.tool_calls}
            if messages[index].role == TOOL:
                answered = messages[index].tool_call_id
                assert answered in called or answered not in before
    assert not questions or any(i in ways[-1] for i in questions)


def test_turns_go_before_the_steps_of_the_last_one() -> None:
    messages = [
        message(SYSTEM, None),
        *(message(USER, None), message(ASSISTANT, 1), message(TOOL, 1), message(ASSISTANT, None)),
        *(message(USER, None), message(ASSISTANT, 2), message(TOOL, 2)),
        *(message(ASSISTANT, 3), message(TOOL, 3)),
    ]
    assert [[*way.indices(10)] for way in shorter_conversations(messages)] == [
        [*range(10)],
        [0, 5, 6, 7, 8, 9],
        [0, 5, 8, 9],
    ]


def test_last_question_stays_where_it_stands_between_a_call_and_its_result() -> None:
    messages = [
        *(message(USER, None), message(ASSISTANT, None)),
        *(message(ASSISTANT, 1), message(USER, None), message(TOOL, 1), message(ASSISTANT, None)),
    ]
    assert [[*way.indices(6)] for way in shorter_conversations(messages)] == [
        [*range(6)],
        [0, 2, 3, 4, 5],
        [3, 5],
    ]
