"""Image encoders on the device, which transformers' modules compute, beside float32 on the CPU."""

from __future__ import annotations

import io
import random
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.context import Context, Rows, UnavailableError, release
from services.common.images import ImageError

__all__ = ["check_towers"]

_LEAST_COSINE = 0.99
_NEEDED = ("transformers", "PIL")
_TEXT: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_CLIP: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 112,
    "patch_size": 14,
}
_QWEN: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 4,
    "out_hidden_size": 256,
    "window_size": 112,
    "fullatt_block_indexes": [3],
}


def check_towers(context: Context) -> Rows:
    """Compare the least cosine of the features of image files of several sizes."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise UnavailableError(f"image encoders need {' and '.join(missing)}")
    for name in ("llava, clip", "qwen2.5 vl"):
        try:
            least = _least_cosine(context, name)
            yield {"encoder": name, "least cosine": least, "ok": least >= _LEAST_COSINE}
        except Exception as error:  # one encoder must not hide the others
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"[:200]
            yield {"encoder": name, "ok": False, "failure": failure}
        release()


def _least_cosine(context: Context, name: str) -> float:
    # imported here: not every machine has transformers
    from services.engine.vision.encoder import ImageEncoder

    path = _make(context.checkpoints / f"tower-{name.partition(',')[0]}", name)
    files = [_image(width, height) for width, height in ((112, 112), (180, 90), (40, 200))]
    dtype = torch.bfloat16 if context.on_gpu else torch.float32
    found = ImageEncoder.load(path, dtype, context.device).encode(files)
    exact = ImageEncoder.load(path, torch.float32, torch.device("cpu")).encode(files)
    least = 1.0
    for mine, known in zip(found, exact, strict=True):
        if isinstance(mine, ImageError) or isinstance(known, ImageError):
            raise AssertionError(f"an image was refused: {mine}")
        cosines = torch.cosine_similarity(mine.embeddings.float(), known.embeddings, dim=-1)
        least = min(least, cosines.min().item())
    return least


def _image(width: int, height: int) -> bytes:
    """Return an image file of coloured noise."""
    from PIL import Image

    pixels = random.Random(width).randbytes(3 * 8 * 8)
    file = io.BytesIO()
    Image.frombytes("RGB", (8, 8), pixels).resize((width, height)).save(file, "PNG")
    return file.getvalue()


def _make(out: Path, name: str) -> Path:
    """Make a checkpoint with random weights and an image processor, unless it is there."""
    if (out / "preprocessor_config.json").exists():
        return out
    import transformers

    torch.manual_seed(1)
    config: Any
    if name == "qwen2.5 vl":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
        text = transformers.Qwen2_5_VLTextConfig(**_TEXT, rope_parameters=rope)
        config = transformers.Qwen2_5_VLConfig(
            text_config=text, vision_config=_QWEN, image_token_id=900
        )
        processor: Any = transformers.Qwen2VLImageProcessor()
    else:
        config = transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**_TEXT),
            vision_config=transformers.CLIPVisionConfig(**_CLIP),
            image_token_index=900,
        )
        size = {"height": 112, "width": 112}
        processor = transformers.CLIPImageProcessor(size={"shortest_edge": 112}, crop_size=size)
    kind: Any = transformers.AutoModelForImageTextToText
    model = kind.from_config(config)
    model.save_pretrained(out)
    processor.save_pretrained(out)
    return out
