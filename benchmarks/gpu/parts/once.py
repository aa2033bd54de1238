"""Features of the engine that each run once, with small models, beside float32 on the CPU."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapters import random_adapter
from benchmarks.gpu.checkpoints import FAMILIES
from benchmarks.gpu.context import Context, Row, Rows, release
from benchmarks.gpu.parts.answers import (
    Image,
    Question,
    answer,
    differences,
    exact_engine,
    verdict,
)
from benchmarks.gpu.parts.loads import start
from services.engine.engine import Engine
from services.engine.model.adapters.peft_files import LowRankPair, PeftAdapter
from services.engine.model.loader import load_spec

__all__ = ["check_adapters", "check_drafts", "check_float16", "check_images", "some_prompts"]

_OUTPUT = 24
_ADAPTER_RANK, _ADAPTER_SCALE = 8, 10.0
_LEAST_CHANGE = 0.05
"""Least mean change of log-probabilities by an adapter or an image, in nats"""
_GRID = (4, 6)
"""Rows and columns of an image's tokens"""
_IMAGE_AT = 20
"""Index of an image's first token in its prompt"""


_TEXT: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
_DECODERS: Mapping[str, dict[str, Any]] = {
    "llava": {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": _TEXT | {"model_type": "llama"},
    },
    "qwen2.5 vl, a grid": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": _TEXT
        | {
            "model_type": "qwen2_5_vl_text",
            "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        },
    },
    "gemma3, sees ahead": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "mm_tokens_per_image": 24,
        "text_config": _TEXT
        | {
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 64,
            "sliding_window": 100,
            "sliding_window_pattern": 2,
        },
    },
    "qwen3 vl, added to layers": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": _TEXT
        | {
            "model_type": "qwen3_vl_text",
            "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
        },
    },
}
"""config.json of the decoders of vision-language models, without a tower"""
_ADDED_LAYERS = {"qwen3 vl, added to layers": 2}
"""Number of layers to whose outputs features are added, besides the embeddings"""


def check_float16(context: Context) -> Rows:
    """Compare families in float16. A dry run computes in float32."""
    names = ("llama", "qwen3", "gemma3", "qwen3 moe", "gpt-oss")
    for name in context.size(names, names[:1]):
        yield _row("family", name, partial(_float16, context, name))


def check_drafts(context: Context) -> Rows:
    """Compare the scores of answers that were drafted, and count the steps that drafts saved."""
    for name in context.size(("llama", "gemma3", "qwen3 moe"), ("llama",)):
        yield _row("family", name, partial(_drafts, context, name))


def check_adapters(context: Context) -> Rows:
    """Compare streams with two adapters and with none, which run in the same steps."""
    for name in context.size(("llama", "qwen3 moe"), ("llama",)):
        yield _row("family", name, partial(_adapters, context, name))


def check_images(context: Context) -> Rows:
    """Compare prompts with the features of an image, beside prompts of text."""
    for name in context.size(tuple(_DECODERS), tuple(_DECODERS)[:2]):
        yield _row("decoder", name, partial(_images, context, name))


def _row(kind: str, name: str, run: Callable[[], Row]) -> Row:
    try:
        return {kind: name, **run()}
    except Exception as error:  # one case must not hide the others
        traceback.print_exc()
        return {kind: name, "ok": False, "failure": f"{type(error).__name__}: {error}"[:200]}
    finally:
        release()


def _family(context: Context, name: str) -> Path:
    return context.checkpoint(f"family-{name}", FAMILIES[name], small=True)


def _dtype(context: Context) -> str:
    return "bfloat16" if context.on_gpu else "float32"


def some_prompts(*lengths: int) -> list[list[int]]:
    """Return random prompts of these lengths, the same at each call."""
    return [random.Random(length).choices(range(3, 800), k=length) for length in lengths]


