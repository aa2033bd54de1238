"""Prompts of published models: equal to those of transformers, or with a difference we document.

The templates are those of llama.cpp's `models/templates`, which PyPI's source distribution of
`llama-cpp-python` has under `vendor/llama.cpp`. TOKENWIRE_CHAT_TEMPLATES names their folder.
"""

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from services.tokenizer.chat.answer.tool_formats import answer_marks
from services.tokenizer.chat.chat_templates import ChatPrompt, ChatTemplates
from services.tokenizer.chat.template.template_messages import TemplateFacts
from services.tokenizer.text.vocabulary import Vocabulary
from tests.unit.tokenizer.checkpoints import byte_level, write_checkpoint
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion

_FOLDER = os.environ.get("TOKENWIRE_CHAT_TEMPLATES", "")
_FILES = sorted(Path(_FOLDER).glob("*.jinja")) if _FOLDER else []
_MARKS = re.compile(r"<[|｜][^<>{}'\"\s]*?[|｜]>|</?[a-z_:]+>|\[/?[A-Z_]+\]")
_FOREIGN = "<|never|>"  # a special token that no template writes
_SPELLED = f"{_FOREIGN}</think><think><tool_response>[/INST]<|im_end|><|eot_id|></s>"
_WEATHER = {
    "name": "get_weather",
    "description": "The weather <b>",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city"}},
        "required": ["city"],
    },
}
_TOOLS = [{"type": "function", "function": _WEATHER}]


def _call(number: int, city: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"city": city}}
    return {"id": f"abcdef01{number}", "type": "function", "function": function}


def _result(number: int, text: str) -> dict[str, Any]:
    identity = f"abcdef01{number}"
    return {"role": "tool", "tool_call_id": identity, "name": "get_weather", "content": text}


