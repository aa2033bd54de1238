"""Start commands that become of the client's options."""

import pytest

from tokenwire.messages import Message
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.requests import text_start, with_image_marks

WHOLE = completion_pb2.DELIVERY_WHOLE


@pytest.mark.parametrize(
    ("prompt", "images", "marked"),
    [
        ("What?", 2, "<image><image>What?"),
        ("A <image> here", 1, "A <image> here"),
        ("A <image> here", 2, "A <image> here"),  # the server says that one is missing
        ("What?", 0, "What?"),
    ],
)
def test_prompt_without_marks_gets_one_for_each_image(
    prompt: str, images: int, marked: str
) -> None:
    """A command line needs no marks; a prompt with marks stays as its author wrote it."""
    assert with_image_marks(prompt, images) == marked


def test_images_are_sent_unchanged() -> None:
    data = [b"\x89PNG\0", b"\xff\xd8"]
    start = text_start("<image><image>", {"images": data}, WHOLE)
    assert list(start.request.prompts.images) == data


def test_images_of_a_message_stand_before_its_text() -> None:
    """Most templates expect this order."""
    message = Message("user", "What?", images=[b"\x89PNG\0", b"\xff\xd8"])
    [written] = text_start([message], {}, WHOLE).request.conversation.messages
    assert [part.image or part.text for part in written.parts] == [
        b"\x89PNG\0", b"\xff\xd8", "What?",
    ]  # fmt: skip
    assert "PNG" not in repr(message), "logs must not show images"
