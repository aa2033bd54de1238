"""Conversations without their oldest messages, for prompts that exceed the context."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["KeptMessages", "shorter_conversations"]

_INSTRUCTIONS = (completion_pb2.ROLE_SYSTEM, completion_pb2.ROLE_DEVELOPER)


@dataclass(frozen=True, slots=True)
class KeptMessages:
    """Messages that are kept, by index: the instructions, one question, and the last messages."""

    instructions: int
    """Number of messages with instructions at the start"""
    question: int | None
    """Index of the kept question of the user; None = the last messages contain it"""
    start: int
    """Index of the first of the last messages"""

    def indices(self, count: int) -> Iterator[int]:
        """Yield the indices of kept messages out of `count`."""
        yield from range(self.instructions)
        if self.question is not None:
            yield self.question
        yield from range(self.start, count)


def shorter_conversations(messages: Sequence[completion_pb2.Message]) -> list[KeptMessages]:
    """Return ways to shorten a conversation, from the whole to the shortest.

    The instructions at the start stay. What is left begins with a message of the user: the turns
    before it are left out, then what follows the last question. Calls and the messages that answer
    them are left out together.
    """
    first = next(
        (i for i, each in enumerate(messages) if each.role not in _INSTRUCTIONS), len(messages)
    )
    splits = _splits(messages)
    asked, answers = (
        [i for i in range(first, len(messages)) if messages[i].role == role]
        for role in (completion_pb2.ROLE_USER, completion_pb2.ROLE_ASSISTANT)
    )
    turns = [first, *(start for start in asked if start > first and not splits[start])]
    kept = [KeptMessages(first, None, start) for start in turns]
    for start in answers:
        before = bisect_left(asked, start)
        question = asked[before - 1] if before else None
        if start > turns[-1] and not splits[start] and question != start - 1:
            kept.append(KeptMessages(first, question, start))
    return kept


def _splits(messages: Sequence[completion_pb2.Message]) -> list[bool]:
    """Return for each message whether a start there parts a call from its answer."""
    called: dict[str, int] = {}
    changes = [0] * (len(messages) + 1)
    for index, message in enumerate(messages):
        for call in message.tool_calls:
            called[call.id] = index
        if message.role == completion_pb2.ROLE_TOOL and message.tool_call_id in called:
            changes[called[message.tool_call_id] + 1] += 1
            changes[index + 1] -= 1
    open_calls, splits = 0, []
    for change in changes[:-1]:
        open_calls += change
        splits.append(open_calls > 0)
    return splits
