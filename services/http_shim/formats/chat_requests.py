"""Conversion of a chat's JSON to its proto, and of proto field paths to the client's names."""

from services.http_shim.formats.chat_messages import message_param, messages_of
from services.http_shim.formats.completion_requests import param_of, shared_fields
from services.http_shim.formats.constraints import json_text
from services.http_shim.formats.field_paths import within_input
from services.http_shim.formats.request_bodies import ChatBody, TemplateBody
from services.http_shim.formats.tools import tool_choice_of, tool_param, tools_of
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2

__all__ = ["chat_param_of", "rendered_param_of", "to_chat_request", "to_render_request"]

_PARAMS = {
    "template": "chat_template",
    "template_arguments_json": "chat_template_kwargs",
    "continue_last_message": "continue_final_message",
    "drop_oldest_messages": "truncation",
}


def chat_param_of(path: str, body: ChatBody) -> str:
    """Return the client's name of a field of a request."""
    if path == "logprobs" and body.top_logprobs is not None:
        return "top_logprobs"
    if path.startswith("messages[") or path in _PARAMS:
        return rendered_param_of(path, body)
    return param_of(path, body)


def rendered_param_of(path: str, body: ChatBody | TemplateBody) -> str:
    """Return the client's name of a field that makes the prompt; other paths stay."""
    path = within_input(path)
    if path.startswith("messages["):
        return message_param(path, body.messages or ())
    if path.startswith("tools["):
        return tool_param(path, body.tools, body.tool_choice)
    return _PARAMS.get(path, path)


def to_chat_request(body: ChatBody) -> completion_pb2.GenerateRequest:
    """Convert a body to the request. Raises INVALID_ARGUMENT with the client's name of a field."""
    for name in ("functions", "function_call"):
        if getattr(body, name) is not None:
            remedy = "tools" if name == "functions" else "tool_choice"
            raise invalid(name, f"{name} is not supported; use {remedy}.")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true.")
    _check_generation_prompt(body)
    return completion_pb2.GenerateRequest(
        **shared_fields(body),
        conversation=_conversation(body),
        parallel_tool_calls=body.parallel_tool_calls,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        drop_oldest_messages=body.truncation == "auto",
        echo=bool(body.echo),
    )


def to_render_request(
    body: TemplateBody, *, with_texts: bool = False
) -> tokenizer_pb2.RenderChatRequest:
    """Convert a body to the request that renders its messages. Raises INVALID_ARGUMENT."""
    _check_generation_prompt(body)
    return tokenizer_pb2.RenderChatRequest(
        conversation=_conversation(body),
        tools=tools_of(body.tools, body.tool_choice),
        tool_choice=tool_choice_of(body.tools, body.tool_choice),
        with_texts=with_texts,
    )


def _conversation(body: ChatBody | TemplateBody) -> completion_pb2.Conversation:
    """Return what makes the prompt, besides the tools. Raises INVALID_ARGUMENT."""
    arguments = body.chat_template_kwargs
    return completion_pb2.Conversation(
        messages=messages_of(body.messages),
        template=body.chat_template or "",
        template_arguments_json="" if arguments is None else json_text(arguments),
        add_generation_prompt=body.add_generation_prompt,
        continue_last_message=bool(body.continue_final_message),
        reasoning_effort=body.reasoning_effort or "",
    )


def _check_generation_prompt(body: ChatBody | TemplateBody) -> None:
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid(
            "add_generation_prompt",
            "add_generation_prompt and continue_final_message exclude each other; set one of them.",
        )
