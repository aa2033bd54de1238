"""GGUF files of real shapes in Q4_0 with random blocks, to measure starts and steps.

    python -m benchmarks.quantized_checkpoints --only llama-3b --out FOLDER

The shapes are those of Llama 3.2 3B and of Llama 2 7B, with vocabularies of their sizes; llama-5b
is Llama 2 7B with 25 of its 32 layers, a file of 3 GB. It needs
gguf, transformers and tokenizers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType

from benchmarks import CACHE
from benchmarks.checkpoints import CHAT_TEMPLATE, SPECIAL_TOKENS, Shape, train_tokenizer

__all__ = ["SHAPES", "QuantizedShape", "write"]

_KIND = GGMLQuantizationType
_SCALE = 2.0**-7
"""Scale of every block, so that logits stay finite"""


@dataclass(frozen=True, slots=True)
class QuantizedShape(Shape):
    """Sizes of a Llama whose matrices are in Q4_0."""

    head_kind: GGMLQuantizationType | None = None
    """Type of the output matrix; None = it is the embedding, in Q6_K, as llama.cpp stores it"""


SHAPES = {
    "llama-3b": QuantizedShape(
        128256, hidden=3072, layers=28, heads=24, kv_heads=8, feed_forward=8192
    ),
    "llama-5b": QuantizedShape(
        32000,
        hidden=4096,
        layers=25,
        heads=32,
        kv_heads=32,
        feed_forward=11008,
        head_kind=_KIND.Q6_K,
    ),
    "llama-7b": QuantizedShape(
        32000,
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=32,
        feed_forward=11008,
        head_kind=_KIND.Q6_K,
    ),
}


def write(shape: QuantizedShape, path: Path) -> None:
    """Write the file."""
    writer = GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_context_length(131072 if shape.head_kind is None else 4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_rope_freq_base(500000.0 if shape.head_kind is None else 10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    _add_tokenizer(writer, shape.vocabulary)
    numbers = np.random.default_rng(7)
    tensors = list(_tensors(shape))
    for name, outputs, inputs, kind in tensors:
        if kind is _KIND.F32:
            writer.add_tensor_info(name, (inputs,), np.dtype(np.float32), inputs * 4)
            continue
        block, size = GGML_QUANT_SIZES[kind]
        rows = (outputs, inputs // block * size)
        writer.add_tensor_info(name, rows, np.dtype(np.uint8), outputs * rows[1], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, outputs, inputs, kind in tensors:
        if kind is _KIND.F32:
            writer.write_tensor_data(np.ones(inputs, np.float32))
        else:
            writer.write_tensor_data(_blocks(outputs, inputs, kind, numbers))
    writer.close()


def _tensors(
    shape: QuantizedShape,
) -> Iterator[tuple[str, int, int, GGMLQuantizationType]]:
    """Yield names, outputs, inputs and types."""
    keys = shape.hidden // shape.heads * shape.kv_heads
    tied = shape.head_kind is None
    yield "token_embd.weight", shape.vocabulary, shape.hidden, _KIND.Q6_K if tied else _KIND.Q4_0
    for layer in range(shape.layers):
        products = {
            "attn_q": (shape.hidden, shape.hidden),
            "attn_k": (keys, shape.hidden),
            "attn_v": (keys, shape.hidden),
            "attn_output": (shape.hidden, shape.hidden),
            "ffn_gate": (shape.feed_forward, shape.hidden),
            "ffn_up": (shape.feed_forward, shape.hidden),
            "ffn_down": (shape.hidden, shape.feed_forward),
        }
        for name, (outputs, inputs) in products.items():
            yield f"blk.{layer}.{name}.weight", outputs, inputs, _KIND.Q4_0
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", 1, shape.hidden, _KIND.F32
    yield "output_norm.weight", 1, shape.hidden, _KIND.F32
    if shape.head_kind is not None:
        yield "output.weight", shape.vocabulary, shape.hidden, shape.head_kind


def _blocks(
    outputs: int, inputs: int, kind: GGMLQuantizationType, numbers: np.random.Generator
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Return random blocks [outputs, bytes of a row] of one scale."""
    block, size = GGML_QUANT_SIZES[kind]
    blocks = np.frombuffer(numbers.bytes(outputs * inputs // block * size), np.uint8).copy()
    blocks = blocks.reshape(-1, size)
    at = 0 if kind is _KIND.Q4_0 else 208
    scale = _SCALE if kind is _KIND.Q4_0 else _SCALE / 512
    blocks[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(outputs, -1)


def _add_tokenizer(writer: GGUFWriter, vocabulary: int) -> None:
    tokenizer = train_tokenizer(vocabulary)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens: Sequence[str] = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = {token: tokens.index(token) for token in SPECIAL_TOKENS}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(special["<s>"])
    writer.add_eos_token_id(special["</s>"])
    writer.add_chat_template(CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantized_checkpoints", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=CACHE / "models")
    parser.add_argument("--only", choices=SHAPES, help="make this file alone")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in SHAPES if arguments.only is None else [arguments.only]:
        path = arguments.out / f"{name}-q4_0.gguf"
        write(SHAPES[name], path)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
