"""Texts per second that are embedded over HTTP, beside sentence-transformers on the same texts.

python -m benchmarks.embeddings [--only minilm] [--texts 1024] [--onnxruntime]

Both have random weights of the same files. Ours computes in the dtype that `auto` chooses; the peer
in float32, its default, and in that dtype too. `--onnxruntime` adds ONNX Runtime, in float32 and in
its fastest batch size, to the encoder (pip install onnx onnxruntime).
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from tokenizers.trainers import WordPieceTrainer
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from benchmarks.processes import Launch, free_port, running
from benchmarks.results import RESULTS, Machine, now, save
from benchmarks.tables import markdown, number

_ROOT = Path(__file__).parents[1]
_WORDS = 60
"""Mean length of a text"""
_PER_REQUEST, _AT_ONCE = 64, 4
_PEER = """
import sys, time, torch
from sentence_transformers import SentenceTransformer
texts = open(sys.argv[2]).read().splitlines()
kwargs = {"dtype": getattr(torch, sys.argv[3])}
model = SentenceTransformer(sys.argv[1], device="cpu", model_kwargs=kwargs)
model.encode(texts[:32])
began = time.perf_counter()
model.encode(texts, batch_size=32)
print(len(texts) / (time.perf_counter() - began))
"""
_ONNX_PEER = """
import sys, time, numpy, onnxruntime, torch
from tokenizers import Tokenizer
from transformers import AutoModel

class Encoder(torch.nn.Module):
    def __init__(self, path):
        super().__init__()
        self.model = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    def forward(self, input_ids, attention_mask):
        return self.model(input_ids, attention_mask).last_hidden_state

path, texts = sys.argv[1], sorted(open(sys.argv[2]).read().splitlines(), key=len)
example = torch.ones(2, 8, dtype=torch.long)
names = ["input_ids", "attention_mask"]
axes = {name: {0: "texts", 1: "tokens"} for name in [*names, "hidden"]}
torch.onnx.export(Encoder(path), (example, example), path + "/model.onnx", input_names=names,
    output_names=["hidden"], dynamic_axes=axes, opset_version=17, dynamo=False)
session = onnxruntime.InferenceSession(path + "/model.onnx", providers=["CPUExecutionProvider"])
tokenizer = Tokenizer.from_file(path + "/tokenizer.json")
tokenizer.enable_padding()

def embed(part):
    encoded = tokenizer.encode_batch(part)
    ids, mask = (numpy.array([getattr(each, name) for each in encoded])
                 for name in ("ids", "attention_mask"))
    [hidden] = session.run(None, {"input_ids": ids, "attention_mask": mask})
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return mean / numpy.linalg.norm(mean, axis=1, keepdims=True)

embed(texts[:32])
rates = []
for size in (1, 8, 32):
    began = time.perf_counter()
    for start in range(0, len(texts), size):
        embed(texts[start : start + size])
    rates.append(len(texts) / (time.perf_counter() - began))
print(max(rates))
"""


@dataclass
class Report:
    """Texts per second."""

    time: str
    machine: Machine
    texts: int
    """Of each model's run; their lengths vary by a third around 60 words"""
    figures: dict[str, dict[str, float]] = field(default_factory=dict)


def _minilm(path: Path) -> None:
    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, intermediate_size=1536, num_attention_heads=12
    )
    BertModel(config).save_pretrained(path)


def _qwen3(path: Path) -> None:
    config = Qwen3Config(
        vocab_size=151_669,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
    )
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3Model(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(path)


_MODELS = {"minilm": (_minilm, "mean"), "qwen3-0.6b": (_qwen3, "lasttoken")}
"""Random models by name, and their poolings"""


def make(name: str, path: Path) -> None:
    """Make a checkpoint as sentence-transformers saves it."""
    save_model, pooling = _MODELS[name]
    torch.manual_seed(0)
    save_model(path)
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    pages = sorted(map(str, _ROOT.glob("docs/**/*.md")))
    tokenizer.train(pages, WordPieceTrainer(vocab_size=8000, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    roles = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(tokenizer_object=tokenizer, model_max_length=512, **roles).save_pretrained(path)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling/config.json").write_text(
        f'{{"embedding_dimension": 0, "pooling_mode": "{pooling}"}}'
    )
    (path / "2_Normalize").mkdir()
    kinds = {
        "": "base.modules.transformer.Transformer",
        "1_Pooling": "sentence_transformer.modules.pooling.Pooling",
        "2_Normalize": "base.modules.normalize.Normalize",
    }
    modules = ", ".join(
        f'{{"idx": {i}, "name": "{i}", "path": "{folder}", "type": "sentence_transformers.{kind}"}}'
        for i, (folder, kind) in enumerate(kinds.items())
    )
    (path / "modules.json").write_text(f"[{modules}]")


def texts_of(count: int) -> list[str]:
    """Return texts of random words."""
    words = (_ROOT / "docs/running.md").read_text().split()
    source = random.Random(0)
    lengths = (max(2, round(source.gauss(_WORDS, _WORDS / 3))) for _ in range(count))
    return [" ".join(source.choices(words, k=length)) for length in lengths]


def measure_ours(path: Path, texts: list[str], log: Path) -> float:
    """Return texts per second over HTTP, in requests of 64 texts, 4 at a time."""
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
        str(path),
        "--no-jobs",
        *flags,
    ]
    launch = Launch(command, os.environ, url, "/ready")
    with running(launch, log), httpx.Client(base_url=url, timeout=600) as client:

        def embed(part: list[str]) -> None:
            body = {"model": "default", "input": part, "encoding_format": "base64"}
            client.post("/v1/embeddings", json=body).raise_for_status()

        embed(["warm up"] * 32)
        parts = [texts[at : at + _PER_REQUEST] for at in range(0, len(texts), _PER_REQUEST)]
        began = time.perf_counter()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(embed, parts))
        return len(texts) / (time.perf_counter() - began)


def measure_peer(script: str, path: Path, texts: list[str], dtype: str) -> float:
    """Return the texts per second that a peer's script prints, in a process of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(texts))
        file.flush()
        command = [sys.executable, "-c", script, str(path), file.name, dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=_MODELS, help="one model; by default all")
    parser.add_argument("--texts", type=int, default=512, help="texts of each run")
    parser.add_argument("--onnxruntime", action="store_true", help="measure ONNX Runtime too")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    report = Report(now(), Machine.this(), options.texts)
    rows = []
    for name in [options.only] if options.only else _MODELS:
        with tempfile.TemporaryDirectory() as folder:
            path, log = Path(folder) / name, Path(folder) / "log"
            path.mkdir()
            make(name, path)
            texts = texts_of(options.texts)
            figures = report.figures[name] = {
                "ours": measure_ours(path, texts, log),
                "sentence-transformers, float32": measure_peer(_PEER, path, texts, "float32"),
                "sentence-transformers, bfloat16": measure_peer(_PEER, path, texts, "bfloat16"),
            }
            if options.onnxruntime and _MODELS[name][1] == "mean":
                figures["ONNX Runtime, float32"] = measure_peer(_ONNX_PEER, path, texts, "float32")
        fastest = max(rate for peer, rate in figures.items() if peer != "ours")
        rows += [
            [name, peer, number(rate), number(rate / fastest)] for peer, rate in figures.items()
        ]
        print(markdown([["model", "server", "texts/s", "of the fastest peer"], *rows]), flush=True)
    print(save(report, options.out, f"embeddings-{report.time.replace('+00:00', 'Z')}"))


if __name__ == "__main__":
    main()
