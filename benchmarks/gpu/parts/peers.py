"""Peers on the same card, where they are installed: transformers, vLLM, SGLang."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.checkpoints import LLAMAS
from benchmarks.gpu.context import Context, Rows, UnavailableError
from benchmarks.gpu.parts.loads import llama

__all__ = ["measure_peer"]


def measure_peer(context: Context, peer: str, model: str = "8b") -> Rows:
    """Yield output tokens/s of a peer by number of streams, of two runs the second.

    peer: a package; model: a name of LLAMAS. Raises UnavailableError if it is not installed.
    """
    if find_spec(peer) is None:
        raise UnavailableError(f"{peer} is not installed")
    path = llama(context, model)
    size = int(LLAMAS[context.size(model, "tiny")]["vocab_size"])
    prompt, output = context.size((256, 256), (16, 8))

    def some(count: int) -> list[list[int]]:
        source = random.Random(count)
        return [source.choices(range(size), k=prompt) for _ in range(count)]

    loads = [some(count) for count in context.size((1, 64, 256), (2,))]
    for count, rate in _PEERS[peer](context, path, loads, output):
        yield {"peer": peer, "streams": count, "tokens/s": rate}


def _transformers(
    context: Context, path: Path, loads: Sequence[list[list[int]]], output: int
) -> Iterator[tuple[int, float]]:
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", device_map=context.device)
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=output, do_sample=False
    )
    limits = context.size(None, ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64))
    for load in loads:
        rate = 0.0
        for _ in range(2):
            began = time.perf_counter()
            outputs = model.generate_batch(
                inputs=load,
                generation_config=config,
                continuous_batching_config=limits,
                persistent_manager=True,  # the second run then finds the graphs of the first
            )
            seconds = time.perf_counter() - began
            rate = sum(len(each.generated_tokens) for each in outputs.values()) / seconds
        yield len(load), rate
        model.destroy_cached_continuous_batching_manager()


def _vllm(
    context: Context, path: Path, loads: Sequence[list[list[int]]], output: int
) -> Iterator[tuple[int, float]]:
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
    context: Context, path: Path, loads: Sequence[list[list[int]]], output: int
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


_PEERS: Mapping[str, Callable[..., Iterator[tuple[int, float]]]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "sglang": _sglang,
}
"""Measurement of each package"""
