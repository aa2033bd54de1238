"""Right answers of a model with a constraint beside those without, and how far it is pushed.

    python -m benchmarks.constrained_quality --model MODEL.gguf

A server of the whole stack answers 200 tasks (`quality_tasks`) at temperature 0, each without a
constraint and with one: a JSON Schema, or tools with a required call. A model without a chat
template gets three solved tasks of the kind before each question.

The push of an answer is the sum of -ln(probability that the model gives to all tokens that the
mask allows) over its tokens, in nats. 0: the constraint changes nothing. It is shown for the first
token, where a constraint leaves out introductions such as "Here is the JSON", and for the others.
The places that were pushed most are listed with the token that the model preferred. `json_habits`
compares the form of the answers with others, such as escapes and other orders of the members.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from llguidance import LLExecutor
from torch import Tensor

from benchmarks.json_habits import Habit, habits_of, likeliest_option
from benchmarks.processes import Launch, free_port, running
from benchmarks.quality_tasks import TOOLS, Task, tasks
from benchmarks.results import RESULTS, Machine, now, save
from benchmarks.tables import markdown
from services.common.gguf.checkpoint_files import write_checkpoint
from services.engine.engine import Engine
from services.engine.settings import EngineSettings
from services.grammar import specification
from services.grammar.matching.initial_state import initial_state
from services.grammar.matching.mask_filler import MaskFiller
from services.grammar.matching.matcher import Matcher
from services.grammar.matching.prototype import compile_prototype
from services.grammar.matching.token_index import TokenIndex
from services.grammar.matching.vocabulary import load
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

_AT_ONCE = 4
_SHOTS = 3
_MAX_TOKENS = 160
_LISTED = 12


@dataclass
class Answer:
    """Output of the model."""

    text: str
    prompt_ids: list[int]
    ids: list[int]
    is_cut: bool
    arguments: str | None = None
    """The arguments of a call, whose name is `text`"""


@dataclass
class Push:
    """A place where the constraint left little of the model's probability."""

    nats: float
    behind: str
    """The end of the text before it"""
    preferred: str
    taken: str


@dataclass
class Figures:
    """The results of one kind of task."""

    tasks: int = 0
    free: int = 0
    """Right answers without a constraint"""
    constrained: int = 0
    free_without_json: int = 0
    cut: int = 0
    """Constrained answers that did not end within the tokens"""
    first_nats: float = 0.0
    """Push of the first token, mean over the answers"""
    other_nats: float = 0.0
    """Push of all other tokens, mean over the answers"""
    quote_nats: float = 0.0
    """Part of it where the model preferred a token with a quotation mark"""
    likeliest: int | None = None
    """Right answers of a classification that takes the likeliest option as a whole"""
    call_nats: float = 0.0
    """-ln(probability) of the text in front of the name in a forced call, mean over the answers"""


@dataclass
class Report:
    """The results of a model."""

    time: str
    machine: Machine
    model: str
    has_template: bool
    kinds: dict[str, Figures] = field(default_factory=dict)
    pushes: list[Push] = field(default_factory=list)
    habits: list[Habit] = field(default_factory=list)