def _float16(context: Context, name: str) -> Row:
    path = _family(context, name)
    questions = [Question(prompt) for prompt in some_prompts(7, 64, 300)]
    with start(context, path, dtype="float16" if context.on_gpu else "float32") as engine:
        answers, _ = answer(engine, questions, _OUTPUT)
    with exact_engine(path) as exact:
        return verdict(differences(exact, answers), has_experts=load_spec(path).has_experts)


def _drafts(context: Context, name: str) -> Row:
    """Answer without drafts, and then again with these answers as the prediction."""
    path = _family(context, name)
    questions = [Question(prompt) for prompt in some_prompts(7, 64, 300)]
    steps = []
    for speculate in ("off", "ngram"):
        with start(context, path, dtype=_dtype(context), speculate=speculate) as engine:
            answers, count = answer(engine, questions, 2 * _OUTPUT)
        release()
        steps.append(count)
        questions = [Question(each.question.prompt, prediction=each.tokens) for each in answers]
    with exact_engine(path) as exact:
        found = differences(exact, answers)
    row = verdict(found, has_experts=load_spec(path).has_experts)
    return {
        "steps without drafts": steps[0],
        "steps with drafts": steps[1],
        **row,
        "ok": bool(row["ok"]) and steps[1] < steps[0],
    }


def _adapters(context: Context, name: str) -> Row:
    path = _family(context, name)
    numbers = (1, 0, 2, 1)
    prompts = some_prompts(7, 64, 120, 300)
    questions = [Question(*pair) for pair in zip(prompts, numbers, strict=True)]
    # An engine that starts with adapters captures graphs of steps with them; these come later.
    with start(context, path, dtype=_dtype(context), adapters="later=later") as engine:
        _load_adapters(engine)
        answers, _ = answer(engine, questions, _OUTPUT)
    release()
    with exact_engine(path) as exact:
        _load_adapters(exact)
        found = differences(exact, answers)
        for each in answers:
            each.question = Question(each.question.prompt)
        without = differences(exact, answers)
    return {
        "change by adapters": (change := sum(without) / len(without)),
        **_changed(verdict(found, has_experts=load_spec(path).has_experts), change),
    }


def _load_adapters(engine: Engine) -> None:
    decoder = engine.loaded.model.decoder
    assert decoder.adapters is not None
    for number in (1, 2):
        pairs = random_adapter(decoder, _ADAPTER_RANK, number).pairs
        strong = {
            key: LowRankPair(pair.down, pair.up, _ADAPTER_SCALE * pair.scale)
            for key, pair in pairs.items()
        }
        decoder.adapters.load(number, PeftAdapter(strong))


def _changed(row: Row, change: float) -> Row:
    """Return a row that is out of its bounds if what should change the answers does not."""
    return row | {"ok": bool(row["ok"]) and change >= _LEAST_CHANGE}


def _images(context: Context, name: str) -> Row:
    """Compare two images, at the beginning of a long prompt and in a short one, and a text."""
    path = context.checkpoint(f"images-{name.partition(',')[0]}", _DECODERS[name])
    spec = load_spec(path)
    grid = _GRID if spec.has_grid_positions else None
    generator = torch.Generator().manual_seed(1)
    shape = (1 + _ADDED_LAYERS.get(name, 0), _GRID[0] * _GRID[1], spec.hidden_size)
    short, long, text = some_prompts(60, 300, 40)
    questions = [
        Question(prompt, image=Image(torch.randn(shape, generator=generator), _IMAGE_AT, grid))
        for prompt in (short, long)
    ]
    with start(context, path, dtype=_dtype(context)) as engine:
        answers, _ = answer(engine, [*questions, Question(text)], _OUTPUT)
    release()
    with exact_engine(path) as exact:
        found = differences(exact, answers)
        for each in answers:
            each.question = Question(each.question.prompt)
        without = differences(exact, answers[:2])
    return {
        "change by images": (change := sum(without) / len(without)),
        **_changed(verdict(found), change),
    }
