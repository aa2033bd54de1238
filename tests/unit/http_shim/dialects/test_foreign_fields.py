"""Unsupported fields of other servers are refused unless their value has no effect."""

import pytest

from services.http_shim.dialects.chat.read import read_chat
from services.http_shim.dialects.chat.types import ChatBody
from services.http_shim.dialects.completions.read import read_completion
from services.http_shim.dialects.completions.types import CompletionBody
from services.http_shim.dialects.generation import GenerationBody
from services.http_shim.documentation.openapi import document
from tokenwire.errors import ServiceError

BODIES = [CompletionBody, ChatBody]


def ignored(kind: type[GenerationBody], **fields: object) -> list[str]:
    if kind is CompletionBody:
        return read_completion({"prompt": "x"} | fields).ignored
    return read_chat({"messages": []} | fields).ignored


@pytest.mark.parametrize("kind", BODIES)
def test_neutral_values_are_accepted(kind: type[GenerationBody]) -> None:
    """Known fields are not reported as ignored."""
    for name, field in kind.foreign.items():
        for value in (None, *field.neutral):
            assert ignored(kind, **{name: value}) == []


@pytest.mark.parametrize("kind", BODIES)
def test_values_with_an_effect_are_refused(kind: type[GenerationBody]) -> None:
    for name, field in kind.foreign.items():
        with pytest.raises(ServiceError) as caught:
            ignored(kind, **{name: "something else"})
        assert caught.value.field == name
        assert field.effect in caught.value.message
        assert field.remedy in caught.value.message


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"num_beams": 2}),
        (ChatBody, {"modalities": ["text", "audio"]}),
        (ChatBody, {"web_search_options": {}}),
        (ChatBody, {"length_penalty": 0.9}),
        (ChatBody, {"best_of": 2}),
        (ChatBody, {"add_special_tokens": True}),
        (CompletionBody, {"add_special_tokens": False}),
    ],
)
def test_example_values_are_refused(kind: type[GenerationBody], fields: dict[str, object]) -> None:
    with pytest.raises(ServiceError) as caught:
        ignored(kind, **fields)
    assert caught.value.field == next(iter(fields))


@pytest.mark.parametrize("kind", BODIES)
def test_supported_fields_are_not_in_the_table(kind: type[GenerationBody]) -> None:
    assert not kind.foreign.keys() & set(kind.__struct_fields__)


def test_unknown_fields_are_reported() -> None:
    assert ignored(CompletionBody, nobody_knows=1, num_beams=1) == ["nobody_knows"]


@pytest.mark.parametrize("kind", BODIES)
def test_document_lists_the_accepted_values(kind: type[GenerationBody]) -> None:
    documented = document()["components"]["schemas"][kind.__name__]["properties"]
    for name, field in kind.foreign.items():
        assert documented[name]["enum"] == [None, *field.neutral]