class Asker:
    """Client of the server."""

    def __init__(self, http: httpx.Client, shots: dict[str, str]) -> None:
        """`shots`: solved tasks by kind, for a model without a chat template."""
        self._http = http
        self._shots = shots

    def has_template(self) -> bool:
        """Return whether the model takes chats."""
        message = {"role": "user", "content": "Hello"}
        body = {"model": "default", "messages": [message], "max_tokens": 1}
        return self._http.post("/v1/chat/completions", json=body).status_code == 200

    def ask(self, task: Task, *, is_chat: bool, is_constrained: bool) -> Answer:
        """Return the answer to a task at temperature 0."""
        body: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": _MAX_TOKENS}
        body["return_token_ids"] = True
        if is_constrained and task.schema is None:
            body |= {"tools": TOOLS, "tool_choice": "required"}
        elif is_constrained:
            schema = {"name": task.kind, "schema": task.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if is_chat:
            body["messages"] = [{"role": "user", "content": task.question}]
            return self._chat(body)
        body["prompt"] = f"{self._shots[task.kind]}{task.question}\n"
        if not is_constrained:
            body["stop"] = ["\n\n"]
        return self._complete(body)

    def _chat(self, body: dict[str, Any]) -> Answer:
        answer = self._post("/v1/chat/completions", body)
        choice = answer["choices"][0]
        message, is_cut = choice["message"], choice["finish_reason"] == "length"
        ids = choice.get("token_ids") or []
        prompt_ids = answer.get("prompt_token_ids") or []
        if calls := message.get("tool_calls"):
            called = calls[0]["function"]
            return Answer(called["name"], prompt_ids, ids, is_cut, called["arguments"])
        return Answer(message["content"] or "", prompt_ids, ids, is_cut)

    def _complete(self, body: dict[str, Any]) -> Answer:
        choice = self._post("/v1/completions", body)["choices"][0]
        is_cut = choice["finish_reason"] == "length"
        return Answer(choice["text"], choice["prompt_token_ids"], choice["token_ids"], is_cut)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = self._http.post(path, json=body)
        if response.status_code != 200:
            sys.exit(f"{path}: {response.text}")
        return response.json()


class PushMeter:
    """The model and the grammars in this process, which show the probability that a mask allows."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._engine = Engine(model, EngineSettings(device="cpu", kv_memory="256MiB"))
        if model.is_file():
            write_checkpoint(model, directory)
        self._vocabulary = load(directory if model.is_file() else model)
        self._index = TokenIndex(self._vocabulary)
        width = self._vocabulary.size
        self._filler = MaskFiller(self._vocabulary, LLExecutor(num_threads=1), width)

    def score(self, prompt: Sequence[int], text: str) -> float:
        """Return the log-probability of a text behind a prompt."""
        return self._score(prompt, self._vocabulary.tokenizer.tokenize_str(text))

    def call_nats(self, answer: Answer) -> float:
        """Return -ln(probability) of the text in front of the name in a call."""
        decode = self._vocabulary.tokenizer.decode_str
        place = decode(answer.ids).index(answer.text)
        count = sum(len(decode(answer.ids[: end + 1])) <= place for end in range(len(answer.ids)))
        return -self._score(answer.prompt_ids, answer.ids[:count])

    def _score(self, prompt: Sequence[int], ids: Sequence[int]) -> float:
        rows = self._engine.log_probabilities([*prompt, *ids])[len(prompt) - 1 : -1]
        return float(rows[torch.arange(len(ids)), torch.tensor(ids)].sum())

    def pushes(self, task: Task, answer: Answer) -> Iterator[Push]:
        """Yield the push of each token of an answer."""
        spec = GrammarSpec(json_schema=json.dumps(task.schema))
        tokenizer, ends = self._vocabulary.tokenizer, self._vocabulary.end_ids
        prototype = compile_prototype(tokenizer, specification.translate(spec))
        state = initial_state(spec, self._index)
        matcher = Matcher(prototype.deep_copy(), ends, state)
        found = self._engine.log_probabilities([*answer.prompt_ids, *answer.ids])
        written: list[int] = []
        for place, token in enumerate(answer.ids):
            row = found[len(answer.prompt_ids) - 1 + place]
            [mask] = self._filler.fill([matcher])
            nats = max(0.0, -torch.logsumexp(row[_allowed(mask, len(row))], 0).item())
            behind = tokenizer.decode_bytes(written)[-24:].decode(errors="replace")
            preferred = tokenizer.decode_str([int(row.argmax())])
            yield Push(nats, behind, preferred, tokenizer.decode_str([token]))
            if token in ends:
                return
            matcher.accept([token], self._vocabulary.size)
            written.append(token)


def _allowed(mask: int, width: int) -> Tensor:
    """Return a mask as booleans."""
    bits = np.frombuffer(mask.to_bytes(-(-width // 8), "little"), np.uint8)
    return torch.from_numpy(np.unpackbits(bits, bitorder="little")[:width].astype(bool))


def first_object(text: str) -> Any:
    """Return the first JSON object of a text; None without one."""
    start = text.find("{")
    while start >= 0:
        try:
            return json.JSONDecoder().raw_decode(text, start)[0]
        except ValueError:
            start = text.find("{", start + 1)
    return None


def shots_of(every: Sequence[Task]) -> dict[str, str]:
    """Return the last solved tasks of each kind."""
    return {
        kind: "".join(
            f"{task.question}\n{json.dumps(task.answer, ensure_ascii=False)}\n\n"
            for task in [task for task in every if task.kind == kind][-_SHOTS:]
        )
        for kind in {task.kind for task in every}
    }


def measure(model: Path, log: Path, limit: int) -> Report:
    """Answer tasks of all kinds with and without constraints, and measure the pushes."""
    every = tasks()
    shots = shots_of(every)
    every = every[:: max(1, len(every) // limit)]
    ports = [free_port() for _ in range(4)]
    names = ("--port", "--tokenizer-port", "--engine-port", "--grammar-port")
    flags = [part for pair in zip(names, map(str, ports), strict=True) for part in pair]
    flags.append("--no-jobs")
    url = f"http://127.0.0.1:{ports[0]}"
    command = [
        sys.executable,
        "-m",
        "tokenwire",
        "serve",
        "--model",
        str(model),
        "--no-jobs",
        *flags,
    ]
    launch = Launch(command, os.environ, url, "/ready")
    with running(launch, log, start_seconds=900), httpx.Client(base_url=url, timeout=600) as http:
        asker = Asker(http, shots)
        report = Report(now(), Machine.this(), model.name, asker.has_template())
        answers = _ask_all(asker, every, is_chat=report.has_template)
    with tempfile.TemporaryDirectory() as directory:
        meter = PushMeter(model, Path(directory))
        for task, (free, constrained) in zip(every, answers, strict=True):
            figures = report.kinds.setdefault(task.kind, Figures())
            _count(figures, task, free, constrained)
            if task.schema is not None:
                report.pushes += _weigh(figures, meter, task, constrained)
            elif constrained.arguments is not None:
                figures.call_nats += meter.call_nats(constrained)
        asked = [(task, free.prompt_ids) for task, (free, _) in zip(every, answers, strict=True)]
        report.habits = habits_of(asked, meter.score)
    report.pushes = sorted(report.pushes, key=lambda push: -push.nats)[:_LISTED]
    for figures in report.kinds.values():
        figures.first_nats /= figures.tasks
        figures.other_nats /= figures.tasks
        figures.quote_nats /= figures.tasks
        figures.call_nats /= figures.tasks
    return report


def _weigh(figures: Figures, meter: PushMeter, task: Task, answer: Answer) -> list[Push]:
    """Add the pushes of an answer to the figures; return those behind its first token."""
    first, *others = meter.pushes(task, answer)
    figures.first_nats += first.nats
    figures.other_nats += sum(push.nats for push in others)
    figures.quote_nats += sum(push.nats for push in others if '"' in push.preferred)
    likeliest = likeliest_option(task, answer.prompt_ids, meter.score)
    if likeliest is not None:
        figures.likeliest = (figures.likeliest or 0) + task.is_right(likeliest)
    return others


def _ask_all(
    asker: Asker, every: Sequence[Task], *, is_chat: bool
) -> Sequence[tuple[Answer, Answer]]:
    def both(task: Task) -> tuple[Answer, Answer]:
        free = asker.ask(task, is_chat=is_chat, is_constrained=False)
        return free, asker.ask(task, is_chat=is_chat, is_constrained=True)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(both, every))


def _count(figures: Figures, task: Task, free: Answer, constrained: Answer) -> None:
    figures.tasks += 1
    found = first_object(free.text)
    figures.free_without_json += found is None
    figures.free += task.is_right(found)
    answer = first_object(constrained.text)
    if constrained.arguments is not None:
        arguments = first_object(constrained.arguments)
        answer = {"name": constrained.text, "arguments": arguments}
    figures.constrained += task.is_right(answer)
    figures.cut += constrained.is_cut


def table(report: Report) -> str:
    """Return the figures as a table."""
    rows = [["tasks", "right, free", "right, constrained", "push, first token", "push, others"]]
    for kind, figures in report.kinds.items():
        is_measured = kind != "tools"
        rows.append(
            [
                f"{kind}, {figures.tasks}",
                str(figures.free),
                str(figures.constrained),
                f"{figures.first_nats:.2f}" if is_measured else "-",
                f"{figures.other_nats:.3f}" if is_measured else "-",
            ]
        )
    counted = list(report.kinds.values())
    totals = [
        sum(getattr(one, name) for one in counted) for name in ("tasks", "free", "constrained")
    ]
    rows.append([f"all, {totals[0]}", str(totals[1]), str(totals[2]), "", ""])
    return markdown(rows)


def table_of_habits(report: Report) -> str:
    """Return the forms of JSON beside ours as a table."""
    rows = [["form", "texts", "advantage of ours, nats", "other form preferred"]]
    rows += [
        [habit.form, str(habit.texts), f"{habit.advantage:.1f}", str(habit.preferred)]
        for habit in report.habits
    ]
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.constrained_quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a directory")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument("--limit", type=int, default=200, help="number of tasks, at most")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "quality.log")
    arguments = parser.parse_args()
    report = measure(arguments.model, arguments.log, arguments.limit)
    print(table(report))
    print(table_of_habits(report))
    for kind, figures in report.kinds.items():
        print(
            f"{kind}: {figures.quote_nats:.3f} nats at tokens with a quotation mark, "
            f"{figures.call_nats:.2f} in front of a call, "
            f"likeliest option right: {figures.likeliest}"
        )
    for push in report.pushes:
        print(json.dumps(asdict(push), ensure_ascii=False))
    print(save(report, arguments.out, f"constrained-quality-{arguments.model.stem}"))


if __name__ == "__main__":
    main()
