"""Random checkpoints of a Llama's shape in GPTQ's format, made on the device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.manifest import Manifest

__all__ = ["make_gptq"]

GROUP = 128
_WORD = 2**31


def make_gptq(out: Path, config: Mapping[str, Any], device: torch.device) -> Path:
    """Make a checkpoint in 4 bits, groups of 128 with zero points, unless it is there.

    The table of tokens, the norms and the output projection stay bfloat16.
    """
    if (out / "config.json").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    values = {**config, "dtype": "bfloat16"}
    spec = ModelSpec.from_config(values)
    generator = torch.Generator(device).manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for stored in Manifest.of(spec, next(iter(spec.family.names.roots))).tensors():
        if "_proj." in stored.name:
            stem = stored.name.removesuffix(".weight")
            outputs, inputs = stored.shape
            parts = _random_codes(outputs, inputs, generator)
            tensors |= {f"{stem}.{suffix}": part for suffix, part in parts.items()}
        elif len(stored.shape) == 1:
            tensors[stored.name] = torch.ones(stored.shape, dtype=torch.bfloat16)
        else:
            weight = torch.randn(stored.shape, generator=generator, device=device)
            tensors[stored.name] = (weight * stored.shape[-1] ** -0.5).bfloat16().cpu()
    save_file(tensors, out / "model.safetensors")
    values["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    (out / "config.json").write_text(json.dumps(values))
    return out


def _random_codes(outputs: int, inputs: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors of a weight whose numbers have the variance 1 / inputs."""
    groups = inputs // GROUP

    def words(rows: int, columns: int) -> Tensor:
        return torch.randint(
            -_WORD, _WORD, (rows, columns), generator=generator, device=generator.device
        ).int()

    scale = inputs**-0.5 / 21**0.5  # numbers from 0 to 15 minus zero points have the variance 42
    spread = 0.75 + 0.5 * torch.rand(groups, outputs, generator=generator, device=generator.device)
    return {
        "qweight": words(inputs // 8, outputs).cpu(),
        "qzeros": words(groups, outputs // 8).cpu(),
        "scales": (scale * spread).half().cpu(),
    }
