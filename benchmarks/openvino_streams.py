"""Decoded tokens per second of OpenVINO GenAI's continuous batching, by streams.

In an environment of its own, with a model that optimum has converted:

    pip install openvino-genai "optimum[openvino]" nncf
    optimum-cli export openvino -m M --task text-generation-with-past --weight-format int4 \
        --group-size 128 --ratio 1.0 --sym M-int4
    python benchmarks/openvino_streams.py M-int4

Prompts have 128 random tokens. The time of prompts is taken off by a run of one token.
"""

import sys
import time

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

_PROMPT, _OUTPUT = 128, 48


def main() -> None:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GB
    scheduler.max_num_batched_tokens = 512
    scheduler.dynamic_split_fuse = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {}, {})
    random = np.random.default_rng(0)

    def seconds(streams: int, output: int) -> float:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output, True, False
        prompts = [
            openvino.Tensor(random.integers(10, 30_000, (1, _PROMPT), dtype=np.int64))
            for _ in range(streams)
        ]
        began = time.perf_counter()
        pipeline.generate(prompts, [config] * streams)
        return time.perf_counter() - began

    seconds(1, 4)
    for streams in (1, 8, 32):
        prompt = seconds(streams, 1)
        decode = seconds(streams, 1 + _OUTPUT) - prompt
        print(f"{streams} streams: {streams * _OUTPUT / decode:.0f} tokens/s")


if __name__ == "__main__":
    main()
