"""Plan of the check: the parts in their order, each with its question and its time.

This module imports no torch, so that the process that watches over the parts stays small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

__all__ = ["PARTS", "Part", "choose"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the check."""

    name: str
    function: str
    """`module:function`; the function takes a Context and yields rows"""
    seconds: float
    """Estimate on an H200, with the start of engines and the compilation of kernels"""
    question: str
    """Question that the part answers"""
    options: Mapping[str, str | int] = field(default_factory=dict)
    """Further arguments of the function, by name"""
    is_alone: bool = False
    """True if the part gets a process of its own, since it changes what others rely on"""


def choose(parts: Sequence[Part], names: str) -> list[Part]:
    """Return the parts of the names, in the order of `parts`.

    names: names separated by commas, in which `*` stands for any characters; empty = all parts.
    Raises ValueError if a name fits no part.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if not any(fnmatchcase(part.name, name) for part in parts):
            known = ", ".join(part.name for part in parts)
            raise ValueError(f"no part has the name {name!r}; there are: {known}")
    return [
        part for part in parts if not wanted or any(fnmatchcase(part.name, name) for name in wanted)
    ]


_HERE = "benchmarks.gpu.parts"

PARTS: Sequence[Part] = (
    Part(
        "ceilings",
        f"{_HERE}.ceilings:measure_ceilings",
        5,
        "What does this card read, copy and multiply at most?",
    ),
    Part(
        "fp8 products",
        f"{_HERE}.fp8_products:compare_products",
        60,
        "Which product of FP8 weights is the fastest at 1 to 1,024 rows?",
    ),
    Part(
        "packed products",
        f"{_HERE}.packed:compare_packed",
        60,
        "From how many rows on is it faster to decode 4-bit weights first?",
    ),
    Part(
        "packed",
        f"{_HERE}.packed:check_packed",
        45,
        "Are products with packed weights of every format those of the decoded weights?",
    ),
    Part(
        "prompt attention",
        f"{_HERE}.prompt_attention:compare_prompt_attention",
        90,
        "How far is the attention of prompts behind prefixes from the card's ceiling?",
    ),
    Part(
        "decode attention",
        f"{_HERE}.decode_attention:measure_decode_attention",
        25,
        "Do decodes read at the card's rate at mixed contexts and at 1,024 rows?",
    ),
    Part(
        "logits",
        f"{_HERE}.logits:measure_logits",
        5,
        "What do float32 logits out of the product cost, and what do they change?",
    ),
    Part(
        "streams 8b fp8",
        f"{_HERE}.streams:measure_streams",
        65,
        "How fast are 1 to 1,024 streams of an 8B model in FP8?",
        {"model": "8b", "weights": "fp8"},
    ),
    Part(
        "streams 8b",
        f"{_HERE}.streams:measure_streams",
        75,
        "How fast are 1 to 1,024 streams of an 8B model in bfloat16?",
        {"model": "8b", "weights": "full"},
    ),
    Part(
        "kv types",
        f"{_HERE}.kv_types:compare_kv_types",
        75,
        "What does a KV cache in FP8 change in the answers and the speed of an 8B model?",
    ),
    Part(
        "streams 8b gptq",
        f"{_HERE}.packed:measure_packed_streams",
        75,
        "How fast are streams of an 8B model in 4 bits beside bfloat16?",
    ),
    Part(
        "dependent launch 8b fp8",
        f"{_HERE}.dependent_launch:compare_launches",
        60,
        "What do dependent launches save of an 8B model's steps in FP8, and what are its kernels?",
        {"model": "8b", "weights": "fp8"},
    ),
    Part(
        "dependent launch 1b",
        f"{_HERE}.dependent_launch:compare_launches",
        40,
        "What do dependent launches save of a 1B model's steps, and what are a layer's kernels?",
        {"model": "1b"},
    ),
    Part(
        "delivery 8b",
        f"{_HERE}.delivery:measure_delivery",
        70,
        "How much of the loop's speed reaches clients of an 8B model over HTTP?",
        {"model": "8b"},
    ),
    Part(
        "delivery 1b",
        f"{_HERE}.delivery:measure_delivery",
        50,
        "How much of the loop's speed reaches clients of a 1B model over HTTP?",
        {"model": "1b"},
    ),
    Part(
        "adapters",
        f"{_HERE}.adapters:measure_adapters",
        35,
        "What does one LoRA stream cost the others?",
    ),
    Part(
        "long prompts",
        f"{_HERE}.long_prompts:measure_long_prompts",
        60,
        "How long do prompts of up to 128,000 tokens take, and what does a long neighbour cost?",
    ),
    Part(
        "qwen3 moe",
        f"{_HERE}.families:measure_family",
        30,
        "How fast is a mixture of 128 experts?",
        {"shape": "qwen3 moe"},
    ),
    Part(
        "gated delta net",
        f"{_HERE}.families:measure_family",
        35,
        "How fast are the layers of Qwen 3.5?",
        {"shape": "qwen3.5"},
    ),
    Part(
        "latent attention",
        f"{_HERE}.families:measure_family",
        35,
        "How fast are the layers of DeepSeek V2?",
        {"shape": "deepseek v2"},
    ),
    Part(
        "draft passes",
        f"{_HERE}.draft_passes:check_draft_passes",
        40,
        "Do graphs keep the draft tokens of models and MTP layers, and what do they save?",
    ),
    Part(
        "drafts",
        f"{_HERE}.drafts:measure_drafts",
        35,
        "What do drafts gain a stream that repeats itself, and cost its neighbours?",
    ),
    Part(
        "adapters once",
        f"{_HERE}.once:check_adapters",
        12,
        "Do streams with LoRA adapters and without compute what float32 does on the CPU?",
    ),
    Part(
        "images once",
        f"{_HERE}.once:check_images",
        15,
        "Do decoders read images of all kinds as float32 does on the CPU?",
    ),
    Part(
        "towers once",
        f"{_HERE}.towers:check_towers",
        15,
        "Do image encoders make the features that float32 makes on the CPU?",
    ),
    Part(
        "drafts once",
        f"{_HERE}.once:check_drafts",
        15,
        "Are drafted answers scored as float32 scores them on the CPU?",
    ),
    Part(
        "float16 once",
        f"{_HERE}.once:check_float16",
        15,
        "Do families compute in float16 what float32 does on the CPU?",
    ),
    Part(
        "two ranks once",
        f"{_HERE}.two_ranks:check_two_ranks",
        30,
        "Do two ranks on this card compute what float32 does on the CPU?",
    ),
    Part(
        "attention",
        f"{_HERE}.correctness:check_attention",
        25,
        "Does the attention of all kinds equal torch's in float32?",
    ),
    Part(
        "families",
        f"{_HERE}.correctness:check_families",
        65,
        "Does every family compute what float32 does on the CPU?",
    ),
    Part(
        "graphs",
        f"{_HERE}.correctness:check_graphs",
        12,
        "Do CUDA graphs change the tokens?",
    ),
    Part(
        "vectors",
        f"{_HERE}.encoders:check_vectors",
        20,
        "Do encoders make the vectors that float32 makes on the CPU?",
    ),
    Part(
        "fp8",
        f"{_HERE}.correctness:check_fp8",
        6,
        "Are products of FP8 weights those of the rounded numbers?",
    ),
    Part(
        "speed 8b fp8",
        f"{_HERE}.speed:measure_speed",
        85,
        "Where does the time of an 8B model in FP8 go, under loads of all kinds?",
        {"model": "8b", "weights": "fp8"},
    ),
    Part(
        "speed 8b",
        f"{_HERE}.speed:measure_speed",
        85,
        "Where does the time of an 8B model go, under loads of all kinds?",
        {"model": "8b"},
    ),
    Part(
        "speed 1b",
        f"{_HERE}.speed:measure_speed",
        35,
        "Where does the time of a 1B model go, under loads of all kinds?",
        {"model": "1b"},
    ),
    Part(
        "nano-vllm",
        f"{_HERE}.nano_vllm:measure_nano_vllm",
        150,
        "How fast is nano-vllm beside our engine, with a model of Qwen3 8B's shape?",
        is_alone=True,
    ),
    *(
        Part(
            name,
            f"{_HERE}.peers:measure_peer",
            seconds,
            f"How fast is {name} on this card, with the checkpoint of our 8B model?",
            {"peer": name},
            is_alone=True,
        )
        for name, seconds in (("transformers", 90), ("vllm", 150), ("sglang", 120))
    ),
)
"""All parts, the most unknown first"""
