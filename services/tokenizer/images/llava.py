"""LLaVA: one run of <image> for each image, whose number depends on the checkpoint alone.

Source: transformers' `LlavaProcessor`, and the image processors of CLIP, LLaVA and SigLIP.
"""

from collections.abc import Mapping

from services.common.contract import MAX_IMAGE_PIXELS
from services.common.images import ImageError
from services.common.json_values import Json
from services.tokenizer.images.image_family import Expansion, ImageFamily, ImageSize
from services.tokenizer.images.image_tokens import ImageTokens
from services.tokenizer.images.processor_settings import ProcessorSettings
from services.tokenizer.text.section import Section, SettingsError

__all__ = ["read_llava"]

_CLIP = "clip_vision_model"
_CROP: Mapping[str, Json] = {"height": 224, "width": 224}
_SHORTEST: Mapping[str, Json] = {"shortest_edge": 224}


def read_llava(settings: ProcessorSettings, tokens: ImageTokens) -> ImageFamily:
    """Return the family of a LLaVA checkpoint. Raises SettingsError."""
    mark = tokens.text("<image>", "image_token_id", "image_token_index")
    height, width, shortest = _output_size(settings.images)
    patch = settings.processor.count("patch_size") or settings.vision.count("patch_size")
    if patch is None:
        raise SettingsError("neither processor_config.json nor config.json has a patch_size.")
    run = (height // patch) * (width // patch) + _others(settings)
    if run < 1:
        raise SettingsError(f"an image of {width} x {height} pixels has no patches.")
    expansion = Expansion(mark, run)

    def expand(size: ImageSize) -> Expansion:
        if shortest is not None:
            _check_resized(size, shortest)
        return expansion

    return ImageFamily(mark, tokens.id(mark), mark, mark, (mark,), expand)


def _others(settings: ProcessorSettings) -> int:
    """Return the number of the vision tower's outputs that are not patches and not left out."""
    others = settings.processor.count("num_additional_image_tokens", least=0)
    if others is None:  # CLIP's class token
        others = int(settings.vision.text("model_type", _CLIP) == _CLIP)
    key = "vision_feature_select_strategy"
    strategy = settings.processor.text(key, settings.model.text(key, "default"))
    return others - (strategy == "default")


def _output_size(images: Section) -> tuple[int, int, int | None]:
    """Return height and width of a processed image, and the shortest edge before a crop."""
    is_siglip = images.text("image_processor_type", "").startswith("Siglip")
    default = _CROP if is_siglip else _SHORTEST
    size = images.size("size", number_means="shortest_edge", default=default)
    shortest = size.count("shortest_edge") if images.flag("do_resize", True) else None
    if images.flag("do_center_crop", not is_siglip):
        size = images.size("crop_size", number_means="square", default=_CROP)
    elif not images.flag("do_resize", True):
        size = Section(size.file, {})
    height, width = size.count("height"), size.count("width")
    if height is None or width is None:
        raise SettingsError(f"{images.file}: images have no fixed size.")
    return height, width, shortest


def _check_resized(size: ImageSize, shortest: int) -> None:
    """Refuse an image that is far larger before the crop than after it."""
    short, long = sorted((size.width, size.height))
    if shortest * (shortest * long // short) > MAX_IMAGE_PIXELS:
        raise ImageError(
            f"The image has {size.width} x {size.height} pixels, which is too narrow: cut it."
        )
