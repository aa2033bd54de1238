"""Synthetic conversations: requests for functions, tool calls, JSON answers and short exchanges.

All are rendered with the checkpoint's chat template, so that training text and served prompts are
identical byte for byte.
"""

from __future__ import annotations

import ast
import json
import random
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment

from small_talk import exchange, small_talk
from tools import TOOLS, UNRELATED_ANSWERS, JsonValue, Tool
from words import WORDS

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful coding assistant.",
    "You are a Python programmer. Answer with code.",
    "Answer briefly.",
)
_WRITE = (
    "Write a Python function `{name}`.\n\n{summary}",
    "Write a Python function `{name}` for this description: {summary}",
    "Implement `{name}({arguments})` in Python.\n\n{summary}",
    "{summary}\n\nWrite `{name}({arguments})`.",
    "Please write the function `{name}`. {summary}",
)
_ASK_FOR_BASIC = (
    "Write a Python function that {request}.",
    "Write a function that {request}.",
    "Write a Python function `{name}` that {request}.",
    "How do I write a function that {request}?",
    "Give me Python code: a function `{name}` that {request}.",
    "Can you write a Python function which {request}?",
)
_EXPLAIN = (
    "What does this function do?\n\n```python\n{source}\n```",
    "Explain this code in a sentence or two.\n\n```python\n{source}\n```",
    "Write a docstring for this function.\n\n```python\n{source}\n```",
)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str
    tool_calls: tuple[Mapping[str, JsonValue], ...] = field(default=())


@cache
def _template() -> Callable[..., str]:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    source = Path(__file__).with_name("chat_template.jinja").read_text()
    return environment.from_string(source).render


def render(messages: Sequence[Message], tools: Sequence[JsonValue] | None = None) -> str:
    """Return the text of a conversation, as transformers' apply_chat_template renders it."""
    return _template()(messages=messages, tools=tools, add_generation_prompt=False)


def _system(rng: random.Random) -> list[Message]:
    return [Message("system", rng.choice(_SYSTEM_PROMPTS))] if rng.random() < 0.3 else []


def function_dialogues(source: str, rng: random.Random) -> list[str]:
    """Make conversations about the short documented functions of a Python file."""
    dialogues = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        docstring = ast.get_docstring(node)
        if (
            not docstring
            or len(node.body) < 2
            or not 3 <= (node.end_lineno or 0) - node.lineno <= 40
        ):
            continue
        if (
            any(argument.arg in ("self", "cls") for argument in node.args.args)
            and rng.random() < 0.7
        ):
            continue
        summary = re.sub(r"\s+", " ", docstring.split("\n\n")[0]).strip()
        if not 20 <= len(summary) <= 300 or not summary.isascii():
            continue
        lines = source.split("\n")
        first, last = node.body[0].lineno - 1, node.body[0].end_lineno or 0
        head, body = lines[node.lineno - 1 : first], lines[last : node.end_lineno]
        whole = textwrap.dedent("\n".join([*head, *lines[first:last], *body]))
        bare = textwrap.dedent("\n".join([*head, *body]).replace("\n\n\n", "\n"))
        if len(whole) > 2000:
            continue
        arguments = ", ".join(argument.arg for argument in node.args.args)
        if rng.random() < 0.8:
            request = rng.choice(_WRITE).format(
                name=node.name, summary=summary, arguments=arguments
            )
            answer = f"```python\n{bare if rng.random() < 0.6 else whole}\n```"
        else:
            request = rng.choice(_EXPLAIN).format(source=bare)
            answer = summary
        dialogues.append(
            render([*_system(rng), Message("user", request), Message("assistant", answer)])
        )
    return dialogues


@cache
def _basic_functions() -> list[tuple[str, str, str]]:
    source = Path(__file__).with_name("basic_functions.py").read_text()
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            lines = source.split("\n")[node.lineno - 1 : node.end_lineno]
            request = (ast.get_docstring(node) or "").rstrip(".")
            found.append(
                (node.name, request[0].lower() + request[1:], "\n".join([lines[0], *lines[2:]]))
            )
    return found


def basic_dialogue(rng: random.Random) -> str:
    """Make a request for a well-known small function."""
    name, request, source = rng.choice(_basic_functions())
    ask = rng.choice(_ASK_FOR_BASIC).format(request=request, name=name)
    answer = f"```python\n{source}\n```"
    return render([*_system(rng), Message("user", ask), Message("assistant", answer)])


def talk_dialogue(rng: random.Random) -> str:
    """Make a conversation of one to three short exchanges in words, without tools."""
    turns = _system(rng)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3))):
        question, answer = exchange(rng)
        turns += [Message("user", question), Message("assistant", answer)]
    return render(turns)


def tool_dialogue(rng: random.Random) -> str:
    """Make a conversation with tools: a call, perhaps with its result, or a plain answer."""
    offered = rng.sample(TOOLS, rng.choice((1, 1, 2, 2, 3, 4)))
    schemas = [tool.schema() for tool in offered]
    opening = [Message("system", rng.choice(_SYSTEM_PROMPTS))] if rng.random() < 0.4 else []
    if rng.random() < 0.18:
        question, answer = rng.choice((rng.choice(UNRELATED_ANSWERS), small_talk(rng)))
        return render([*opening, Message("user", question), Message("assistant", answer)], schemas)
    tool: Tool = rng.choice(offered)
    request, arguments = tool.request(rng)
    call: JsonValue = {"name": tool.name, "arguments": arguments}
    calling = Message("assistant", "", ({"type": "function", "function": call},))
    turns = [*opening, Message("user", request), calling]
    if rng.random() < 0.4:
        result, answer = tool.result(arguments, rng)
        turns += [Message("tool", json.dumps(result)), Message("assistant", answer)]
    return render(turns, schemas)