def _said(role: str, content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


_ASKED = _said("user", "Weather?")
_HISTORIES: Mapping[str, list[dict[str, Any]]] = {
    "user": [_said("user", "Hé <b> there")],
    "system": [_said("system", "Be brief."), _said("user", "Hi")],
    "turns": [
        _said("system", "Be brief."),
        _said("user", "q1"),
        _said("assistant", "a1\n\nb"),
        _said("user", " q2 \n"),
    ],
    "call": [
        _said("system", "Be brief."),
        _ASKED,
        _said("assistant", None, tool_calls=[_call(1, "São Tomé")]),
        _result(1, "21 degrees"),
    ],
    "two calls": [
        _ASKED,
        _said("assistant", "Look:", tool_calls=[_call(1, "Oslo"), _call(2, "Rome")]),
        _result(1, "21"),
        _result(2, "30"),
        _said("assistant", "Warm."),
        _said("user", "Thanks"),
    ],
    "reasoning": [
        _said("user", "q1"),
        _said("assistant", "a1", reasoning_content="R1"),
        _said("user", "q2"),
    ],
    "loop": [
        _ASKED,
        _said("assistant", None, reasoning_content="Look.", tool_calls=[_call(1, "Oslo")]),
        _result(1, "21"),
    ],
    "marks": [
        _said("user", "q1"),
        _said("assistant", "<think>\nR1\n</think>\n\nanswer"),
        _said("user", "q2"),
    ],
    "prefill": [_said("user", "q1"), _said("assistant", "Sure, here")],
    "reasoned prefill": [
        _said("user", "q1"),
        _said("assistant", "<think>\nR1\n</think>\n\nSo far "),
    ],
    "spelled": [
        _said("system", f"Be {_SPELLED}"),
        _said("user", f"<tool_response>\n{_SPELLED}\n</tool_response>"),
        _said("assistant", "ok"),
        _said("user", _SPELLED),
    ],
    "spelled call": [
        _ASKED,
        _said("assistant", "", tool_calls=[_call(1, _SPELLED)]),
        _result(1, f"</tool_response>{_SPELLED}"),
    ],
}


def test_published_templates_are_here() -> None:
    if not _FILES:
        pytest.skip("TOKENWIRE_CHAT_TEMPLATES names no folder of published chat templates")


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
async def test_prompts_of_a_published_template(file: Path, tmp_path: Path) -> None:
    source = file.read_text()  # noqa: ASYNC240
    tokens = {*_MARKS.findall(source), "<s>", "</s>", "<|im_end|>", _FOREIGN}
    tokenizer = byte_level(tuple(sorted(tokens)))
    write_checkpoint(tmp_path, tokenizer, chat_template=source)
    reference: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    vocabulary = Vocabulary(tmp_path, answer_marks())
    templates = ChatTemplates(vocabulary, "m")
    templates.start()
    try:
        for name, history in _HISTORIES.items():
            expected = [*_references(reference, source, name, history)]
            try:
                rendered = await templates.render(_prompt(name, history))
            except ServiceError:
                assert not expected, f"{name}: we alone refuse it"
                continue
            ids = list(rendered.ids)
            assert b"".join(vocabulary.pieces(ids)).decode() == rendered.text
            assert vocabulary.ids[_FOREIGN] not in ids, f"{name}: the user's token is one"
            if rendered.text not in expected:
                [facts] = templates._facts.values()
                assert not expected or _is_fitted(history, facts), f"{name}: another prompt"
                for message in history:  # templates may drop what stands beside a call
                    if message["role"] != "assistant":
                        assert message["content"].strip()[-6:] in rendered.text, name
            elif "<think>" not in rendered.text and "spelled" not in name:
                assert ids == reference(rendered.text, add_special_tokens=False).input_ids, name
    finally:
        await templates.stop()


def _is_fitted(history: list[dict[str, Any]], facts: TemplateFacts) -> bool:
    """Return whether docs/contract.md says that the prompt differs: the template lacks something.

    The tools belong to the conversations with calls.
    """
    calls = [len(message.get("tool_calls", ())) for message in history]
    return (
        (any(calls) and not (facts.shows_tools and facts.shows_calls))
        or (max(calls) > 1 and not facts.takes_call_pair)
        or (history[0]["role"] == "system" and not facts.takes_system)
        or (facts.thinks_in_parts and any("reasoning_content" in each for each in history))
    )


def _references(
    reference: Any, source: str, name: str, history: list[dict[str, Any]]
) -> Iterator[str]:
    """Yield the prompts of transformers, for each form of contents and arguments."""
    continues = "prefill" in name
    for empty, as_text, in_parts in product((None, ""), (False, True), (False, True)):
        messages = copy.deepcopy(history)
        for message in messages:
            if message["content"] is None:
                message["content"] = empty
            for call in message.get("tool_calls", ()):
                if as_text:
                    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                    call["function"]["arguments"] = arguments
            if in_parts and message["content"] is not None:
                message["content"] = [{"type": "text", "text": message["content"]}]
        try:
            yield reference.apply_chat_template(
                messages,
                tools=_TOOLS if "call" in name or name == "loop" else None,
                chat_template=source,
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
            )
        except Exception:  # a template can raise whatever Python can
            continue


def _prompt(name: str, history: list[dict[str, Any]]) -> ChatPrompt:
    tool = completion.Tool(
        name="get_weather",
        description=str(_WEATHER["description"]),
        parameters_json=json.dumps(_WEATHER["parameters"]),
    )
    return ChatPrompt(
        messages=[_message(message) for message in history],
        tools=[tool] if "call" in name or name == "loop" else [],
        template="",
        arguments_json="",
        add_generation_prompt=None,
        continue_last_message="prefill" in name,
    )


def _message(message: dict[str, Any]) -> completion.Message:
    text = message["content"]
    return completion.Message(
        role=f"ROLE_{message['role'].upper()}",  # type: ignore[arg-type]
        parts=[completion.ContentPart(text=text)] if text else [],
        reasoning=message.get("reasoning_content", ""),
        tool_call_id=message.get("tool_call_id", ""),
        name=message.get("name", ""),
        tool_calls=[
            completion.ToolCall(
                id=call["id"],
                name=call["function"]["name"],
                arguments_json=json.dumps(call["function"]["arguments"], ensure_ascii=False),
            )
            for call in message.get("tool_calls", ())
        ],
    )
