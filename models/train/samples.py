"""Conversion of the corpus to shards of packed token rows.

A shard is a uint16 array [rows, length]. Each sample starts with <|endoftext|> and fits its row.
File text fills the rest of a row, so there is no padding.

Infilling follows the prefix-suffix-middle order of "Efficient Training of Language Models to Fill
in the Middle" (arXiv:2207.14255), applied to text before tokenization.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import math
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dialogues import (
    basic_dialogue,
    function_dialogues,
    json_dialogue,
    json_document,
    talk_dialogue,
    tool_dialogue,
)
from tokenizer import (
    END_OF_TEXT,
    FILE_SEPARATOR,
    FIM_MIDDLE,
    FIM_PREFIX,
    FIM_SUFFIX,
    IM_START,
    REPO_NAME,
)

SEED = 7
FUNCTION_DIALOGUE_FILES = 0.5
MAX_DIALOGUES_A_FILE = 4
INFILL_FILES = 0.54
CHARACTERS_A_CUT = 400
SHORTEST_WINDOW = 120  # characters
WINDOW_CHARACTERS_A_TOKEN = 3.2
LONGEST_MIDDLE = 0.7  # of its window

_INFILLED_NODES = (
    *(ast.Call, ast.BinOp, ast.Compare, ast.ListComp, ast.Subscript),
    *(ast.Return, ast.Assign),
)
_DIALOGUES = ("functions", "basics", "talk", "tools", "json")


@dataclass(frozen=True, slots=True)
class Mixture:
    """Shares of tokens of each kind of dialogue; files and their infilling take the remainder."""

    functions: float = 0.06
    basics: float = 0.008
    talk: float = 0.03
    tools: float = 0.03
    json: float = 0.02

    def with_dialogues(self, factor: float) -> Mixture:
        """Return the mixture with `factor` times the share of each kind of dialogue."""
        scaled = {name: getattr(self, name) * factor for name in _DIALOGUES}
        return replace(self, **scaled)

    def shares(self) -> list[float]:
        """Return the shares in `_DIALOGUES`' order."""
        return [getattr(self, name) for name in _DIALOGUES]


@dataclass(frozen=True, slots=True)
class Infill:
    """A text divided into prefix, middle and suffix."""

    prefix: str
    middle: str
    suffix: str

    def text(self) -> str:
        """Return prefix, suffix and middle; the next sample's <|endoftext|> ends the middle."""
        return f"{FIM_PREFIX}{self.prefix}{FIM_SUFFIX}{self.suffix}{FIM_MIDDLE}{self.middle}"


def cut_windows(text: str, rng: random.Random, longest: int) -> list[Infill]:
    """Cut one middle from each window of whole lines, of up to about `longest` characters."""
    spans = syntax_spans(text)
    cuts, left = [], 0
    while left < len(text):
        size = int(math.exp(rng.uniform(math.log(SHORTEST_WINDOW), math.log(longest))))
        right = min(_line_end(text, left + size) + 1, len(text))
        inside = [(a - left, b - left) for a, b in spans if left <= a and b <= right]
        cuts.append(cut_infill(text[left:right], rng, inside))
        left = right
    return [cut for cut in cuts if cut]


def cut_infill(text: str, rng: random.Random, spans: Sequence[tuple[int, int]]) -> Infill | None:
    """Cut a middle from `text`; `spans` are the character ranges of its syntax nodes."""
    start, end = _choose_middle(text, rng, spans)
    if not text[start:end].strip() or end - start > LONGEST_MIDDLE * len(text):
        return None
    left, right = 0, len(text)
    crop = rng.random()
    if crop < 0.08:
        right = _line_end(text, end)
    elif crop < 0.12:
        left = _line_start(text, start)
    return Infill(text[left:start], text[start:end], text[end:right])


def _choose_middle(
    text: str, rng: random.Random, spans: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    kind = rng.random()
    if kind < 0.35 and spans:
        return rng.choice(spans)
    start = rng.randrange(len(text))
    if kind < 0.55:
        return start, min(len(text), start + int(math.exp(rng.uniform(0.0, math.log(240)))))
    if kind < 0.78:  # the rest of a line, from its first word or from anywhere
        line = _line_start(text, start)
        end = _line_end(text, start)
        if rng.random() < 0.5:
            start = line + len(text[line:end]) - len(text[line:end].lstrip())
        return start, end
    start = end = _line_start(text, start)
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 5, 6, 8, 10))):
        end = _line_end(text, end) + 1
    return start, min(end - rng.choice((0, 1)), len(text))


