"""Messages arrive complete, however their bytes are split."""

from services.engine.framing import Unpacker, pack
from services.engine.messages import (
    CacheFlushed,
    DraftTokens,
    LoadSnapshot,
    Output,
    Score,
    StepOutput,
    Token,
)


def test_pieces_of_any_size_give_the_same_messages() -> None:
    messages = ["first", list(range(1000)), ""]
    data = b"".join(map(pack, messages))
    for size in (1, 7, len(pack("first")), len(data)):
        unpacker = Unpacker()
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        assert [message for piece in pieces for message in unpacker.feed(piece)] == messages


def test_step_output_keeps_its_values_and_types() -> None:
    scored = Token(1, 0, 7, 42, Score(-0.5, 1, [42], [-0.5]), 2.5)
    plain = Token(1, 0, 6, 41, None)
    outputs: list[Output] = [plain, DraftTokens(1, 0, [3]), CacheFlushed(2), scored]
    step = StepOutput(outputs, LoadSnapshot(running=3))
    [message] = Unpacker().feed(pack(step))
    assert message == step
    assert [type(item) for item in message.outputs] == [type(item) for item in outputs]
    assert (type(message), type(message.load)) == (StepOutput, LoadSnapshot)
