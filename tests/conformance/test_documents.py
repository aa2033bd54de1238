"""PDFs and files in prompts, through the SDKs of Anthropic and OpenAI."""

import base64
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.pdfs import encrypted_pdf, pdf
from tests.stack import Stack

PAGES = ("Add two numbers", "and return them")
TEXT = "\n\n".join(PAGES)
QUESTION = {"type": "text", "text": "Why?"}


@pytest.fixture
def claude(stack: Stack) -> Anthropic:
    return Anthropic(base_url=stack.url, api_key="none", max_retries=0)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, media_type: str = "application/pdf") -> str:
    return f"data:{media_type};base64,{encoded(data)}"


def document(source: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **fields}


def from_base64(data: bytes) -> dict[str, Any]:
    return {"type": "base64", "media_type": "application/pdf", "data": encoded(data)}


def test_pdf_of_a_message_reads_as_its_text(claude: Anthropic) -> None:
    def asked(source: dict[str, Any]) -> tuple[int, str]:
        block: Any = document(source, title="Sum", citations={"enabled": True})
        messages: Any = [{"role": "user", "content": [block, QUESTION]}]
        count = claude.messages.count_tokens(model="default", messages=messages).input_tokens
        answer = claude.messages.create(
            model="default", max_tokens=8, messages=messages, extra_body={"temperature": 0}
        )
        usage = answer.usage
        assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        return count, answer.content[0].to_json()

    plain = asked({"type": "text", "media_type": "text/plain", "data": TEXT})
    assert asked(from_base64(pdf(*PAGES))) == plain
    assert asked({"type": "content", "content": TEXT}) == plain


def test_pdf_of_a_tools_result_is_read(claude: Anthropic) -> None:
    def count(source: dict[str, Any]) -> int:
        result = {"type": "tool_result", "tool_use_id": "t", "content": [document(source)]}
        messages: Any = [
            {"role": "user", "content": "Read it."},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "read", "input": {}}],
            },
            {"role": "user", "content": [result]},
        ]
        return claude.messages.count_tokens(model="default", messages=messages).input_tokens

    assert count(from_base64(pdf(*PAGES))) == count({"type": "text", "data": TEXT})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (from_base64(encrypted_pdf("a", "secret")), "encrypted"),
        (from_base64(pdf("")), "no text"),
        (from_base64(b"no PDF"), "no PDF"),
        ({"type": "base64", "media_type": "application/pdf", "data": "?"}, "base64"),
        ({"type": "base64", "media_type": "image/png", "data": "aaaa"}, "image/png"),
        ({"type": "base64"}, "data is required"),
        ({"type": "content"}, "content is required"),
        ({"type": "url", "url": "https://example.com/a.pdf"}, "fetches no documents"),
        ({"type": "file"}, "file_id is required"),
    ],
)
def test_unreadable_document_is_refused_with_the_reason(
    claude: Anthropic, source: dict[str, Any], said: str
) -> None:
    messages: Any = [{"role": "user", "content": [document(source)]}]
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model="default", max_tokens=4, messages=messages)
    assert said in str(refused.value)
    assert "messages[0].content[0].source" in str(refused.value)
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]"):
        claude.messages.count_tokens(model="default", messages=messages)


def chat(client: OpenAI, part: dict[str, Any]) -> tuple[int, str | None]:
    messages: Any = [{"role": "user", "content": [part, QUESTION]}]
    answer = client.chat.completions.create(
        model="default", messages=messages, max_tokens=8, temperature=0
    )
    assert answer.usage is not None
    return answer.usage.prompt_tokens, answer.choices[0].message.content


def file_part(**fields: Any) -> dict[str, Any]:
    return {"type": "file", "file": fields}


