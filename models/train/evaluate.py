"""Evaluation of an exported checkpoint: bits per byte, infilling, sample outputs.

It reads only the checkpoint folder and heldout.jsonl. The model runs in transformers, in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from samples import Infill, cut_windows
from tokenizer import CONTEXT, END_OF_TEXT, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX
from tools import JsonObject

SEED = 3
LONGEST_WINDOW = 3000  # characters
COMPLETIONS = (
    "def add(a, b):\n    return",
    "import os\nimport sys\n\n\ndef main(",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "with open(path) as f:\n    for line in",
    "try:\n    import numpy as np\nexcept ImportError:\n",
)
INFILLS = (
    ("def add(a, b):\n    return ", "\n\n\nprint(add(1, 2))\n"),
    ("def is_even(n):\n    ", "\n\n\nassert is_even(4)\nassert not is_even(3)\n"),
    (
        "import json\n\n\ndef load(path):\n    with open(path) as file:\n        ",
        "\n    return data\n",
    ),
    (
        "def mean(values):\n    total = 0\n    for value in values:\n        ",
        "\n    return total / len(values)\n",
    ),
    (
        "class Point:\n    def __init__(self, x, y):\n        self.x = x\n",
        "\n    def norm(self):\n        return self.x\n",
    ),
    ("for index, ", " in enumerate(names):\n    print(index, name)\n"),
)
CHATS = (
    "Write a Python function that returns the sum of a list of numbers.",
    "Write a Python function `count_lines` that counts the lines of a file.",
    "Hello!",
    "Give me a JSON object with the keys `name`, `age` and `city`.",
)
WEATHER: JsonObject = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
UNSEEN_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "rename_branch",
        "description": "Rename a branch of a repository.",
        "parameters": {
            "type": "object",
            "properties": {"old": {"type": "string"}, "new": {"type": "string"}},
            "required": ["old", "new"],
        },
    },
}
TOOL_REQUESTS = (
    ([WEATHER], "What is the weather like in Paris?"),
    ([WEATHER, UNSEEN_TOOL], "Rename the branch main to trunk."),
)


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of the model card; shares are between 0 and 1."""

    heldout_bytes: int
    heldout_tokens: int
    loss: float
    bits_per_byte: float
    line_exact: float
    line_similarity: float
    line_ended: float
    block_exact: float
    block_similarity: float
    block_ended: float


class Checkpoint:
    """An exported model with methods for completion, infilling and chat."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        )
        self.model.requires_grad_(False)

    def generate(self, prompt: str, limit: int) -> tuple[str, bool]:
        """Return the greedy continuation of `prompt`, and whether the model ended it."""
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False
        )
        new = out[0, ids.shape[1] :].tolist()
        ends = self.model.generation_config.eos_token_id
        ended = bool(new) and new[-1] in ends
        text: str = self.tokenizer.decode(new[:-1] if ended else new, skip_special_tokens=False)
        return text, ended

    def complete(self, prefix: str, limit: int = 48) -> str:
        """Return the continuation of `prefix`."""
        return self.generate(prefix, limit)[0]

    def infill(self, prefix: str, suffix: str, limit: int = 64) -> tuple[str, bool]:
        """Return the middle between `prefix` and `suffix`, and whether the model ended it."""
        return self.generate(f"{FIM_PREFIX}{prefix}{FIM_SUFFIX}{suffix}{FIM_MIDDLE}", limit)

    def chat(self, content: str, tools: list[JsonObject] | None = None, limit: int = 120) -> str:
        """Return the answer to one user turn."""
        messages = [{"role": "user", "content": content}]
        prompt: str = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        return self.generate(prompt, limit)[0]

    @torch.no_grad()
    def total_loss(self, text: str) -> tuple[float, int]:
        """Return a text's loss in nats, summed over windows of the context size, and its tokens."""
        ids = self.tokenizer(END_OF_TEXT + text, return_tensors="pt").input_ids[0]
        total = 0.0
        for start in range(0, len(ids) - 1, CONTEXT - 1):
            window = ids[start : start + CONTEXT][None]
            logits = self.model(window).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(
                logits, window[0, 1:], reduction="sum"
            ).item()
        return total, len(ids) - 1


def infill_accuracy(
    checkpoint: Checkpoint, texts: Sequence[str], count: int, wanted: Callable[[Infill], bool]
) -> tuple[float, float, float]:
    """Return exact matches, edit similarity and ended middles, as means over `count` cuts."""
    rng = random.Random(SEED)
    cuts = [cut for text in texts for cut in cut_windows(text, rng, LONGEST_WINDOW) if wanted(cut)]
    exact = similar = finished = 0.0
    for cut in rng.sample(cuts, count):
        middle, ended = checkpoint.infill(cut.prefix, cut.suffix, 160)
        exact += middle.strip() == cut.middle.strip()
        similar += SequenceMatcher(None, middle, cut.middle, autojunk=False).ratio()
        finished += ended
    return exact / count, similar / count, finished / count


def _is_short(cut: Infill) -> bool:
    return bool(cut.suffix.strip()) and len(cut.prefix) + len(cut.suffix) < 3500


def _is_line(cut: Infill) -> bool:
    return (
        "\n" not in cut.middle.strip("\n")
        and 4 <= len(cut.middle.strip()) <= 120
        and _is_short(cut)
    )


def _is_block(cut: Infill) -> bool:
    return (
        2 <= cut.middle.strip("\n").count("\n") + 1 <= 6
        and len(cut.middle) <= 300
        and _is_short(cut)
    )


def measure(checkpoint: Checkpoint, texts: Sequence[str], infills: int) -> Metrics:
    """Compute all figures over the held-out texts."""
    losses = [checkpoint.total_loss(text) for text in texts]
    total, tokens = sum(loss for loss, _ in losses), sum(count for _, count in losses)
    size = sum(len(text.encode()) for text in texts)
    line = infill_accuracy(checkpoint, texts, infills, _is_line)
    block = infill_accuracy(checkpoint, texts, infills // 2, _is_block)
    return Metrics(size, tokens, total / tokens, total / math.log(2) / size, *line, *block)


def show_samples(checkpoint: Checkpoint) -> None:
    """Print greedy outputs, the model's text between « and »."""
    for prefix in COMPLETIONS:
        print(f"--- completion\n{prefix}«{checkpoint.complete(prefix)}»")
    for prefix, suffix in INFILLS:
        middle, ended = checkpoint.infill(prefix, suffix)
        print(f"--- infill{'' if ended else ' (not ended)'}\n{prefix}«{middle}»{suffix}")
    for content in CHATS:
        print(f"--- chat\n{content}\n«{checkpoint.chat(content)}»")
    for tools, content in TOOL_REQUESTS:
        print(f"--- tools\n{content}\n«{checkpoint.chat(content, tools)}»")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="exported folder")
    parser.add_argument(
        "--heldout", type=Path, help="heldout.jsonl of corpus.py; without it only samples are shown"
    )
    parser.add_argument(
        "--infills", type=int, default=200, help="single-line middles to try; half as many blocks"
    )
    arguments = parser.parse_args()
    checkpoint = Checkpoint(arguments.checkpoint)
    show_samples(checkpoint)
    if arguments.heldout:
        texts = [str(json.loads(line)["text"]) for line in arguments.heldout.open()]
        print(
            json.dumps(
                {
                    key: round(value, 4)
                    for key, value in asdict(measure(checkpoint, texts, arguments.infills)).items()
                }
            )
        )


if __name__ == "__main__":
    main()
