"""Accuracy and speed of the engine on a GPU, beside transformers on the same card.

    python -m benchmarks.cuda

The checkpoints have the shapes of Llama 3.2 1B and Llama 3.1 8B and random weights. They are made
on the first run. For each, the report has:

- the differences of log-probabilities from float32 on the CPU (1B only),
- tokens/s by number of streams, with transformers' continuous batching in the same run,
- one stream's share of the memory floor, and the share of the time in which a kernel runs.

It needs the extras `gpu` and `bench`. It has not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks import CACHE
from benchmarks.engine import MeasuredEngine
from benchmarks.results import RESULTS, Machine, now, save
from benchmarks.roofline import ByteFloor
from benchmarks.tables import markdown

STREAMS = (1, 8, 64, 256)
PROMPT, OUTPUT = 256, 256
"""Tokens of each request"""
SCORED_PROMPTS, SCORED_OUTPUT = (7, 64, 200, 1000), 64
"""Prompt lengths and output length, in tokens, of the requests compared with the CPU"""
FLOOR_CONTEXT, FLOOR_STEPS = 256, 200
PROFILED_STEPS = 50


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama with a vocabulary of 128,256 tokens and 8 KV heads."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    feed_forward: int
    tied: bool


SHAPES = {
    "1b": Shape(2048, layers=16, heads=32, head_dim=64, feed_forward=8192, tied=True),
    "8b": Shape(4096, layers=32, heads=32, head_dim=128, feed_forward=14336, tied=False),
}


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Differences of log-probabilities from float32 on the CPU, in nats."""

    prompt_mean: float
    prompt_most: float
    decode_mean: float
    """Over tokens generated on the GPU, one per decode step"""
    decode_most: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """Output tokens/s of the second of two runs; the time includes prefill."""

    streams: int
    tokenwire: float
    transformers: float | None
    """None if it failed; `failure` has the error"""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class OneStream:
    step_ms: float
    """Median"""
    share_of_floor: float
    """Byte floor / median step time; 1 is the memory's speed"""
    busy_share: float
    """Share of the profiled steps' time in which a kernel ran"""
    kernels_ms: Mapping[str, float]
    """Milliseconds per step of the ten slowest kernels"""


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    weight_bytes: int
    accuracy: Accuracy | None
    throughput: Sequence[Throughput]
    one_stream: OneStream


@dataclass(frozen=True, slots=True)
class CudaReport:
    date: str
    machine: Machine
    gpu: str
    torch: str
    bandwidth: float
    """Bytes per second that a copy reads and writes"""
    models: Sequence[Model]


def make(name: str, out: Path) -> Path:
    """Make a checkpoint with random weights. Prompts are token ids, so it has no tokenizer."""
    if (out / "config.json").exists():
        return out
    shape = SHAPES[name]
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=8,
        head_dim=shape.head_dim,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(out)
    return out


def measure_accuracy(path: Path) -> Accuracy:
    prompts = [_prompt(length) for length in SCORED_PROMPTS]
    tokens = 2 * sum(SCORED_PROMPTS) + 4096
    with MeasuredEngine(path, "bfloat16", tokens, device="cuda") as on_gpu:
        prompt_scores = [_score(on_gpu, prompt) for prompt in prompts]
        on_gpu.flush_cache()
        generated = [
            on_gpu.generate(
                prompt, max_tokens=SCORED_OUTPUT, temperature=0, ignore_eos=True, logprobs=0
            )
            for prompt in prompts
        ]
    _free()
    in_prompts: list[float] = []
    in_decodes: list[float] = []
    with MeasuredEngine(path, "float32", tokens) as exact:
        for prompt, scores, answer in zip(prompts, prompt_scores, generated, strict=True):
            known = _score(exact, [*prompt, *answer.token_ids])
            found = [score.logprob for score in answer.scores]
            in_prompts += [abs(a - b) for a, b in zip(scores, known, strict=False)]
            in_decodes += [abs(a - b) for a, b in zip(found, known[-len(found) :], strict=True)]
    return Accuracy(
        prompt_mean=statistics.fmean(in_prompts),
        prompt_most=max(in_prompts),
        decode_mean=statistics.fmean(in_decodes),
        decode_most=max(in_decodes),
    )


def measure_tokenwire(engine: MeasuredEngine, streams: int) -> float:
    """The first run captures the graphs."""
    rate = 0.0
    for _ in range(2):
        engine.flush_cache()
        tokens, seconds = engine.complete(_prompts(streams), streams, OUTPUT)
        rate = tokens / seconds
    return rate