def _line_start(text: str, position: int) -> int:
    return text.rfind("\n", 0, position) + 1


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def syntax_spans(text: str) -> list[tuple[int, int]]:
    """Return character ranges of blocks, statements and expressions; none unless ASCII."""
    if not text.isascii():
        return []
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)

    def span(first: ast.stmt | ast.expr, last: ast.stmt | ast.expr) -> tuple[int, int]:
        last_line, last_column = last.end_lineno or 0, last.end_col_offset or 0
        return starts[first.lineno - 1] + first.col_offset, starts[last_line - 1] + last_column

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    spans = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.If, ast.For, ast.With)):
            spans += [span(node.body[0], node.body[-1])] * 2
        elif isinstance(node, _INFILLED_NODES):
            spans.append(span(node, node))
    return [(start, end) for start, end in spans if 4 < end - start < 800]


class Encoder:
    """Encoder of samples, each with a leading <|endoftext|>."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        start = self._tokenizer.token_to_id(END_OF_TEXT)
        turn = self._tokenizer.token_to_id(IM_START)
        assert start is not None
        assert turn is not None
        self._start = start
        self.turn = turn

    def samples(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text as one sample."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[self._start, *encoding.ids] for encoding in encodings]

    def file(self, text: str, head: str, rng: random.Random) -> list[int]:
        """Encode a file in pieces of whole lines, because prompts often end with a newline."""
        cuts = {
            _line_start(text, rng.randrange(len(text)))
            for _ in range(1 + len(text) // CHARACTERS_A_CUT)
        }
        edges = [0, *sorted(cuts - {0}), len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
        encodings = self._tokenizer.encode_batch_fast([head, *pieces], add_special_tokens=False)
        return [self._start, *(token for encoding in encodings for token in encoding.ids)]


def file_samples(
    record: dict[str, str], length: int, rng: random.Random, encoder: Encoder
) -> tuple[list[int], list[list[int]]]:
    """Return a file either from left to right or as infilling, so that no text is read twice."""
    text = record["text"]
    if rng.random() < INFILL_FILES:
        cuts = cut_windows(text, rng, int(length * WINDOW_CHARACTERS_A_TOKEN))
        return [], encoder.samples([cut.text() for cut in cuts])
    named = rng.random() < 0.1
    head = f"{REPO_NAME}{record['package']}\n{FILE_SEPARATOR}{record['path']}\n" if named else ""
    return encoder.file(text, head, rng), []


def synthetic_samples(
    records: Sequence[dict[str, str]], rng: random.Random, encoder: Encoder
) -> list[list[list[int]]]:
    """Make samples of each kind of dialogue, more than a shard needs, in `_DIALOGUES`' order."""
    functions: list[str] = []
    for record in records:
        if rng.random() < FUNCTION_DIALOGUE_FILES:
            dialogues = function_dialogues(record["text"], rng)
            functions += rng.sample(dialogues, min(MAX_DIALOGUES_A_FILE, len(dialogues)))
    rng.shuffle(functions)
    basics = [basic_dialogue(rng) for _ in range(900)]
    talk = [talk_dialogue(rng) for _ in range(16_000)]
    tools = [tool_dialogue(rng) for _ in range(900)]
    documents = [
        json_dialogue(rng) if rng.random() < 0.6 else json_document(rng) for _ in range(1400)
    ]
    return [encoder.samples(texts) for texts in (functions, basics, talk, tools, documents)]


def _take(samples: list[list[int]], tokens: float, longest: int) -> list[list[int]]:
    taken, total = [], 0
    for sample in samples:
        if total >= tokens:
            break
        if len(sample) < longest:
            taken.append(sample)
            total += len(sample)
    return taken


