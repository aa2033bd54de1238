"""JSON objects of the client's results; docs/api.md lists their keys."""

from dataclasses import asdict

from tokenwire.cli.output import JsonObject
from tokenwire.results import Answer, Choice, Delta, Model
from tokenwire.stream import AnswerStream

__all__ = ["chat", "chat_delta", "completion", "delta", "end", "model"]


def completion(answer: Answer) -> JsonObject:
    """Return the object of a completion."""
    return {
        "model": answer.model,
        "seed": answer.seed,
        "choices": [_choice(choice) for choice in answer.choices],
        "usage": asdict(answer.usage),
    }


def chat(answer: Answer) -> JsonObject:
    """Return the object of a chat's answer."""
    return {
        "model": answer.model,
        "seed": answer.seed,
        "choices": [_chat_choice(choice) for choice in answer.choices],
        "usage": asdict(answer.usage),
    }


def delta(part: Delta) -> JsonObject:
    """Return the object of a part of a completion."""
    return {
        "index": part.index,
        "text": part.text,
        "token_ids": part.token_ids,
        "finish_reason": part.finish_reason,
        "stop": part.stop,
    }


def chat_delta(part: Delta) -> JsonObject:
    """Return the object of a part of an answer."""
    return {
        "index": part.index,
        "content": part.text,
        "reasoning": part.reasoning,
        "tool_calls": [asdict(call) for call in part.tool_calls],
        "token_ids": part.token_ids,
        "finish_reason": part.finish_reason,
        "stop": part.stop,
    }


def end(stream: AnswerStream) -> JsonObject:
    """Return the last object of a stream whose deltas have all arrived."""
    accepted, usage = stream.ended
    return {"model": accepted.model, "seed": accepted.seed, "usage": asdict(usage)}


def model(served: Model) -> JsonObject:
    """Return the object of a served model."""
    return asdict(served)


def _choice(choice: Choice) -> JsonObject:
    return {
        "index": choice.index,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop": choice.stop,
    }


def _chat_choice(choice: Choice) -> JsonObject:
    message = choice.message
    return {
        "index": choice.index,
        "message": {
            "role": message.role,
            "content": message.content,
            "reasoning": message.reasoning,
            "tool_calls": [asdict(call) for call in message.tool_calls],
        },
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop": choice.stop,
    }
