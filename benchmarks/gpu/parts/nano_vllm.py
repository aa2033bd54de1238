"""nano-vllm beside our engine: the same checkpoint, prompts and draws on the same card.

Its attention functions are those of `flash_functions`; all else is its own.
"""

from __future__ import annotations

import random
import sys
import time
from importlib.util import find_spec

from benchmarks.gpu import flash_functions
from benchmarks.gpu.context import Context, Rows, UnavailableError, release
from benchmarks.gpu.parts.loads import complete, some_ids, start
from benchmarks.gpu.random_tokenizer import add_tokenizer

__all__ = ["QWEN3_8B", "measure_nano_vllm"]

QWEN3_8B: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
"""config.json of the shape of Qwen3 8B, the only family that nano-vllm has"""
_PROMPT, _ANSWER = 256, 256
_STREAMS = (1, 64, 256)


def measure_nano_vllm(context: Context) -> Rows:
    """Yield output tokens/s of both by number of streams, of two runs the second.

    Both draw at temperature 1, because nano-vllm takes no 0.
    """
    if find_spec("nanovllm") is None:
        raise UnavailableError("the bundle has no nano-vllm")
    if find_spec("transformers") is None:
        raise UnavailableError("nano-vllm needs transformers, which is not installed")
    if not context.on_gpu:
        raise UnavailableError("nano-vllm needs a GPU")
    path = context.checkpoint("qwen3-8b", QWEN3_8B)
    add_tokenizer(path)
    rates = {}
    with start(context, path) as engine:
        for count in _STREAMS:
            for turn in range(2):
                prompts = [some_ids(engine, _PROMPT, (turn, each)) for each in range(count)]
                run = complete(engine, prompts, _ANSWER, temperature=1.0)
            rates[count] = run.rate
            yield {"engine": "tokenwire", "streams": count, "tokens/s": run.rate}
    release()
    if find_spec("flash_attn") is None:
        sys.modules["flash_attn"] = flash_functions
    from nanovllm import LLM, SamplingParams

    began = time.monotonic()
    model = LLM(str(path), max_num_seqs=max(_STREAMS))
    yield {"engine": "nano-vllm", "seconds of the start": time.monotonic() - began}
    settings = SamplingParams(temperature=1.0, max_tokens=_ANSWER, ignore_eos=True)
    for count in _STREAMS:
        for turn in range(2):
            source = random.Random(f"{count} {turn}")
            prompts = [source.choices(range(1000, 150000), k=_PROMPT) for _ in range(count)]
            began = time.perf_counter()
            answers = model.generate(prompts, settings, use_tqdm=False)
            seconds = time.perf_counter() - began
        rate = sum(len(answer["token_ids"]) for answer in answers) / seconds
        yield {
            "engine": "nano-vllm",
            "streams": count,
            "tokens/s": rate,
            "ours to it": rates[count] / rate,
        }