def test_file_of_a_chat_reads_as_its_text(client: OpenAI) -> None:
    plain = chat(client, {"type": "text", "text": f"sum.pdf\n\n{TEXT}"})
    name = {"filename": "sum.pdf"}
    assert chat(client, file_part(file_data=data_url(pdf(*PAGES)), **name)) == plain
    assert chat(client, file_part(file_data=encoded(pdf(*PAGES)), **name)) == plain
    text = data_url(TEXT.encode(), "text/plain")
    assert chat(client, file_part(file_data=text, **name)) == plain


def test_uploaded_file_is_read_by_its_id(client: OpenAI, claude: Anthropic) -> None:
    content = pdf(*PAGES)
    file = client.files.create(file=("sum.pdf", content), purpose="user_data")
    assert file.purpose == "user_data"
    assert client.files.content(file.id).content == content
    assert chat(client, file_part(file_id=file.id)) == chat(client, {"type": "text", "text": TEXT})
    messages: Any = [{"role": "user", "content": [document({"type": "file", "file_id": file.id})]}]
    assert claude.messages.count_tokens(model="default", messages=messages).input_tokens > 5
    client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError) as refused:
        chat(client, file_part(file_id=file.id))
    assert refused.value.param == "messages[0].content[0].file.file_id"


def test_files_of_a_response_read_as_their_text(client: OpenAI) -> None:
    """Also those of the response that it continues."""

    def asked(part: dict[str, Any], previous: str | None = None) -> Any:
        content = [part, {"type": "input_text", "text": "Why?"}]
        given: Any = [{"role": "user", "content": content}]
        return client.responses.create(
            model="default", input=given, max_output_tokens=8, temperature=0,
            previous_response_id=previous or openai.omit,
        )  # fmt: skip

    plain = asked({"type": "input_text", "text": f"sum.pdf\n\n{TEXT}"})
    file = client.files.create(file=("sum.pdf", pdf(*PAGES)), purpose="user_data")
    for given in ({"file_data": data_url(pdf(*PAGES))}, {"file_id": file.id}):
        answer = asked({"type": "input_file", "filename": "sum.pdf", **given})
        assert answer.output_text == plain.output_text
        assert answer.usage.input_tokens == plain.usage.input_tokens
        text = {"type": "input_text", "text": "Go on."}
        assert asked(text, answer.id).usage.input_tokens == asked(text, plain.id).usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, ""),
        ({"file_id": "x", "file_data": "aaaa"}, ""),
        ({"file_url": "https://example.com/a.pdf"}, ".file_url"),
        ({"file_data": 5}, ".file_data"),
        ({"file_data": data_url(encrypted_pdf("a", "secret"))}, ".file_data"),
    ],
)
def test_unreadable_file_of_a_response_is_refused(
    client: OpenAI, fields: dict[str, Any], param: str
) -> None:
    given: Any = [{"role": "user", "content": [{"type": "input_file", **fields}]}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="default", input=given)
    assert refused.value.param == f"input[0].content[0]{param}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, ".file"),
        ({"file_id": "x", "file_data": "aaaa"}, ".file"),
        ({"file_data": data_url(encrypted_pdf("a", "secret"))}, ".file.file_data"),
        ({"file_data": data_url(b"x", "image/png")}, ".file.file_data"),
        ({"file_data": "data:application/pdf,x"}, ".file.file_data"),
        ({"file_data": ""}, ".file.file_data"),
    ],
)
def test_unreadable_file_of_a_chat_is_refused(
    client: OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, file_part(**fields))
    assert refused.value.param == f"messages[0].content[0]{param}"


def test_tokenizer_endpoints_read_files(stack: Stack) -> None:
    def prompt(part: dict[str, Any]) -> Any:
        messages = [{"role": "user", "content": [part]}]
        body = {"messages": messages}
        return [
            httpx.post(f"{stack.url}{path}", json=body, timeout=60).json()
            for path in ("/apply-template", "/tokenize")
        ]

    part = file_part(file_data=data_url(pdf(*PAGES)))
    assert prompt(part) == prompt({"type": "text", "text": TEXT})
