"""Checkpoints rewritten in the quantized formats of the Hugging Face hub."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from compressed_tensors.compressors import (
    BaseCompressor,
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.unit.engine.fp8_checkpoints import set_parameter

__all__ = ["FORMATS", "Format", "quantize"]

LEFT_OUT = ("embed_tokens", "lm_head", "mlp.gate.", "layers.0.")
Stored = tuple[Mapping[str, Tensor], Tensor]
"""Tensors by suffix of the layer's name, and the weight that they stand for"""


@dataclass(frozen=True)
class Format:
    quantization: dict[str, object]
    store: Callable[[Tensor], Stored]
    is_affine: bool = True


def codes_of(weight: Tensor, bits: int, group: int, zero: int | None) -> tuple[Tensor, ...]:
    """Return codes [outputs, inputs], and scales and zero points [outputs, groups]."""
    groups = weight.view(len(weight), -1, group)
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    if zero is not None:
        scales, zeros = (groups.abs().amax(2) / zero).half(), torch.full_like(zeros, zero)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return codes.view(weight.shape).int(), scales, zeros.int()


def weight_of(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    groups = codes.view(*scales.shape, -1)
    return ((groups - zeros[..., None]) * scales[..., None].float()).view(codes.shape)


def in_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [rows, columns] along the columns, lowest bits first."""
    parts = codes.view(len(codes), -1, 32 // bits).long()
    words = (parts << torch.arange(0, 32, bits)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def gptq(bits: int, group: int, zero: int | None, minus: int, *, shuffled: bool = False) -> Format:
    """zero: code of zero; None: for each group. minus: what is taken off stored zero points."""

    def store(weight: Tensor) -> Stored:
        size = group if group > 0 else weight.shape[1]
        order = torch.arange(weight.shape[1])
        if shuffled:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))
        codes, scales, zeros = codes_of(weight[:, order].contiguous(), bits, size, zero)
        back = torch.argsort(order)
        tensors = {
            "qweight": in_words(codes[:, back].contiguous(), bits).T.contiguous(),
            "qzeros": in_words((zeros - minus).T.contiguous(), bits),
            "scales": scales.T.contiguous(),
            "g_idx": (back // size).int(),
            "bias": torch.zeros(len(weight)),
        }
        return tensors, weight_of(codes, scales, zeros)[:, back]

    quantization: dict[str, object] = {"quant_method": "gptq", "bits": bits, "group_size": group}
    quantization["desc_act"] = shuffled
    if not minus:
        quantization["checkpoint_format"] = "gptq_v2"
    return Format(quantization, store, is_affine=not shuffled)


def awq(group: int) -> Format:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(codes: Tensor) -> Tensor:
        """Pack codes [outputs, rows] to words [rows, outputs / 8]."""
        rows = codes.T.contiguous()
        return in_words(rows.view(len(rows), -1, 8)[..., order].flatten(1), 4)

    def store(weight: Tensor) -> Stored:
        codes, scales, zeros = codes_of(weight, 4, group, None)
        tensors = {
            "qweight": packed(codes),
            "qzeros": packed(zeros),
            "scales": scales.T.contiguous(),
        }
        return tensors, weight_of(codes, scales, zeros)

    quantization: dict[str, object] = {"quant_method": "awq", "bits": 4, "group_size": group}
    return Format({**quantization, "version": "gemm", "zero_point": True}, store)


def compressed(
    name: str,
    compressor: type[BaseCompressor],
    bits: int,
    strategy: str,
    *,
    symmetric: bool = True,
    rounds_rows: bool = False,
) -> Format:
    group = 32 if strategy == "group" else None
    arguments = QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=group
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)

    def store(weight: Tensor) -> Stored:
        size = group or weight.shape[1]
        zero = 2 ** (bits - 1)
        _, scales, zeros = codes_of(weight, bits, size, zero - 1 if symmetric else None)
        scales = scales.float()
        if strategy == "tensor":
            scales = scales.amax()[None]
        state = {"weight": weight, "weight_scale": scales}
        if not symmetric:
            state["weight_zero_point"] = (zeros - zero).to(torch.int8)
        stored = compressor.compress(state, scheme)
        return stored, compressor.decompress(stored, scheme)["weight"].float()

    quantization: dict[str, object] = {"quant_method": "compressed-tensors", "format": name}
    written = scheme
    if rounds_rows:
        rows = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
        written = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=rows)
    quantization["config_groups"] = {"group_0": written.model_dump(mode="json")}
    return Format({**quantization, "ignore": ["lm_head"]}, store)


def four_bits(kind: str, *, nested: bool) -> Format:
    def store(weight: Tensor) -> Stored:
        # A block for each row: with AVX-512, the library decodes rows of one and a half wrongly.
        packed, state = bnb.quantize_4bit(
            weight.view(-1, 64), blocksize=64, quant_type=kind, compress_statistics=nested
        )
        decoded = bnb.dequantize_4bit(packed, state).view(weight.shape)
        state.shape = weight.shape
        tensors = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        return {"weight": packed, **tensors}, decoded

    return Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, store, is_affine=False)


def eight_bits(weight: Tensor) -> Stored:
    rows, scales, _ = bnb.int8_vectorwise_quant(weight.half())
    tensors = {"weight": rows, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, bnb.int8_vectorwise_dequant(rows, scales).float()


PACKED, PLAIN = PackedQuantizationCompressor, IntQuantizationCompressor
FORMATS = {
    "gptq": gptq(4, 32, None, 1),
    "gptq, 8 bits, symmetric": gptq(8, 32, 128, 1),
    "gptq, one group": gptq(4, -1, 8, 1),
    "gptq, v2": gptq(4, 32, None, 0),
    "gptq, act-order": gptq(4, 32, None, 1, shuffled=True),
    "awq": awq(32),
    "int4 by groups": compressed("pack-quantized", PACKED, 4, "group"),
    "int4 by groups, asymmetric": compressed("pack-quantized", PACKED, 4, "group", symmetric=False),
    "int8 by channels, packed": compressed("pack-quantized", PACKED, 8, "channel"),
    "int8 by channels": compressed("int-quantized", PLAIN, 8, "channel"),
    "int8 by channels, W8A8": compressed("int-quantized", PLAIN, 8, "channel", rounds_rows=True),
    "int8 by tensors": compressed("int-quantized", PLAIN, 8, "tensor"),
    "int8 by channels, asymmetric": compressed(
        "int-quantized", PLAIN, 8, "channel", symmetric=False
    ),
    "nf4": four_bits("nf4", nested=False),
    "nf4, nested": four_bits("nf4", nested=True),
    "fp4": four_bits("fp4", nested=False),
    "bitsandbytes int8": Format({"quant_method": "bitsandbytes"}, eight_bits),
}


def quantize(directory: Path, model: PreTrainedModel, stored_as: Format) -> None:
    """Rewrite the checkpoint in a format, and give the model the rounded weights."""
    file = directory / "model.safetensors"
    tensors, parameters = load_file(file), dict(model.named_parameters())
    for name, weight in list(tensors.items()):
        if weight.ndim != 2 or any(part in name for part in LEFT_OUT):
            continue
        stem = name.removesuffix("weight")
        parts, rounded = stored_as.store(tensors.pop(name).float())
        tensors |= {f"{stem}{suffix}": part.contiguous() for suffix, part in parts.items()}
        set_parameter(parameters, name, rounded)
    save_file(tensors, file)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = stored_as.quantization
    (directory / "config.json").write_text(json.dumps(config))