def measure_transformers(path: Path, streams: Sequence[int]) -> dict[int, float | str]:
    """Return output tokens/s, or the error, by number of streams."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", device_map="cuda")
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=OUTPUT, do_sample=False
    )
    found: dict[int, float | str] = {}
    for count in streams:
        try:
            for _ in range(2):
                began = time.perf_counter()
                outputs = model.generate_batch(inputs=_prompts(count), generation_config=config)
                seconds = time.perf_counter() - began
            tokens = sum(len(output.generated_tokens) for output in outputs.values())
            found[count] = tokens / seconds
        except Exception as error:  # The report shows a peer's failure as its result.
            found[count] = f"{type(error).__name__}: {error}"
    return found


def measure_one_stream(engine: MeasuredEngine, bandwidth: float) -> OneStream:
    floor = ByteFloor(engine.weight_bytes, engine.kv_bytes_per_token, bandwidth)
    with engine.decoding(1, FLOOR_CONTEXT, FLOOR_STEPS + PROFILED_STEPS + 16) as step:
        for _ in range(8):
            step()
        times = [step() for _ in range(FLOOR_STEPS)]
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            began = time.perf_counter()
            for _ in range(PROFILED_STEPS):
                step()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - began
    kernels = sorted(profiler.key_averages(), key=lambda k: -k.self_device_time_total)
    busy = sum(kernel.self_device_time_total for kernel in kernels) / 1e6
    median = statistics.median(times)
    return OneStream(
        step_ms=1000 * median,
        share_of_floor=floor.seconds(1, FLOOR_CONTEXT + FLOOR_STEPS / 2) / median,
        busy_share=busy / seconds,
        kernels_ms={
            kernel.key: kernel.self_device_time_total / 1000 / PROFILED_STEPS
            for kernel in kernels[:10]
        },
    )


def measure_bandwidth(size: int = 4 << 30) -> float:
    """Return the bytes per second that a copy reads and writes, best of ten."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = max(best, 2 * size / (begin.elapsed_time(end) / 1000))
    return best


def measure(name: str, path: Path, streams: Sequence[int], bandwidth: float) -> Model:
    accuracy = measure_accuracy(path) if name == "1b" else None
    room = max(streams) * (PROMPT + OUTPUT + 64)
    with MeasuredEngine(path, "bfloat16", room, device="cuda") as engine:
        one_stream = measure_one_stream(engine, bandwidth)
        rates = {count: measure_tokenwire(engine, count) for count in streams}
        weight_bytes = engine.weight_bytes
    _free()
    theirs = measure_transformers(path, streams)
    _free()
    throughput = [
        Throughput(count, rates[count], None, their)
        if isinstance(their := theirs[count], str)
        else Throughput(count, rates[count], their)
        for count in streams
    ]
    return Model(name, weight_bytes, accuracy, throughput, one_stream)


def describe(report: CudaReport) -> str:
    rows = [["model", "streams", "tokenwire, tokens/s", "transformers, tokens/s"]]
    notes = []
    for model in report.models:
        for case in model.throughput:
            other = case.failure if case.transformers is None else f"{case.transformers:.0f}"
            rows.append([model.name, f"{case.streams}", f"{case.tokenwire:.0f}", other])
        one = model.one_stream
        notes.append(
            f"{model.name}: one stream {one.step_ms:.2f} ms a step, {one.share_of_floor:.0%} of "
            f"the floor, a kernel runs {one.busy_share:.0%} of the time."
        )
        if model.accuracy is not None:
            a = model.accuracy
            notes.append(
                f"{model.name}: log-probabilities differ from float32 on the CPU by "
                f"{a.prompt_mean:.2e} (most {a.prompt_most:.2e}) in prompts, by "
                f"{a.decode_mean:.2e} (most {a.decode_most:.2e}) in decode steps."
            )
    about = f"{report.gpu}, torch {report.torch}, {report.bandwidth / 1e12:.2f} TB/s copied"
    return "\n\n".join([about, markdown(rows), *notes])


def _score(engine: MeasuredEngine, prompt: Sequence[int]) -> list[float]:
    """The log-probability of each token of a prompt but the first."""
    scores = engine.generate(prompt, max_tokens=0, prompt_logprobs=0).prompt_scores
    return [score.logprob for score in scores]


def _prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(1000, 120000), k=length)


def _prompts(streams: int) -> list[list[int]]:
    source = random.Random(streams)
    return [source.choices(range(1000, 120000), k=PROMPT) for _ in range(streams)]


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", default="1b,8b", help="some of " + ", ".join(SHAPES))
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)), metavar="1,8,…")
    parser.add_argument("--checkpoints", type=Path, default=CACHE / "models")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device: run this benchmark on a machine with one")
    torch.set_grad_enabled(False)
    streams = [int(number) for number in arguments.streams.split(",")]
    bandwidth = measure_bandwidth()
    _free()
    report = CudaReport(
        date=now(),
        machine=Machine.this(),
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        bandwidth=bandwidth,
        models=[
            measure(name, make(name, arguments.checkpoints / f"cuda-{name}"), streams, bandwidth)
            for name in arguments.models.split(",")
        ],
    )
    path = save(report, arguments.results, f"{report.date}-cuda")
    print(f"{describe(report)}\n\nwritten to {path}")


if __name__ == "__main__":
    main()
