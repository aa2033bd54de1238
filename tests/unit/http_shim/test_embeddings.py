"""Bodies of requests for vectors."""

import msgspec
import pytest

from services.http_shim.vectors.embeddings import PoolingBody, unused_fields

CHAT = {"chat_template": "x", "add_generation_prompt": False, "prompt_name": "query"}


@pytest.mark.parametrize(
    ("input_fields", "unused"),
    [
        ({"input": "a"}, ["chat_template", "add_generation_prompt"]),
        ({"messages": [{"role": "user", "content": "a"}]}, ["prompt_name"]),
    ],
)
def test_fields_of_the_other_kind_of_input_are_listed(
    input_fields: dict[str, object], unused: list[str]
) -> None:
    body = msgspec.convert({**CHAT, **input_fields}, PoolingBody)
    assert unused_fields(body) == unused
