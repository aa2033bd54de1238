"""Images in prompts: marks in texts and in ids, and their counts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.tokenizer.images.checkpoints import KINDS, Seeing
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.types.v1 import types_pb2 as types

_SIZES = [(20, 40), (40, 20), (30, 30)]


def _text(text: str) -> completion.Prompt:
    return completion.Prompt(text=text)


def _ids(ids: list[int]) -> completion.Prompt:
    return completion.Prompt(token_ids=types.TokenIds(ids=ids))


def _whole(checkpoint: Seeing, text: str, sizes: list[tuple[int, int]]) -> list[int]:
    """Return the ids of a text prompt with images."""
    [placed] = checkpoint.expander(*sizes).place([_text(text)])
    return placed.lengthen(checkpoint.vocabulary.encode(placed.text))[0]


def _refusal(
    checkpoint: Seeing, sizes: list[tuple[int, int]], *prompts: completion.Prompt
) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        checkpoint.expander(*sizes).place(prompts)
    assert caught.value.field == "prompts.images"
    return caught.value


@pytest.mark.parametrize("name", KINDS)
@given(order=st.lists(st.booleans(), min_size=3, max_size=3))
@settings(max_examples=8)
def test_marks_in_ids_become_what_they_become_in_text(
    checkpoints: dict[str, Seeing], name: str, order: list[bool]
) -> None:
    """A client may send ids that its own processor expanded, or did not."""
    kind, checkpoint = KINDS[name], checkpoints[name]
    expected = _whole(checkpoint, "a".join(["", *[kind.mark] * 3, ""]), _SIZES)
    begin = checkpoint.vocabulary.encode("a")
    mark = checkpoint.vocabulary.encode(kind.mark, add_special_tokens=False)
    letter = checkpoint.vocabulary.encode(f"{kind.mark}a", add_special_tokens=False)[len(mark) :]
    ids = list(begin)
    for size, is_whole in zip(_SIZES, order, strict=True):
        one = _whole(checkpoint, f"a{kind.mark}a", [size])
        ids += [*one[len(begin) : -len(letter)], *letter] if is_whole else [*mark, *letter]
    [placed] = checkpoint.expander(*_SIZES).place([_ids(ids)])
    # a tokenizer may join line breaks around an image to the text's, and write spaces in between
    decode = checkpoint.vocabulary.decode
    texts = ["".join(decode(each, skip_special_tokens=False)) for each in (placed.ids, expected)]
    assert texts[0].replace(" ", "") == texts[1].replace(" ", "")
    assert placed.count == 3


@pytest.mark.parametrize("name", KINDS)
def test_ids_of_an_expanded_text_stay_as_they_are(
    checkpoints: dict[str, Seeing], name: str
) -> None:
    """A client that applied the model's processor gets the answer to these ids."""
    kind, checkpoint = KINDS[name], checkpoints[name]
    ids = _whole(checkpoint, f"a\n{kind.mark}\n{kind.mark}b", _SIZES[:2])
    [placed] = checkpoint.expander(*_SIZES[:2]).place([_ids(ids)])
    assert list(placed.ids) == ids


@pytest.mark.parametrize("name", KINDS)
def test_run_of_the_wrong_length_is_refused(checkpoints: dict[str, Seeing], name: str) -> None:
    """The model would see the rest of an image as text, or text as an image."""
    kind, checkpoint = KINDS[name], checkpoints[name]
    ids = _whole(checkpoint, f"a{kind.mark}b", _SIZES[:1])
    place = ids.index(checkpoint.family.placeholder_id)
    longer = [*ids[:place], checkpoint.family.placeholder_id, *ids[place:]]
    _refusal(checkpoint, _SIZES[:1], _ids(longer))
    if ids.count(checkpoint.family.placeholder_id) > 2:
        _refusal(checkpoint, _SIZES[:1], _ids([*ids[:place], *ids[place + 1 :]]))


@pytest.mark.parametrize("name", KINDS)
def test_images_go_to_the_prompts_in_order(checkpoints: dict[str, Seeing], name: str) -> None:
    """A prompt with another's image gets an answer about that."""
    kind, checkpoint = KINDS[name], checkpoints[name]
    mark = checkpoint.vocabulary.encode(kind.mark, add_special_tokens=False)
    expander = checkpoint.expander(*_SIZES)
    placed = expander.place([_text("a<image>"), _text("b"), _ids(mark), _text(f"{kind.mark}c")])
    assert [(image.prompt, image.data) for image in expander.messages(placed)] == [
        (0, b"0"), (2, b"1"), (3, b"2"),
    ]  # fmt: skip


def test_number_of_marks_must_be_that_of_the_images(checkpoints: dict[str, Seeing]) -> None:
    """Guesses about a missing image, or mark, would answer another question."""
    for checkpoint in checkpoints.values():
        error = _refusal(checkpoint, _SIZES[:1], _text("<image>"), _text("a<image>"))
        assert error.message == ("The prompts have 2 <image> marks, but the request has 1 image.")
        error = _refusal(checkpoint, _SIZES[:2], _text("<image>"))
        assert error.message == ("The prompts have 1 <image> mark, but the request has 2 images.")
        error = _refusal(checkpoint, _SIZES[:1], _ids(checkpoint.vocabulary.encode("a")))
        assert "0 image marks" in error.message


@pytest.mark.parametrize("name", ["gemma3", "gemma3, bytes"])
def test_placeholder_beside_the_images_is_refused(
    checkpoints: dict[str, Seeing], name: str
) -> None:
    """The engine would take it for a part of the image."""
    checkpoint = checkpoints[name]
    [placed] = checkpoint.expander(_SIZES[0]).place([_text("<image><image_soft_token>")])
    with pytest.raises(ServiceError, match="<image_soft_token>") as caught:
        placed.lengthen(checkpoint.vocabulary.encode(placed.text))
    assert caught.value.field == "prompts.images"
    soft = checkpoint.family.placeholder_id
    mark = checkpoint.vocabulary.ids["<start_of_image>"]
    _refusal(checkpoint, _SIZES[:1], _ids([soft, mark]))
    _refusal(checkpoint, _SIZES[:1], _ids([mark, soft, soft]))
