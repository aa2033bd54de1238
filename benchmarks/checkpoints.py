"""Checkpoints of the benchmarks: real shapes, a real tokenizer, random weights.

    python -m benchmarks.checkpoints

It needs torch, transformers and tokenizers. The time of a step does not depend on the values of
the weights, so nothing has to be downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    GenerationConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from benchmarks import CACHE
from benchmarks.recent_shapes import RECENT, RECENT_CONTEXT, RECENT_TOKENS

__all__ = ["SHAPES", "Shape", "make", "make_recent"]

SEED = 20240607
CONTEXT = 4096
HEAD = 64
MXFP4_GROUP = 32
CORPUS_CHARACTERS = 40_000_000

UNKNOWN, BEGIN, END, PAD = "<unk>", "<s>", "</s>", "<pad>"
IMAGE = "<image>"
SPARE_ROWS = 64
SPECIAL_TOKENS = [UNKNOWN, BEGIN, END, "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", PAD]
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] }}{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama."""

    vocabulary: int
    """Rows of the embedding"""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    has_vision: bool = False
    """True if LLaVA-1.5's vision tower lies beside it: CLIP ViT-L/14 at 336 pixels, 576 tokens an
    image"""


SHAPES = {
    "bench-350m": Shape(32000, hidden=1024, layers=24, heads=16, kv_heads=4, feed_forward=2816),
    "bench-llava": Shape(
        32064, hidden=1024, layers=24, heads=16, kv_heads=4, feed_forward=2816, has_vision=True
    ),
    # Llama 3.2 1B's, with fewer tokens
    "bench-1b": Shape(32000, hidden=2048, layers=16, heads=32, kv_heads=8, feed_forward=8192),
    "bench-15m": Shape(8192, hidden=384, layers=6, heads=6, kv_heads=2, feed_forward=1024),
}


def make(shape: Shape, out: Path) -> None:
    """Write a Hugging Face model directory. The larger tokenizer takes about a minute.

    The model has tied embeddings, heads of 64 and a context of 4,096 tokens.
    """
    # LLaVA-1.5 too has rows for the image token and for more than there are
    tokenizer = train_tokenizer(shape.vocabulary - (SPARE_ROWS if shape.has_vision else 0))
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        **_special_ids(tokenizer),
    )
    torch.manual_seed(SEED)
    model = _with_vision(config, tokenizer, out) if shape.has_vision else LlamaForCausalLM(config)
    _write(model, tokenizer, out)


def make_recent(config: Callable[..., PreTrainedConfig], out: Path) -> None:
    """Write a Hugging Face model directory of a shape of RECENT."""
    tokenizer = train_tokenizer(RECENT_TOKENS)
    special = _special_ids(tokenizer)
    torch.manual_seed(SEED)
    values = config(max_position_embeddings=RECENT_CONTEXT, **special)
    is_packed = isinstance(values, GptOssConfig)
    with torch.device("meta" if is_packed else "cpu"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            values, dtype=torch.bfloat16
        )
    if is_packed:
        _write_packed(model, tokenizer, out)
        return
    _write(model, tokenizer, out)
    if isinstance(values, GraniteMoeHybridConfig):
        _name_layers(
            out / "config.json", {"linear_attention": "mamba", "full_attention": "attention"}
        )


def _name_layers(config: Path, names: Mapping[str, str]) -> None:
    """Give kinds of layers the names that published files have, which llama.cpp reads."""
    content = json.loads(config.read_text())
    content["layer_types"] = [names[kind] for kind in content["layer_types"]]
    config.write_text(json.dumps(content, indent=2))


def _special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Give the model random weights, and write it."""
    tokenizer.save_pretrained(out)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 0.02)
    model.bfloat16()
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, **_special_ids(tokenizer)
    )
    model.save_pretrained(out)
    print(f"{out}: {sum(weight.numel() for weight in model.parameters()):,} parameters")


def _write_packed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write random weights for a model that has none, experts in MXFP4 as in OpenAI's file."""
    tokenizer.save_pretrained(out)
    model.config.architectures = [type(model).__name__]
    model.config.quantization_config = {"quant_method": "mxfp4"}
    model.config.save_pretrained(out)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            groups = (experts, outputs, inputs // MXFP4_GROUP)
            codes = (*groups, MXFP4_GROUP // 2)
            tensors[f"{name}_blocks"] = torch.randint(256, codes, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(117, 122, groups, dtype=torch.uint8)
        elif name.endswith("norm.weight"):
            tensors[name] = torch.ones(weight.shape, dtype=torch.bfloat16)
        else:
            tensors[name] = torch.empty(weight.shape, dtype=torch.bfloat16).normal_(0.0, 0.02)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    print(f"{out}: {sum(tensor.nbytes for tensor in tensors.values()):,} bytes")


def _with_vision(
    config: LlamaConfig, tokenizer: PreTrainedTokenizerFast, out: Path
) -> PreTrainedModel:
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    vision = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        projection_dim=768,
        image_size=336,
        patch_size=14,
    )
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
    )
    processor.save_pretrained(out)
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=config,
            image_token_index=len(tokenizer) - 1,
            tie_word_embeddings=True,
        )
    )


def train_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on Python source. It puts a begin token before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise SystemExit(
            f"the corpus gives {tokenizer.get_vocab_size()} tokens, but {vocabulary} are needed: "
            "install more packages into this environment"
        )
    begin = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[begin]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE,
    )


def corpus() -> Iterator[str]:
    """Yield sources of the standard library and installed packages, shuffled by a fixed seed."""
    roots = (Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib")))
    files = sorted({file for root in roots for file in root.rglob("*.py")})
    random.Random(0).shuffle(files)
    characters = 0
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        yield text
        characters += len(text)
        if characters > CORPUS_CHARACTERS:
            return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--out", type=Path, default=CACHE / "models")
    parser.add_argument("--only", choices=[*SHAPES, *RECENT], help="make this checkpoint alone")
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else SHAPES:
        if name in RECENT:
            make_recent(RECENT[name], arguments.out / name)
        else:
            make(SHAPES[name], arguments.out / name)
