"""Peers on the same card, where they are installed: transformers, vLLM, SGLang."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.correctness import release
from benchmarks.gpu.report import Figure

__all__ = ["measure_peers"]


def measure_peers(
    path: Path, streams: Sequence[int], prompt: int, output: int, vocabulary: int
) -> Iterator[dict[str, Figure]]:
    """Yield output tokens/s of each peer by number of streams, of two runs the second."""

    def some(count: int) -> list[list[int]]:
        source = random.Random(count)
        return [source.choices(range(vocabulary), k=prompt) for _ in range(count)]

    for name, measure in _PEERS:
        if find_spec(name) is None:
            yield {"peer": name, "streams": None, "tokens/s": None, "note": "not installed"}
            continue
        try:
            for count, rate in measure(path, [some(count) for count in streams], output):
                yield {"peer": name, "streams": count, "tokens/s": rate, "note": ""}
        except Exception as error:  # a peer's failure is its result
            note = f"{type(error).__name__}: {error}"[:200]
            yield {"peer": name, "streams": None, "tokens/s": None, "note": note}
        release()


def _transformers(
    path: Path, loads: Sequence[list[list[int]]], output: int
) -> Iterator[tuple[int, float]]:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", device_map="cuda")
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=output, do_sample=False
    )
    for load in loads:
        rate = 0.0
        for _ in range(2):
            began = time.perf_counter()
            outputs = model.generate_batch(inputs=load, generation_config=config)
            seconds = time.perf_counter() - began
            rate = sum(len(each.generated_tokens) for each in outputs.values()) / seconds
        yield len(load), rate


def _vllm(path: Path, loads: Sequence[list[list[int]]], output: int) -> Iterator[tuple[int, float]]:
    from vllm import LLM, SamplingParams

    model = LLM(str(path), skip_tokenizer_init=True, enable_prefix_caching=False)
    settings = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    for load in loads:
        rate = 0.0
        for _ in range(2):
            began = time.perf_counter()
            inputs = [{"prompt_token_ids": ids} for ids in load]
            outputs = model.generate(inputs, settings, use_tqdm=False)
            seconds = time.perf_counter() - began
            rate = sum(len(each.outputs[0].token_ids) for each in outputs) / seconds
        yield len(load), rate


def _sglang(
    path: Path, loads: Sequence[list[list[int]]], output: int
) -> Iterator[tuple[int, float]]:
    from sglang import Engine

    engine = Engine(
        model_path=str(path), skip_tokenizer_init=True, disable_radix_cache=True, log_level="error"
    )
    settings = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
    try:
        for load in loads:
            rate = 0.0
            for _ in range(2):
                began = time.perf_counter()
                outputs = engine.generate(input_ids=load, sampling_params=settings)
                seconds = time.perf_counter() - began
                rate = sum(each["meta_info"]["completion_tokens"] for each in outputs) / seconds
            yield len(load), rate
    finally:
        engine.shutdown()


_PEERS = (("transformers", _transformers), ("vllm", _vllm), ("sglang", _sglang))
"""Packages, and their measurements"""