def json_value(rng: random.Random, depth: int = 0) -> JsonValue:
    """Return a random JSON object with plausible values for its keys."""
    return {key: _member(key, rng, depth) for key in rng.sample(list(_MEMBERS), rng.randint(1, 7))}


def json_document(rng: random.Random) -> str:
    """Return a random JSON object or array of objects, compact, spaced or indented."""
    if rng.random() < 0.25:
        keys = rng.sample(list(_MEMBERS), rng.randint(1, 4))
        rows = rng.randint(1, 5)
        value: JsonValue = [{key: _member(key, rng, 1) for key in keys} for _ in range(rows)]
    else:
        value = json_value(rng)
    return _dump(value, rng)


def json_dialogue(rng: random.Random) -> str:
    """Make a request for a JSON answer by keys, by schema, or from facts in words."""
    keys = rng.sample(list(_MEMBERS), rng.randint(1, 5))
    value: dict[str, JsonValue] = {key: _member(key, rng, 1) for key in keys}
    kind = rng.randrange(3)
    listed = ", ".join(f"`{key}`" for key in keys)
    if kind == 0:
        ask = rng.choice(
            (
                f"Give me a JSON object with the keys {listed}.",
                f"Answer in JSON with {listed}.",
                f"Make up an example record as JSON. Keys: {', '.join(keys)}.",
            )
        )
    elif kind == 1:
        schema = {
            "type": "object",
            "properties": {k: {"type": _json_type(v)} for k, v in value.items()},
        }
        ask = f"Answer with a JSON object that follows this schema:\n{json.dumps(schema)}"
    else:
        facts = "; ".join(f"{key} is {json.dumps(fact)}" for key, fact in value.items())
        ask = f"Turn this into JSON: {facts}."
    spaced = json.dumps(value, indent=rng.choice((None, None, 2)))
    answer = spaced if rng.random() < 0.7 else f"```json\n{spaced}\n```"
    return render([*_system(rng), Message("user", ask), Message("assistant", answer)])


def _dump(value: JsonValue, rng: random.Random) -> str:
    indent = rng.choice((None, None, 2, 4))
    separators = (",", ":") if indent is None and rng.random() < 0.5 else None
    return json.dumps(value, indent=indent, separators=separators) + "\n"


def _json_type(value: JsonValue) -> str:
    names = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        dict: "object",
        list: "array",
    }
    return names.get(type(value), "null")


def _member(key: str, rng: random.Random, depth: int) -> JsonValue:
    if key in ("metadata", "address", "owner") and depth >= 2:
        return {}
    return _MEMBERS[key](rng, depth)


def _word(kind: str) -> Callable[[random.Random, int], JsonValue]:
    return lambda rng, depth: rng.choice(WORDS[kind])


def _number(low: int, high: int) -> Callable[[random.Random, int], JsonValue]:
    return lambda rng, depth: rng.randint(low, high)


def _real(low: float, high: float) -> Callable[[random.Random, int], JsonValue]:
    return lambda rng, depth: round(rng.uniform(low, high), rng.choice((1, 2)))


def _flag(rng: random.Random, depth: int) -> JsonValue:
    return rng.random() < 0.5


def _several(kind: str) -> Callable[[random.Random, int], JsonValue]:
    return lambda rng, depth: rng.sample(WORDS[kind], rng.randint(0, 4))


def _nested(*keys: str) -> Callable[[random.Random, int], JsonValue]:
    return lambda rng, depth: {key: _member(key, rng, depth + 1) for key in keys}


_MEMBERS: dict[str, Callable[[random.Random, int], JsonValue]] = {
    "name": _word("name"),
    "first_name": _word("name"),
    "last_name": _word("surname"),
    "city": _word("city"),
    "country": _word("country"),
    "language": _word("language"),
    "color": _word("color"),
    "product": _word("product"),
    "title": _word("title"),
    "status": _word("status"),
    "email": lambda rng, depth: f"{rng.choice(WORDS['name']).lower()}@example.com",
    "url": lambda rng, depth: f"https://example.com/{rng.choice(WORDS['product'])}",
    "date": lambda rng, depth: (
        f"20{rng.randint(10, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    ),
    "id": _number(1, 9999),
    "age": _number(1, 99),
    "count": _number(0, 500),
    "quantity": _number(1, 50),
    "year": _number(1950, 2030),
    "price": _real(0.5, 500.0),
    "score": _real(0.0, 1.0),
    "temperature": _real(-20.0, 40.0),
    "active": _flag,
    "in_stock": _flag,
    "valid": _flag,
    "tags": _several("product"),
    "colors": _several("color"),
    "languages": _several("language"),
    "values": lambda rng, depth: [rng.randint(0, 100) for _ in range(rng.randint(0, 6))],
    "parent": lambda rng, depth: None,
    "address": _nested("city", "country"),
    "owner": _nested("name", "age", "email"),
    "metadata": lambda rng, depth: json_value(rng, depth + 1) if depth < 1 else {},
    "items": lambda rng, depth: [
        {"product": rng.choice(WORDS["product"]), "price": round(rng.uniform(1, 90), 2)}
        for _ in range(rng.randint(1, 3))
    ],
}
