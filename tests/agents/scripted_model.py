"""A model whose answers a script decides: its checkpoint, and the text of its turns."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

__all__ = ["CONTEXT", "FORMS", "Call", "Form", "Script", "make_checkpoint"]

CONTEXT = 200_000
_TEMPLATES = Path(__file__).parent / "templates"
_COPIED = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a family's answers."""

    name: str
    tokens: Sequence[str]
    """Control tokens that the tokenizer has for it"""

    def call(self, thought: str, call: Call) -> str:
        """Return the text of a turn that calls a tool, to its last token."""
        if self.name == "harmony":
            head = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
            head += f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
            return f"{head}{json.dumps(call.arguments)}<|call|>"
        if self.name == "xml":
            parameters = "".join(
                f"<parameter={key}>\n{value}\n</parameter>\n"
                for key, value in call.arguments.items()
            )
            inner = f"<function={call.name}>\n{parameters}</function>"
            return f"{thought}\n</think>\n\n<tool_call>\n{inner}\n</tool_call><|im_end|>"
        inner = json.dumps({"name": call.name, "arguments": call.arguments})
        return f"<think>\n{thought}\n</think>\n\n<tool_call>\n{inner}\n</tool_call><|im_end|>"

    def say(self, text: str) -> str:
        """Return the text of a turn that ends the conversation."""
        if self.name == "harmony":
            return f"<|channel|>final<|message|>{text}<|return|>"
        opened = "" if self.name == "xml" else "<think>\n"
        return f"{opened}Done.\n</think>\n\n{text}<|im_end|>"


_CHAT = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_CHANNELS = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
    *("<|call|>", "<|return|>"),
)
FORMS = (Form("hermes", _CHAT), Form("xml", _CHAT), Form("harmony", _CHANNELS))


@dataclass(frozen=True, slots=True)
class Script:
    """Two calls and an answer, each as soon as the prompt has what the one before brought."""

    form: Form
    task: str
    """Text of the user's task"""
    calls: Sequence[tuple[Call, str]]
    """Calls, and the text that only their output has"""
    answer: str

    def turn(self, prompt: str) -> str:
        """Return the model's turn after a prompt."""
        if self.task not in prompt or self.calls[0][0].name not in prompt:
            return self.form.say("A title")  # a side question, without the tools
        for call, output in self.calls:
            if output not in prompt:
                return self.form.call(f"The next call is {call.name}.", call)
        return self.form.say(self.answer)


def make_checkpoint(form: Form, base: Path, path: Path) -> Path:
    """Write a checkpoint without weights: the base's tokenizer with the form's tokens."""
    path.mkdir()
    for name in _COPIED:
        shutil.copy(base / name, path)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokens = [AddedToken(text, special=True, normalized=False) for text in form.tokens]
    tokenizer.add_special_tokens(tokens)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("added_tokens_decoder", None)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((base / "config.json").read_text())
    config |= {"max_position_embeddings": CONTEXT, "vocab_size": tokenizer.get_vocab_size()}
    (path / "config.json").write_text(json.dumps(config))
    shutil.copy(_TEMPLATES / f"{form.name}.jinja", path / "chat_template.jinja")
    return path
