"""Image processor of Gemma 4 Unified as transformers has it, without torchvision."""

import ast
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

__all__ = ["Gemma4UnifiedImageProcessor"]

_MODULE = "transformers.models.gemma4_unified"


def _function_of_transformers(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of a module that can't be imported without torchvision."""
    spec = find_spec(_MODULE)
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).with_name("image_processing_gemma4_unified.py")
    functions: list[ast.stmt] = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    scope: dict[str, Any] = {"math": math, "torch": torch}
    exec(compile(ast.Module(functions, []), file, "exec"), scope)
    function: Callable[..., tuple[Tensor, Tensor]] = scope[name]
    return function


_MERGE = _function_of_transformers("patches_merge")


class Gemma4UnifiedImageProcessor(Gemma4ImageProcessorPil):
    """Gemma 4's processor of PIL's images, and the patches that transformers makes of its own."""

    def preprocess(self, images: Any, **options: Any) -> Any:
        output = super().preprocess(images, **options)
        tokens = []
        for patches, places, count in zip(
            *(output[key] for key in ("pixel_values", "image_position_ids")),
            output["num_soft_tokens_per_image"],
            strict=True,
        ):
            end = int(count) * self.pooling_kernel_size**2
            pixels, found = _MERGE(
                torch.as_tensor(patches)[:end], torch.as_tensor(places)[:end], int(count)
            )
            padding = (0, 0, 0, self.max_soft_tokens - int(count))
            tokens.append((pad(pixels, padding), pad(found, padding, value=-1)))
        output["pixel_values"] = torch.stack([pixels for pixels, _ in tokens])
        output["image_position_ids"] = torch.stack([places for _, places in tokens])
        return output