def pack(
    samples: list[list[int]], files: list[list[int]], length: int, turn: int
) -> np.ndarray[tuple[int, int], np.dtype[np.uint16]]:
    """Pack rows of `length` ids: whole samples, then file text to the end of the row.

    A file that continues in the next row repeats its first id, <|endoftext|>. Every second row
    starts with its conversations, samples whose second id is `turn`: a served conversation has
    nothing before it.
    """
    rows: list[list[int]] = []
    stream = iter(files)
    rest: list[int] = []
    total = sum(map(len, samples)) + sum(map(len, files))
    per_row = len(samples) / (total / length)
    position, credit = 0, 0.0
    while True:
        whole: list[list[int]] = []
        room = length
        credit += per_row
        while credit >= 1 and position < len(samples) and len(samples[position]) <= room:
            whole.append(samples[position])
            room -= len(samples[position])
            position += 1
            credit -= 1
        if len(rows) % 2:
            whole.sort(key=lambda sample: sample[1] != turn)
        row = list(itertools.chain(*whole))
        while len(row) < length:
            if not rest:
                rest = next(stream, [])
                if not rest:
                    return np.array(rows, dtype=np.uint16)
            room = length - len(row)
            row += rest[:room]
            rest = [rest[0], *rest[room:]] if len(rest) > room else []
        rows.append(row)


@dataclass(frozen=True, slots=True)
class ShardJob:
    """Input of a worker process for one shard."""

    records: tuple[dict[str, str], ...]
    tokenizer: Path
    out: Path
    length: int
    mixture: Mixture
    seed: int


def write_shard(job: ShardJob) -> int:
    """Write one shard atomically and return its tokens."""
    rng = random.Random(job.seed)
    encoder = Encoder(job.tokenizer)
    files, infills = [], []
    for record in job.records:
        file, cuts = file_samples(record, job.length, rng, encoder)
        files += [file] if file else []
        infills += cuts
    samples = [cut for cut in infills if len(cut) < job.length]
    shares = job.mixture.shares()
    total = sum(map(len, itertools.chain(files, samples))) / (1 - sum(shares))
    kinds = zip(synthetic_samples(job.records, rng, encoder), shares, strict=True)
    samples += [
        dialogue for kind, share in kinds for dialogue in _take(kind, share * total, job.length)
    ]
    rng.shuffle(samples)
    rows = pack(samples, files, job.length, encoder.turn)
    row_order = np.random.default_rng(job.seed).permutation(len(rows))
    temporary = job.out.with_suffix(".tmp.npy")
    np.save(temporary, rows[row_order])
    os.replace(temporary, job.out)
    return int(rows.size)


def shard_jobs(arguments: argparse.Namespace) -> Iterator[ShardJob]:
    """Yield a job per shard with files of its own, over the corpus in a shuffled order."""
    records = [json.loads(line) for line in arguments.corpus.open()]
    random.Random(SEED).shuffle(records)
    mixture = Mixture().with_dialogues(arguments.dialogues)
    if arguments.talk is not None:
        mixture = replace(mixture, talk=arguments.talk)
    batch: list[dict[str, str]] = []
    size = index = 0
    for record in records:
        batch.append(record)
        size += len(record["text"])
        if size >= arguments.shard_megabytes * 1e6:
            out = arguments.out / f"shard-{index:03}.npy"
            if arguments.first <= index < arguments.first + arguments.shards and not out.exists():
                seed = SEED * 1000 + index
                yield ShardJob(
                    tuple(batch), arguments.tokenizer, out, arguments.length, mixture, seed
                )
            batch, size, index = [], 0, index + 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="train.jsonl of corpus.py")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the shards")
    parser.add_argument("--length", type=int, default=1024, help="tokens a row")
    parser.add_argument(
        "--dialogues", type=float, default=1.0, help="factor on the share of dialogues"
    )
    parser.add_argument(
        "--talk", type=float, help="share of short exchanges, instead of 0.03 x dialogues"
    )
    parser.add_argument(
        "--shard-megabytes", type=float, default=4.0, help="file text behind one shard"
    )
    parser.add_argument("--first", type=int, default=0, help="index of the first shard to write")
    parser.add_argument("--shards", type=int, default=40, help="how many shards to write")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with ProcessPoolExecutor(arguments.workers) as pool:
        for tokens in pool.map(write_shard, shard_jobs(arguments)):
            print(f"{tokens:,} tokens", flush=True)
    (arguments.out / "complete").touch()


if __name__ == "__main__":
    main()
